"""The thread that learns starts whatever has become of torch in its process."""

from __future__ import annotations

import asyncio
import concurrent.futures
import subprocess
import sys
import threading

import pytest

from talaria_edge import Device
from talaria_edge.agent import supervisor
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


@pytest.mark.parametrize(
    "sign", [StopIteration, GeneratorExit, KeyboardInterrupt, concurrent.futures.CancelledError, asyncio.CancelledError]
)
def test_what_an_event_loop_would_take_for_its_own_word_is_told_to_who_waits_for_the_work(sign):
    def work():
        raise sign

    async def wait():
        with learning_thread() as worker:
            await asyncio.wait_for(asyncio.get_running_loop().run_in_executor(worker, work), 60)

    with pytest.raises(RuntimeError, match=rf"raised {sign.__name__} here; let it raise an error"):
        asyncio.run(wait())


def test_a_program_whose_iterator_of_samples_has_come_to_its_end_is_told_so_by_its_device(tmp_path):
    device = Device("mqtt://127.0.0.1:1", fleet="watch", data=iter(()).__next__, state=tmp_path)
    with pytest.raises(RuntimeError, match=r"raised StopIteration here; let it raise an error"):
        asyncio.run(asyncio.wait_for(device.run(), 60))


def test_a_program_whose_source_of_samples_ends_it_is_told_so_by_its_device(tmp_path):
    told = []
    device = Device("mqtt://127.0.0.1:1", fleet="watch", data=lambda: sys.exit(3), state=tmp_path, report=told.append)
    with pytest.raises(RuntimeError, match=r"sys.exit\(3\) here; let it raise an error"):
        asyncio.run(device.run())
    assert [event["event"] for event in told] == ["failed"]


def test_an_agent_that_fails_after_its_apps_main_thread_has_ended_does_not_begin_again(tmp_path, monkeypatch):
    """No executor takes work then: it failed again and again, and the process never ended."""

    class Failing(supervisor.Agent):
        async def run(self):
            self.was_up = True
            raise RuntimeError("cannot schedule new futures after shutdown")

    monkeypatch.setattr(supervisor, "Agent", Failing)
    device = Device("mqtt://127.0.0.1:1", fleet="watch", data=lambda: ([[0.0]] * 4, [0, 1, 0, 1]), state=tmp_path)
    ended = threading.Thread()
    monkeypatch.setattr(threading, "main_thread", lambda: ended)
    with pytest.raises(RuntimeError, match="cannot schedule"):
        asyncio.run(asyncio.wait_for(device.run(), 60))


def test_a_program_that_is_stopped_once_more_while_its_device_ends_is_not_held_up(tmp_path):
    asked, given = threading.Event(), threading.Event()

    def load():
        asked.set()
        given.wait(60)
        return [[0.0]] * 4, [0, 1, 0, 1]

    device = Device("mqtt://127.0.0.1:1", fleet="watch", data=load, state=tmp_path)

    async def app():
        async with device:
            await device.run()

    async def stopped():
        running = asyncio.create_task(app())
        try:
            await asyncio.to_thread(asked.wait)
            running.cancel()
            await asyncio.sleep(0.1)  # it waits for the samples to come
            assert not running.done()
            running.cancel()
            await asyncio.wait([running], timeout=30)
            assert running.cancelled()
        finally:
            given.set()

    asyncio.run(stopped())
