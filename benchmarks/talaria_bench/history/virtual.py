"""An event loop whose time is a number: it never waits, and what happens depends on nothing but the seed.

Work for threads is done in the loop itself, some drawn time after it was asked for, and answered some drawn time later.
"""

from __future__ import annotations

import asyncio
from asyncio import base_events
from collections.abc import Callable
from random import Random
from typing import Any

THREAD_S = (0.0, 0.02)
"""Seconds until a thread takes up its work, and again until its answer is heard: at least and at most."""
LEARN_S = (0.2, 6.0)
"""The same for the work of an executor of one's own: that is learning."""


class StalledError(Exception):
    """Nothing is left that could ever happen."""


class _Jump:
    """In place of a selector: instead of waiting, time jumps."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        """Go on to the next thing that is due."""
        if timeout is None:
            raise StalledError("no task waits for anything that could come")
        self._loop.jump(max(0.0, timeout))
        return []


class VirtualLoop(base_events.BaseEventLoop):
    """See the module. ``random`` draws how long threads take."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self._virtual, self._random = 0.0, random
        self._clock_resolution = 1e-9  # on every machine
        self._selector = _Jump(self)
        self.wrong: list[dict[str, Any]] = []
        """What was raised where nobody listens."""
        self.set_exception_handler(lambda _, context: self.wrong.append(context))

    def time(self) -> float:
        """Virtual seconds since the beginning."""
        return self._virtual

    def jump(self, seconds: float) -> None:
        """Nothing will happen in these seconds: they are over."""
        self._virtual += seconds

    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Do the work here, later; a cancelled future is not worked for, as in a pool where it did not begin."""
        answer: asyncio.Future[Any] = self.create_future()
        span = THREAD_S if executor is None else LEARN_S
        self.call_later(self._random.uniform(*span), self._work, answer, func, args)
        return answer

    def _work(self, answer: asyncio.Future[Any], func: Callable[..., Any], args: tuple[Any, ...]) -> None:
        if answer.done():
            return
        try:
            found: Any = func(*args)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # noqa: BLE001  it is for whoever waits, as from a real pool
            self.call_later(self._random.uniform(*THREAD_S), _fail, answer, error)
        else:
            self.call_later(self._random.uniform(*THREAD_S), _set, answer, found)

    # What a loop of real files and sockets would do for this one.

    def _process_events(self, event_list: list[Any]) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """Nobody sleeps."""


def _set(answer: asyncio.Future[Any], found: Any) -> None:
    if not answer.done():
        answer.set_result(found)


def _fail(answer: asyncio.Future[Any], error: BaseException) -> None:
    if not answer.done():
        answer.set_exception(error)
