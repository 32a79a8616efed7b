"""What devices download: the global model, what each mask keeps of it, and the run's kit."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable

from talaria import time
from talaria.errors import ModelError, TalariaError
from talaria.federated.global_model import encode_compact
from talaria.federated.rounds import algorithm_of
from talaria.federated.run import Run
from talaria.protocol import actions as a
from talaria.protocol import events as e
from talaria.protocol.coordinator.kits import KitOffer
from talaria.wire.chunks import Cut, describe
from talaria_coordinator.fleet.hands import Hands

ROOM = 64 << 20
"""Bytes of parts that are held at a time, or four models if that is more; another is made again when it is read."""


class Parcels:
    """The bytes behind what the machine announces; ``offered`` is told of the kit, or why there is none."""

    def __init__(
        self, run: Run, make_kit: Callable[[], bytes], hands: Hands, offered: Callable[[KitOffer], None]
    ) -> None:
        self._run, self._make_kit, self._hands, self._offered = run, make_kit, hands, offered
        self._model: tuple[Cut, bytes] | None = None
        self._kit: tuple[Cut, bytes] | None = None
        self._seeks_kit = False
        self._masks: dict[bytes, bytes] = {}
        """Of each part of the model, by its sha256, the mask."""
        self._parts: OrderedDict[bytes, bytes] = OrderedDict()
        self._asked: dict[bytes, set[str]] = {}
        self._narrow = False
        self._prunes = algorithm_of(run).card.prunes

    @property
    def to_all(self) -> bool:
        """Whether the next model may be sent to all at once: nobody asked for a part of this one, and nobody's mask
        will shrink. Who needs a part does not listen."""
        return not (self._narrow or self._prunes)

    @property
    def size(self) -> int:
        """Bytes of the global model; 0 before there is one."""
        return 0 if self._model is None else len(self._model[1])

    def is_kit(self, cut: Cut) -> bool:
        """Whether these are the bytes of the kit."""
        return self._kit is not None and self._kit[0].sha256 == cut.sha256

    def is_model(self, cut: Cut) -> bool:
        """Whether these are the bytes of the whole global model, which is a blob too."""
        return self._model is not None and self._model[0].sha256 == cut.sha256

    def publish(self, data: bytes, chunk: int) -> Cut:
        """From now on ``data`` is the global model."""
        self._model = describe(data, chunk), data
        self._masks, self._narrow = {}, False
        self._parts.clear()
        self._asked.clear()
        return self._model[0]

    def read(self, cut: Cut) -> bytes:
        """The bytes of the current global model, of a part of it, or of the kit; none for what is no longer current."""
        for held in (self._kit, self._model):
            if held is not None and held[0].sha256 == cut.sha256:
                return held[1]
        mask = self._masks.get(cut.sha256)
        if mask is None or self._model is None:
            return b""
        return self._keep(cut.sha256, self._parts.get(cut.sha256) or encode_compact(self._run, self._model[1], mask))

    def _keep(self, digest: bytes, part: bytes) -> bytes:
        self._parts[digest] = part
        self._parts.move_to_end(digest)
        most = max(ROOM, 4 * self.size)
        while len(self._parts) > 1 and sum(map(len, self._parts.values())) > most:
            self._parts.popitem(last=False)
        return part

    # -- parts of the model

    def ask(self, asked: a.CompactAsked) -> None:
        """Make what a mask keeps, once for all who ask for it meanwhile."""
        self._narrow = True
        first = asked.mask not in self._asked
        self._asked.setdefault(asked.mask, set()).add(asked.device)
        if first:
            self._hands.spawn(self._make(asked))

    async def _make(self, asked: a.CompactAsked) -> None:
        if self._model is None or self._model[0].sha256 != asked.model_digest:
            return
        whole, data = self._model
        try:
            part = await asyncio.to_thread(encode_compact, self._run, data, asked.mask)
            cut = await asyncio.to_thread(describe, part, whole.chunk)
        except ModelError as error:
            self._hands.tell("error", device=asked.device, error=f"asked for a part of the model by no mask: {error}")
            part, cut = b"", None
        if self._model is None or self._model[0].sha256 != asked.model_digest:
            return  # replaced meanwhile
        if cut is not None and len(part) < len(data):
            self._masks[cut.sha256] = asked.mask
            self._keep(cut.sha256, part)
        else:
            cut = None
        devices = tuple(sorted(self._asked.pop(asked.mask, ())))
        await self._hands.put(e.CompactMade(time.monotonic(), asked.model_digest, asked.mask, cut, devices))

    # -- the run's kit

    def ask_for_kit(self, device: str, chunk: Callable[[], int]) -> None:
        """Find or make it, once, beside the rounds; whoever asked asks again."""
        if not self._seeks_kit:
            self._seeks_kit = True
            self._hands.tell("kit-asked", device=device)
            self._hands.spawn(self._find_kit(chunk))

    async def _find_kit(self, chunk: Callable[[], int]) -> None:
        try:
            kit = await asyncio.to_thread(self._make_kit)
        except TalariaError as error:
            self._offered(KitOffer(without=str(error)))
            self._hands.tell("error", error=f"devices without torch cannot take part: {error}")
            return
        self._kit = describe(kit, chunk()), kit
        self._offered(KitOffer(self._kit[0]))
        self._hands.tell("kit", bytes=len(kit))

    def cut_anew(self, chunk: int) -> None:
        """Offer the kit, where there is one, in chunks of this size."""
        if self._kit is not None:
            self._kit = describe(self._kit[1], chunk), self._kit[1]
            self._offered(KitOffer(self._kit[0]))
