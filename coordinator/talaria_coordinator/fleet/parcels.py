"""What devices download: the global model, what each mask keeps of it, what changed of that, and the run's kit."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from hashlib import sha256

from talaria import time
from talaria.errors import ConfigError, ModelError, StateError, TalariaError
from talaria.federated.global_model import encode_compact
from talaria.federated.run import Run
from talaria.federated.run_model import algorithm_of
from talaria.protocol import actions as a
from talaria.protocol import events as e
from talaria.protocol.coordinator.kits import KitOffer
from talaria.wire.changes import are_changes, changes, pays
from talaria.wire.chunks import CHUNK, Cut, describe
from talaria.wire.messages import MAX_CHUNKS, WantChanges, WantCompact
from talaria_coordinator.fleet.hands import Hands

ROOM = 64 << 20
"""Bytes of parts that are held at a time, or four models if that is more; another is made again when it is read. So
many of changes are held beside them, which take longer to make: where there are more, parts go out instead."""
BEFORE = 8
"""So many models before the current one a device may have, and download what changed since."""
AT_ONCE = 2
"""So many parts are made at the same time: each holds two models meanwhile."""


def no_kit() -> bytes:
    """For a coordinator that has none."""
    raise ConfigError("this coordinator has no kit")


class Parcels:
    """The bytes behind what the machine announces; ``offered`` is told of the kit, or why there is none, and ``model``
    gives one of before by its sha256 (hex)."""

    def __init__(
        self,
        run: Run,
        make_kit: Callable[[], bytes],
        hands: Hands,
        offered: Callable[[KitOffer], None],
        model: Callable[[str], bytes],
    ) -> None:
        self._run, self._make_kit, self._hands, self._offered = run, make_kit, hands, offered
        self._older = lru_cache(AT_ONCE)(model)  # most who ask have the same one, and it may lie far away
        self._model: tuple[Cut, bytes] | None = None
        self._kit: tuple[Cut, bytes] | None = None
        self._found: bytes | None = None
        """The kit's file, also where the broker takes none so large."""
        self._bounds = CHUNK, CHUNK * MAX_CHUNKS
        self._seeks_kit = False
        self._before = deque[bytes](maxlen=BEFORE)
        self._masks: dict[bytes, bytes] = {}
        """Of each part of the model, by its sha256, the mask."""
        self._parts: OrderedDict[bytes, bytes] = OrderedDict()
        self._changes: dict[bytes, bytes] = {}
        self._asked: dict[WantCompact, set[str]] = {}
        self._makes = asyncio.Semaphore(AT_ONCE)
        self._narrow = False
        self._prunes = algorithm_of(run).card.prunes

    def to_all(self, data: bytes) -> bool:
        """Whether ``data`` may be sent to all at once as the next model: nobody asked for a part of this one, nobody's
        mask will shrink, and who has this one saves nothing by asking for what changed. Who needs less does not
        listen."""
        return not (self._narrow or self._prunes or (self._model is not None and pays(self._model[1], data)))

    @property
    def size(self) -> int:
        """Bytes of the global model; 0 before there is one."""
        return 0 if self._model is None else len(self._model[1])

    def is_kit(self, cut: Cut) -> bool:
        """Whether these are the bytes of the kit."""
        return self._kit is not None and self._kit[0].sha256 == cut.sha256

    def model_bytes(self, chunks: a.SendChunks) -> int:
        """How many bytes of a model, or of what changed of it, these are; the kit's are none."""
        return 0 if self.is_kit(chunks.cut) else sum(chunks.cut.place(index)[1] for index in chunks.indices)

    def is_model(self, cut: Cut) -> bool:
        """Whether these are the bytes of the whole global model, which is a blob too."""
        return self._model is not None and self._model[0].sha256 == cut.sha256

    def publish(self, data: bytes, chunk: int) -> Cut:
        """From now on ``data`` is the global model."""
        last, self._model = self._model, (describe(data, chunk), data)
        if last is not None and last[0].sha256 != self._model[0].sha256:
            self._before.append(last[0].sha256)
        self._narrow = False
        self._older.cache_clear()
        for of_the_last in (self._masks, self._parts, self._changes, self._asked):
            of_the_last.clear()
        return self._model[0]

    def read(self, cut: Cut) -> bytes:
        """The bytes of the current global model, of a part of it, or of the kit; none for what is no longer current."""
        for held in (self._kit, self._model):
            if held is not None and held[0].sha256 == cut.sha256:
                return held[1]
        mask = self._masks.get(cut.sha256)
        if mask is None or self._model is None:
            return self._changes.get(cut.sha256, b"")
        return self._keep(cut.sha256, self._parts.get(cut.sha256) or self._kept(self._model[1], mask))

    def _wanted(self, model: bytes, want: WantCompact) -> bytes:
        """What of ``model`` is wanted, or what changed of that where this is known, and less."""
        part = self._kept(model, want.mask)
        room = sum(map(len, self._changes.values())) < self._room
        if room and isinstance(want, WantChanges) and want.base in self._before:
            with suppress(StateError):  # the older one need not be there any more
                held = self._kept(self._older(want.base.hex()), want.mask)
                if sha256(held).digest() == want.held:
                    return changes(held, part) or part
        return part

    def _kept(self, model: bytes, mask: bytes) -> bytes:
        return encode_compact(self._run, model, mask) if mask else model

    def _keep(self, digest: bytes, part: bytes) -> bytes:
        self._parts[digest] = part
        self._parts.move_to_end(digest)
        while len(self._parts) > 1 and sum(map(len, self._parts.values())) > self._room:
            self._parts.popitem(last=False)
        return part

    @property
    def _room(self) -> int:
        return max(ROOM, 4 * self.size)

    # -- parts of the model

    def ask(self, asked: a.CompactAsked) -> None:
        """Make what is wanted, once for all who ask for the same meanwhile."""
        self._narrow |= bool(asked.want.mask)
        first = asked.want not in self._asked
        self._asked.setdefault(asked.want, set()).add(asked.device)
        if first:
            self._hands.spawn(self._make(asked))

    async def _make(self, asked: a.CompactAsked) -> None:
        want = asked.want
        if self._model is None or self._model[0].sha256 != want.model_digest:
            return
        whole, data = self._model
        try:
            async with self._makes:
                part = await asyncio.to_thread(self._wanted, data, want)
            cut = await asyncio.to_thread(describe, part, whole.chunk)
        except ModelError as error:
            self._hands.tell("error", device=asked.device, error=f"asked for a part of the model by no mask: {error}")
            part, cut = b"", None
        if self._model is None or self._model[0].sha256 != want.model_digest:
            return  # replaced meanwhile
        if cut is None or len(part) >= len(data):
            cut = None
        elif are_changes(part):
            self._changes[cut.sha256] = part
        else:
            self._masks[cut.sha256] = want.mask
            self._keep(cut.sha256, part)
        devices = tuple(sorted(self._asked.pop(want, ())))
        await self._hands.put(e.CompactMade(time.monotonic(), want, cut, devices))

    # -- the run's kit

    def ask_for_kit(self, device: str) -> None:
        """Find or make it, once, beside the rounds; whoever asked asks again."""
        if not self._seeks_kit:
            self._seeks_kit = True
            self._hands.tell("kit-asked", device=device)
            self._hands.spawn(self._find_kit())

    async def _find_kit(self) -> None:
        try:
            self._found = await asyncio.to_thread(self._make_kit)
        except TalariaError as error:
            self._have_no_kit(str(error))
        else:
            self._hands.tell("kit", bytes=len(self._found))
            self._cut_kit(self._found)

    def fit(self, chunk: int, most: int) -> None:
        """The kit is offered in chunks of this size from now on, where the broker lets so many bytes be sent."""
        known, self._bounds = self._bounds, (chunk, most)
        if self._found is not None and known != self._bounds:
            self._cut_kit(self._found)

    def _cut_kit(self, kit: bytes) -> None:
        chunk, most = self._bounds
        if len(kit) > most:
            self._kit, why = None, f"the run's kit has {len(kit)} bytes, and what the broker takes as one message lets"
            self._have_no_kit(f"{why} {most} be sent; raise its bound (Mosquitto: max_packet_size)")
        else:
            self._kit = describe(kit, chunk), kit
            self._offered(KitOffer(self._kit[0]))

    def _have_no_kit(self, why: str) -> None:
        self._offered(KitOffer(without=why))
        self._hands.tell("error", error=f"devices without torch cannot take part: {why}")
