"""The end of a connection."""

from __future__ import annotations

import asyncio


class Lost:
    """Set once, with a reason."""

    def __init__(self) -> None:
        self._event, self.reason = asyncio.Event(), ""

    def set(self, reason: str) -> None:
        """It is lost; the first reason stays."""
        if not self._event.is_set():
            self.reason = reason
            self._event.set()

    def is_set(self) -> bool:
        """Whether it is."""
        return self._event.is_set()

    async def wait_reason(self) -> str:
        """Wait until it is, and say why."""
        await self._event.wait()
        return self.reason
