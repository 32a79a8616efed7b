"""Bodies on their way: chunks on flash until one is whole, checked, and becomes the body in force."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from talaria.errors import StateError
from talaria.protocol import events as e
from talaria.wire.chunks import Cut, FileAssembly
from talaria_edge.storage.state import DeviceStore


class Arrivals:
    """The unfinished bodies of one device, none above ``limit`` bytes."""

    def __init__(self, store: DeviceStore, limit: int) -> None:
        self._store, self._limit = store, limit
        self._parts: dict[str, FileAssembly] = {}

    def found(self, transfer: str, cut: Cut) -> frozenset[int]:
        """The chunks that are on flash, each checked."""
        return frozenset(self._part(transfer, cut).found())

    def found_if_readable(self, transfer: str, cut: Cut) -> frozenset[int]:
        """As :meth:`found`, and none where the disk refuses."""
        with suppress(StateError):
            return self.found(transfer, cut)
        return frozenset()

    def keep(self, action: e.KeepChunk) -> None:
        """Write one chunk. Raises :class:`~talaria.errors.StateError` where the disk refuses."""
        self._part(action.xfer, action.cut).put(action.index, action.data)

    async def finish(self, action: e.BodyComplete) -> None:
        """Check the whole body, and put it in force. Raises :class:`~talaria.errors.StateError` and
        :class:`~talaria.errors.WireError` where it cannot be."""
        # Taken out of the open parts, so that a newer body does not close this one while it is read.
        part = self._part(action.xfer, action.cut)
        del self._parts[action.xfer]
        with part:
            await asyncio.to_thread(part.finish)
        self._store.adopt_body(action.xfer)

    def drop(self, transfer: str) -> None:
        """Forget an unfinished body."""
        part = self._parts.pop(transfer, None)
        if part is not None:
            part.close()
        self._store.body_part(transfer).unlink(missing_ok=True)

    def close(self) -> None:
        """Close the files; what they hold stays."""
        for part in self._parts.values():
            part.close()

    def _part(self, transfer: str, cut: Cut) -> FileAssembly:
        part = self._parts.get(transfer)
        if part is None:
            part = FileAssembly(self._store.body_part(transfer), cut, self._limit)
            self._parts[transfer] = part
        return part
