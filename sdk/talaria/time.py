"""What time it is for this program: by the machine's clocks, or by those that a simulation gives.

The programs of a fleet read time here, under the names of the standard library. A context variable holds the clocks, so
that several machines, each with its own, can live in one process: a task has those of the task that started it.
"""

from __future__ import annotations

import time as machine
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True)
class Clocks:
    """Seconds of a clock that only goes on, and seconds since 1970 of one that may be set."""

    monotonic: Callable[[], float] = machine.monotonic
    wall: Callable[[], float] = machine.time


_MACHINE = Clocks()
_CLOCKS: ContextVar[Clocks] = ContextVar("clocks", default=_MACHINE)


def monotonic() -> float:
    """As :func:`time.monotonic`."""
    return _CLOCKS.get().monotonic()


def time() -> float:
    """As :func:`time.time`."""
    return _CLOCKS.get().wall()


@contextmanager
def told_by(clocks: Clocks) -> Iterator[None]:
    """Time is told by ``clocks`` here, and in all tasks started here."""
    token = _CLOCKS.set(clocks)
    try:
        yield
    finally:
        _CLOCKS.reset(token)
