"""What every attack is held to: a clear refusal, little work, little memory."""

from __future__ import annotations

import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from talaria.errors import WireError

sys.path.insert(0, str(Path(__file__).parent))  # for siege.py, which several files here use

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


@pytest.fixture(scope="session")
def siege_keys(tmp_path_factory):
    """The keys of one fleet, and an empty store, for all sieges of this session."""
    from siege import keys

    return keys(tmp_path_factory.mktemp("keys"))


@pytest.fixture
def siege(tmp_path, siege_keys):
    """``siege(story, **options)`` runs ``async def story(s)`` on a :class:`siege.Siege` of its own; ``before(s)`` is
    called before its coordinator starts."""
    from siege import Siege

    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def run(story, before=lambda s: None, **options):
        one = Siege(tmp_path, siege_keys, **options)
        before(one)
        try:
            one.run(story)
        finally:
            one.close()
        return one

    yield run
    torch.set_num_threads(threads)
