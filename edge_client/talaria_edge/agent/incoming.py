""":class:`Incoming`: what a device downloads, from its first chunk until it is in force on flash."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from talaria import time
from talaria.errors import StateError, WireError
from talaria.protocol import actions as a
from talaria.protocol import events as e
from talaria.protocol.device.machine import DeviceState
from talaria.wire.chunks import Cut
from talaria_edge.config import DeviceConfig
from talaria_edge.storage.downloads import Downloads
from talaria_edge.storage.state import DeviceStore, UnfitError

Put = Callable[[object], Coroutine[Any, Any, None]]


class Incoming:
    """The downloads of one device. ``put`` gives its machine an event, ``tell`` its journal."""

    def __init__(
        self, config: DeviceConfig, store: DeviceStore, state: DeviceState, put: Put, tell: Callable[..., None]
    ) -> None:
        self._store, self._state, self._put, self._tell = store, state, put, tell
        self._pause = config.retry_s
        self._models = Downloads(store.model_part, config.max_model)
        self._kits = Downloads(store.kit_part, config.max_model)
        self._waiting: set[str] = set()
        """The models that wait for room on the disk."""
        self._one, self._due = asyncio.Lock(), 0
        """Models are put in force one after another, as they came; and how many are due."""

    def close(self) -> None:
        """Let go of the files; what came stays."""
        self._models.close()
        self._kits.close()

    def resume(self) -> frozenset[int]:
        """The chunks that lie intact on flash of the model that is on its way; what is of no use is removed."""
        partial, chunks = self._state.partial(), frozenset[int]()
        if partial is not None:
            chunks = self._models.found(*partial)
        self._store.clear_parts(keep=partial[0] if partial else "")
        return chunks

    def drop(self, transfer: str) -> None:
        """It comes no more."""
        self._models.drop(transfer)
        self._kits.drop(transfer)

    def keep(self, action: a.KeepChunk) -> Coroutine[Any, Any, None] | None:
        """Write a chunk; what is to be done where the disk refuses."""
        kit = self._state.kit is not None and self._state.kit.transfer == action.xfer
        try:
            part = (self._kits if kit else self._models).part(action.xfer, action.cut)
            part.put(action.index, action.data, known=True)
        except StateError as error:
            self._tell("error", error=str(error))
            if not kit:  # a kit that lacks something is found out when it is whole
                return self._fetch_again(action.xfer, action.cut)
        return None

    def assemble(self, action: a.ModelComplete) -> Coroutine[Any, Any, None]:
        """All of a global model is here: check it and put it in force, after those that came before it."""
        self._due += 1
        return self._assembled(action)

    async def _assembled(self, action: a.ModelComplete) -> None:
        async with self._one:
            refused = await self._put_in_force(action)
        if refused:
            await self._fetch_again(action.xfer, action.cut)

    async def _put_in_force(self, action: a.ModelComplete) -> bool:
        """Whether the disk refused."""
        try:
            if action.xfer in self._waiting:
                return False
            if not self._fetches(action.cut) and not self._store.model_part(action.xfer).exists():
                return False  # it was let go of while it waited
            made = await self._models.finish(action, partial(self._store.adopt_model, less=bool(action.of)))
        except UnfitError as error:
            self._tell("error", error=str(error))
            await self._put(e.ChangesUnfit(time.monotonic(), action.cut.sha256))
        except (StateError, WireError) as error:
            if self._fetches(action.cut):
                self._tell("error", error=str(error))
                return True
        else:
            held = made or action.cut.sha256
            kind = {"part": True} if action.of not in (b"", held) else {}
            kind |= {"changes": True} if made else {}
            self._tell("model", version=action.version, bytes=action.cut.size, **kind)
            # Of a model whose place another one takes at once, what changed is not asked for.
            known = held if self._due == 1 else b""
            await self._put(e.ModelStored(time.monotonic(), action.cut.sha256, action.of, known))
        finally:
            self._due -= 1
        return False

    async def _fetch_again(self, transfer: str, cut: Cut) -> None:
        """After the disk refused: look what is there, a while later."""
        if transfer in self._waiting:
            return
        self._waiting.add(transfer)
        try:
            found = await self._with_room(self._models, transfer, cut, self._fetches)
        finally:
            self._waiting.discard(transfer)
        if found is not None:
            await self._put(e.ModelDamaged(time.monotonic(), cut.sha256, found))

    def _fetches(self, cut: Cut) -> bool:
        """Whether this is the model that is on its way."""
        return self._state.fetch is not None and self._state.fetch.cut.sha256 == cut.sha256

    async def _with_room(
        self, downloads: Downloads, transfer: str, cut: Cut, wanted: Callable[[Cut], bool]
    ) -> frozenset[int] | None:
        """What is there, once there is room for the rest; None where it is not ``wanted`` any more. What is asked for
        before counts at the coordinator, which sends a model so often and no more."""
        found = None
        while found is None:
            await asyncio.sleep(self._pause)
            if not wanted(cut):
                return None
            found = downloads.with_room(transfer, cut)
        return found

    # -- the run's kit

    def kit_found(self, transfer: str, cut: Cut) -> e.KitFound:
        """What lies on flash of a kit that is on its way."""
        return e.KitFound(time.monotonic(), cut.sha256, self._kits.found_if_readable(transfer, cut))

    def _fetches_kit(self, cut: Cut) -> bool:
        """Whether this is the kit that is on its way."""
        kit = self._state.kit
        return kit is not None and kit.receiver is not None and kit.receiver.cut.sha256 == cut.sha256

    async def finish_kit(self, action: a.KitComplete) -> bool:
        """All of a kit is here: check it and put it on flash. False where that failed, and it is fetched again."""
        try:
            await self._kits.finish(action, self._store.adopt_kit)
        except (StateError, WireError) as error:
            self._tell("error", error=str(error))
            found = await self._with_room(self._kits, action.xfer, action.cut, self._fetches_kit)
            if found is not None:
                await self._put(e.KitFound(time.monotonic(), action.cut.sha256, found))
            return False
        return True
