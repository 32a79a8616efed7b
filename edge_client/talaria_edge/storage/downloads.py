""":class:`Downloads` of global models and kits: chunks are kept on flash until all is there, checked, and in force."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

from talaria.errors import StateError
from talaria.protocol import actions as a
from talaria.wire.chunks import Assemblies, Cut

T = TypeVar("T")


class Downloads(Assemblies[str], Generic[T]):
    """Unfinished downloads of one kind, by transfer; ``adopt`` puts a whole one in force, and says what of it."""

    def __init__(self, path: Callable[[str], Path], limit: int, adopt: Callable[..., T]) -> None:
        super().__init__(path, limit)
        self._adopt = adopt

    def found_if_readable(self, transfer: str, cut: Cut) -> frozenset[int]:
        """As :meth:`found`, and none where the disk refuses."""
        with suppress(StateError):
            return self.found(transfer, cut)
        return frozenset()

    async def finish(self, action: a.ModelComplete | a.KitComplete, *told: object) -> T:
        """Check the whole, and put it in force: what ``adopt`` says, given the transfer and what it is ``told``. Raises
        :class:`~talaria.errors.StateError` and :class:`~talaria.errors.WireError` where it cannot be."""
        with self.take(action.xfer, action.cut) as part:
            await asyncio.to_thread(part.finish)
        return await asyncio.to_thread(self._adopt, action.xfer, *told)
