""":class:`Downloads` of global models and kits: chunks are kept on flash until all is there, checked, and in force."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from talaria.errors import StateError
from talaria.protocol import actions as a
from talaria.wire.chunks import Assemblies, Cut

T = TypeVar("T")


class Downloads(Assemblies[str]):
    """Unfinished downloads of one kind, by transfer."""

    def found_if_readable(self, transfer: str, cut: Cut) -> frozenset[int]:
        """As :meth:`found`, and none where the disk refuses."""
        with suppress(StateError):
            return self.found(transfer, cut)
        return frozenset()

    def with_room(self, transfer: str, cut: Cut) -> frozenset[int] | None:
        """As :meth:`found`, once there is room for the other chunks; None where the disk refuses."""
        with suppress(StateError):
            found = self.found(transfer, cut)
            self.part(transfer, cut).reserve(found)
            return found
        return None

    async def finish(self, action: a.ModelComplete | a.KitComplete, adopt: Callable[[str], T]) -> T:
        """Check the whole, and let ``adopt`` put this transfer in force: what that says. Raises
        :class:`~talaria.errors.StateError` and :class:`~talaria.errors.WireError` where it cannot be."""
        with self.take(action.xfer, action.cut) as part:
            await asyncio.to_thread(part.finish)
        return await asyncio.to_thread(adopt, action.xfer)
