"""What every attack is held to: a clear refusal, little work, little memory."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from talaria.errors import WireError

sys.path.insert(0, str(Path(__file__).parent))  # for siege.py and limits.py, which several files here use


@pytest.fixture
def refused() -> Callable[..., str]:
    """``refused(call)``: the message of the WireError, within the :mod:`limits` of this thread's CPU and of memory.

    The fastest of three runs counts, since the caches of a busy machine are not the decoder's fault.
    """
    from limits import CPU_SECONDS, MEMORY_MIB, allowed, cpu_seconds

    def check(call: Callable[[], object]) -> str:
        def once() -> None:
            with pytest.raises(WireError):
                call()

        spent = min(cpu_seconds(once) for _ in range(3))
        assert spent < CPU_SECONDS or spent < allowed(), f"took {spent:.3f} s of CPU"
        tracemalloc.start()
        try:
            with pytest.raises(WireError) as caught:
                call()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < MEMORY_MIB * 2**20, f"took {peak / 2**20:.0f} MiB"
        assert len(str(caught.value)) < 400
        return str(caught.value)

    return check


@pytest.fixture(scope="session")
def siege_keys(tmp_path_factory):
    """The keys of one fleet, and an empty store, for all sieges of this session."""
    from siege import keys

    return keys(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="session")
def liar_keys(tmp_path_factory):
    """The same for a fleet of liars."""
    from siege import LIARS, keys

    return keys(tmp_path_factory.mktemp("keys"), LIARS)


@pytest.fixture
def siege(tmp_path, request):
    """``siege(story, **options)`` runs ``async def story(s)`` on a :class:`siege.Siege` of its own; ``before(s)`` is
    called before its coordinator starts."""
    from siege import Siege

    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def run(story, before=lambda s: None, **options):
        keys = request.getfixturevalue(options.pop("keys", "siege_keys"))
        one = Siege(tmp_path, keys, **options)
        before(one)
        try:
            one.run(story)
        finally:
            one.close()
        return one

    yield run
    torch.set_num_threads(threads)
