"""Downloads of global models and kits: chunks are kept on flash until all is there, checked, and in force."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from talaria.errors import StateError
from talaria.protocol import actions as a
from talaria.wire.chunks import Assemblies, Cut
from talaria_edge.storage.state import DeviceStore


class Downloads(Assemblies[str]):
    """Unfinished downloads of one kind, by transfer."""

    def found_if_readable(self, transfer: str, cut: Cut) -> frozenset[int]:
        """As :meth:`found`, and none where the disk refuses."""
        with suppress(StateError):
            return self.found(transfer, cut)
        return frozenset()


class Arrivals(Downloads):
    """The unfinished global models of one device, by transfer."""

    def __init__(self, store: DeviceStore, limit: int) -> None:
        super().__init__(store.model_part, limit)
        self._store = store

    async def finish(self, action: a.ModelComplete) -> None:
        """Check the whole global model, and put it in force. Raises :class:`~talaria.errors.StateError` and
        :class:`~talaria.errors.WireError` where it cannot be."""
        with self.take(action.xfer, action.cut) as part:
            await asyncio.to_thread(part.finish)
        self._store.adopt_model(action.xfer)


class Kits(Downloads):
    """The run's kit on its way, by transfer."""

    def __init__(self, store: DeviceStore, limit: int) -> None:
        super().__init__(store.kit_part, limit)
        self._store = store

    async def finish(self, action: a.KitComplete) -> None:
        """As :meth:`Arrivals.finish`, for a kit."""
        with self.take(action.xfer, action.cut) as part:
            await asyncio.to_thread(part.finish)
        self._store.adopt_kit(action.xfer)
