"""What another thread has an event loop do: in the order of its calls, with one waking for all that waits."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any


class Post:
    """Calls for ``loop``, put in line by any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._line: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._woken = False

    def put(self, what: Callable[..., None], *args: Any) -> None:
        """Have the event loop do this, once it has done all that is in line; where it is closed, nothing happens."""
        self._line.append((what, args))
        if not self._woken:
            self._woken = True
            with suppress(RuntimeError):  # it is closed: nobody listens any more
                self._loop.call_soon_threadsafe(self._take)

    def _take(self) -> None:
        self._woken = False  # first: what comes from now on wakes again
        try:
            while self._line:
                what, args = self._line.popleft()
                what(*args)
        finally:
            if self._line:  # one of them raised, which the event loop tells
                self._loop.call_soon(self._take)
