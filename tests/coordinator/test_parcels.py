"""What a coordinator gives a device that has an older model: what changed, of a model of its own fleet, and no more."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from hashlib import sha256

import numpy as np
import pytest

from talaria.errors import StateError
from talaria.federated import run_model
from talaria.federated.global_model import encode_compact, encode_model
from talaria.federated.run import Run
from talaria.model import masks
from talaria.model.masks import ChannelMask
from talaria.model.spec import ModelSpec
from talaria.protocol import actions as a
from talaria.wire.changes import applied, are_changes
from talaria.wire.chunks import describe
from talaria.wire.messages import WantChanges, WantCompact
from talaria_coordinator.fleet.hands import Hands
from talaria_coordinator.fleet.parcels import BEFORE, Parcels
from talaria_coordinator.storage.blobs import BlobLost

RUN = Run(spec=ModelSpec("imu_cnn", (3, 16), 3), algorithm="fedper", download="fp16")
CHUNK = 1 << 16


def version(number: int) -> bytes:
    """Models near each other."""
    shared = {k: (v * np.float32(1 + number / 1000)).astype(v.dtype) for k, v in run_model.first_shared(RUN).items()}
    return encode_model(shared, "fp16")


def digest(data: bytes) -> bytes:
    return sha256(data).digest()


class Given:
    """Parcels of a fleet whose store has ``blobs`` by their sha256, and what is said to its machine."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.read: list[str] = []
        self.said: list[object] = []
        self.tasks: list[asyncio.Task[None]] = []

        async def put(event: object) -> None:
            self.said.append(event)

        def spawn(work: object) -> None:
            self.tasks.append(asyncio.ensure_future(work))

        hands = Hands(self.said.append, lambda *_, **__: None, spawn, put)
        self.parcels = Parcels(RUN, bytes, hands, lambda offer: None, self.get)

    def get(self, name: str) -> bytes:
        self.read.append(name)
        if name not in self.blobs:
            raise BlobLost(f"blobs: {name} is gone")
        return self.blobs[name]

    def publish(self, data: bytes) -> bytes:
        self.blobs[digest(data).hex()] = data
        self.parcels.publish(data, CHUNK)
        return digest(data)

    def answer(self, want: WantCompact) -> bytes | None:
        """What a device that asks with ``want`` may download; None where that is the whole model."""

        async def ask() -> None:
            self.parcels.ask(a.CompactAsked("anna", want))
            await asyncio.gather(*self.tasks)

        asyncio.run(ask())
        self.tasks.clear()
        made = self.said.pop()
        assert (made.want, made.devices) == (want, ("anna",))
        if made.cut is None:
            return None
        data = self.parcels.read(made.cut)
        assert digest(data) == made.cut.sha256
        return data


def mask(share: int = 2) -> bytes:
    layout = run_model.layout_of(RUN.spec)
    return masks.pack(ChannelMask(layout, {g: tuple(range(n // share)) for g, n in layout.sizes.items()}))


@pytest.fixture
def given() -> Given:
    return Given()


@pytest.mark.parametrize("narrow", [False, True])
def test_what_changed_makes_the_newer_file_of_the_older_to_the_byte(given, narrow):
    kept = mask() if narrow else b""
    files = [encode_compact(RUN, version(n), kept) if narrow else version(n) for n in range(3)]
    first = given.publish(version(0))
    given.publish(version(1))
    newest = given.publish(version(2))
    want = WantChanges(model_digest=newest, mask=kept, base=first, held=digest(files[0]))
    found = given.answer(want)
    assert are_changes(found)
    assert len(found) < 0.8 * len(files[2])
    assert applied(found, files[0]) == files[2]
    assert given.answer(want) == found


def test_a_blob_that_is_no_model_of_before_is_not_read_whoever_names_it(given):
    """Someone's update has the names and shapes of the model: what changed since would tell it."""
    update = version(5)
    given.blobs[digest(update).hex()] = update
    given.publish(version(0))
    newest = given.publish(version(1))
    want = WantChanges(model_digest=newest, mask=b"", base=digest(update), held=digest(update))
    assert given.answer(want) is None
    assert given.answer(WantChanges(model_digest=newest, mask=b"", base=newest, held=newest)) is None
    assert given.read == []


def test_so_many_models_before_are_known_and_no_more(given):
    every = [given.publish(version(n)) for n in range(BEFORE + 2)]
    for n, known in ((0, False), (1, True), (BEFORE, True)):
        found = given.answer(WantChanges(model_digest=every[-1], mask=b"", base=every[n], held=every[n]))
        assert (found is not None) == known, n


def test_where_the_older_is_gone_or_the_device_has_another_file_it_gets_what_it_would_have_asked_for(given):
    first = given.publish(version(0))
    newest = given.publish(version(1))
    before = given.blobs.pop(first.hex())
    assert given.answer(WantChanges(model_digest=newest, mask=b"", base=first, held=first)) is None
    with pytest.raises(StateError):
        given.get(first.hex())
    given.blobs[first.hex()] = before
    plain = given.answer(WantCompact(model_digest=newest, mask=mask()))
    other = WantChanges(model_digest=newest, mask=mask(), base=first, held=digest(version(0)))
    assert given.answer(other) == plain, "it has the whole older one"


def test_an_older_model_is_read_once_for_all_masks_and_not_kept_beyond_the_next_one(given):
    first, newest = (given.publish(version(n)) for n in range(2))
    every = [mask(share) for share in (1, 2, 4, 8)]

    def ask(base, number, newest):
        for kept in every:
            held = digest(encode_compact(RUN, version(number), kept))
            assert given.answer(WantChanges(model_digest=newest, mask=kept, base=base, held=held))

    ask(first, 0, newest)
    assert given.read == [first.hex()]
    newer = given.publish(version(2))
    ask(newest, 1, newer)
    ask(first, 0, newer)
    assert given.read == [first.hex(), newest.hex(), first.hex()]


def test_where_no_room_is_left_for_changes_the_part_goes_out_and_a_part_is_made_again_when_it_is_read(
    given, monkeypatch
):
    monkeypatch.setattr("talaria_coordinator.fleet.parcels.ROOM", 1)
    monkeypatch.setattr(Parcels, "size", 0)  # else four models
    first = given.publish(version(0))
    newest = given.publish(version(1))
    other = mask(4)
    (_, held), (part, narrower) = ([encode_compact(RUN, version(n), kept) for kept in (mask(), other)] for n in (0, 1))
    want = WantChanges(model_digest=newest, mask=other, base=first, held=digest(held))
    whole = replace(want, mask=b"", held=first)
    made = given.answer(whole)
    assert are_changes(made)
    assert given.answer(want) == narrower
    assert given.answer(WantCompact(model_digest=newest, mask=mask())) == part
    (gone,) = set(given.parcels._masks) - set(given.parcels._parts)
    assert given.parcels.read(describe(narrower, CHUNK)) == narrower
    assert digest(narrower) == gone
    assert given.parcels.read(describe(made, CHUNK)) == made, "changes stay until the next model"


def test_a_model_goes_to_all_at_once_only_where_its_changes_are_no_less(given):
    rng = np.random.default_rng(0)
    far = {k: rng.standard_normal(v.shape).astype(v.dtype) for k, v in run_model.first_shared(RUN).items()}
    assert given.parcels.to_all(version(0))
    given.publish(version(0))
    assert not given.parcels.to_all(version(1))
    assert given.parcels.to_all(encode_model({k: v * 1000 for k, v in far.items()}, "raw"))
