"""Faults of the chaos bench count where they happened."""

import asyncio
import io
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from talaria_bench.fleet import chaos
from talaria_bench.fleet.chaos import Chaos
from talaria_bench.fleet.faults import COORDINATOR, Fault
from talaria_bench.fleet.programs import Program

KILL = Fault(0, "kill-worker", "0", 1, 0.0, 0.0, 0.0)


def fleet(folder: Path, then: Callable[[Chaos], Awaitable[None]]) -> Chaos:
    """A fleet of which nothing was started, with one ingest worker."""
    one = Chaos(folder, 1, 1, 2, 3, "fedper", lambda _: None, fresh=True, workers=1)
    one._journal = io.StringIO()
    one._programs = {COORDINATOR: Program(COORDINATOR, (), folder, one._heard)}
    asyncio.run(then(one))
    return one


@contextmanager
def worker() -> Iterator[subprocess.Popen[bytes]]:
    """A process that lives until it is killed."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_worker_that_is_away_is_killed_once_it_is_back(tmp_path: Path) -> None:
    """It was told as killed at once, whoever was there."""
    with worker() as process:

        async def killed(one: Chaos) -> None:
            asyncio.get_running_loop().call_later(
                0.2, one._heard, COORDINATOR, {"event": "ingest", "worker": 0, "pid": process.pid}
            )
            await one._happen(KILL)

        assert fleet(tmp_path, killed)._happened == [KILL]
        assert process.wait(60) == -9


def test_a_worker_of_a_coordinator_that_ended_is_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number may be that of another process by then."""
    monkeypatch.setattr(chaos, "WORKER_S", 0.1, raising=False)
    with worker() as process:

        async def ended(one: Chaos) -> None:
            one._heard(COORDINATOR, {"event": "ingest", "worker": 0, "pid": process.pid})
            one._heard(COORDINATOR, {"event": "ended", "status": -9})
            await one._happen(KILL)

        assert fleet(tmp_path, ended)._happened == []
        assert process.poll() is None
