"""The thread that learns starts whatever has become of torch in its process."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from talaria_edge import Device
from talaria_edge.agent.worker import learning_thread

KEPT_OUT = "import sys; sys.modules['torch'] = None"
HALF_WAY = """
import threading, sys, time
threading.Thread(target=__import__, args=("torch",)).start()
while "torch" not in sys.modules:
    time.sleep(0.001)
assert not hasattr(sys.modules["torch"], "get_num_threads")
"""


@pytest.mark.parametrize("torch", [KEPT_OUT, HALF_WAY], ids=["kept out", "half imported"])
def test_a_thread_that_learns_starts_where_torch_is_kept_out_or_just_being_imported(torch):
    code = f"""{torch}
from talaria_edge.agent.worker import learning_thread
print(learning_thread().submit(sum, (1, 2)).result())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "3\n", done.stderr


def test_code_of_an_app_that_ends_its_program_while_learning_ends_that_work_alone():
    worker = learning_thread()
    with pytest.raises(RuntimeError, match=r"sys.exit\('goodbye'\) here; let it raise an error"):
        worker.submit(sys.exit, "goodbye").result()
    assert worker.submit(sum, (1, 2)).result() == 3
    worker.shutdown()


def test_a_program_whose_source_of_samples_ends_it_is_told_so_by_its_device(tmp_path):
    device = Device("mqtt://127.0.0.1:1", fleet="watch", data=lambda: sys.exit(3), state=tmp_path)
    with pytest.raises(RuntimeError, match=r"sys.exit\(3\) here; let it raise an error"):
        asyncio.run(device.run())
