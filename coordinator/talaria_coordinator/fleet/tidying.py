"""What nothing names any more is freed beside the rounds: a bucket takes long to list, and may not answer."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

from talaria import time
from talaria.errors import StateError
from talaria_coordinator.storage.blobs import Blobs
from talaria_coordinator.storage.store import Store

EVERY_S = 60.0
"""So often at most all blobs are looked through: those of a while are all still there."""
OLD_S, OLD_ALONE_S = 3600.0, 300.0
"""From this age on, in seconds, what nothing names is freed: that of others may be named late; and where this process
alone puts blobs, which knows what it has just put whatever its age."""


class Tidying:
    """Frees blobs of ``store`` that nothing names, and are older than an hour, or five minutes where this process puts
    them ``alone``; ``tell`` hears what refuses."""

    def __init__(self, store: Store, blobs: Blobs, tell: Callable[..., Any], *, alone: bool) -> None:
        self._store, self._blobs, self._tell = store, blobs, tell
        self._old_s = OLD_ALONE_S if alone else OLD_S
        self._next = 0.0

    def due(self, now: float) -> bool:
        """Whether :meth:`work` is to begin at ``now``, a clock that only goes on; it is asked once for each."""
        if now < self._next:
            return False
        self._next = math.inf
        return True

    async def work(self) -> None:
        """Look through all of them."""
        try:
            await asyncio.to_thread(lambda: self._blobs.gc(self._store.blobs_in_use(), older_s=self._old_s))
        except StateError as error:
            self._tell("error", error=str(error))
        finally:
            self._next = time.monotonic() + EVERY_S
