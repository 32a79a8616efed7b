"""What every attack is held to: a clear refusal, little work, little memory."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable

import pytest

from talaria.errors import WireError

CPU_SECONDS = 0.1
MEMORY = 64 * 2**20


@pytest.fixture
def refused() -> Callable[..., str]:
    """``refused(call)``: the message of the WireError, within 100 ms of this thread's CPU and 64 MiB of memory.

    The fastest of three runs counts, since the caches of a busy machine are not the decoder's fault.
    """

    def check(call: Callable[[], object]) -> str:
        spent = []
        for _ in range(3):
            begin = time.thread_time()
            with pytest.raises(WireError):
                call()
            spent.append(time.thread_time() - begin)
        assert min(spent) < CPU_SECONDS, f"took {min(spent):.3f} s of CPU"
        tracemalloc.start()
        try:
            with pytest.raises(WireError) as caught:
                call()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < MEMORY, f"took {peak / 2**20:.0f} MiB"
        assert len(str(caught.value)) < 400
        return str(caught.value)

    return check
