"""Attacks on secure aggregation. Each runs twice: on the product, where it must fail, and with the flaw that it lives
on put back, where it must show a device's values; an attack that never worked would prove nothing."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "privacy"))  # for cohorts.py

from cohorts import AUTHORITY, COORDINATES, LAYOUT, NAMES, SHAPES, contributions, device, terms_of, who

from talaria.errors import AggregationError, ConfigError, WireError
from talaria.model.masks import ChannelMask, gather
from talaria.privacy import coordinator as coordinator_module
from talaria.privacy import device as device_module
from talaria.privacy import keystream, roster, shamir
from talaria.privacy.coordinator import CoordinatorHalf, NoSecretError
from talaria.privacy.device import DeviceHalf, begun
from talaria.privacy.in_process import Contribution, identities, plain_sum
from talaria.privacy.messages import Agreed, Agreement, Cohort, Delivery, Masked, Opening, Shares, Survivors
from talaria.privacy.roster import Roster, pair_key, seed_key
from talaria.privacy.terms import Terms
from talaria.tensors import Array
from talaria.wire.signing import Signer

VICTIM = "d0"
FLAW = pytest.mark.parametrize("flaw", [False, True], ids=["product", "flaw"])


def loosened(terms: Terms, **values: Any) -> Terms:
    """Terms that no check has seen."""
    for name, value in values.items():
        object.__setattr__(terms, name, value)
    return terms


class Round:
    """A hostile coordinator's view: it relays honestly until it is told to do otherwise."""

    def __init__(self, terms: Terms, given: Mapping[str, Contribution], kind: type[DeviceHalf] = DeviceHalf) -> None:
        self.terms, self.given = terms, given
        self.devices = {name: device(terms, name, one, kind) for name, one in given.items()}
        self.cohort = Cohort(tuple(half.advert().encode() for half in self.devices.values()))

    def share(self) -> None:
        self.roster = Roster.of(self.terms, COORDINATES, self.cohort, AUTHORITY.public)
        self.shares: dict[str, Shares] = {n: half.receive(self.cohort) for n, half in self.devices.items()}  # type: ignore[misc]
        self.members = tuple(sorted(self.devices))
        self.digest = self.roster.members_digest(self.members)
        self.blocks = self.roster.blocks(self.members)

    def delivery(self, target: str) -> Delivery:
        boxes = [(n, dict(s.boxes)[target]) for n, s in self.shares.items() if n != target]
        return Delivery(self.members, tuple(boxes))

    def mask(self) -> None:
        self.masked: dict[str, Masked] = {n: h.receive(self.delivery(n)) for n, h in self.devices.items()}  # type: ignore[misc]

    def open(self, survivors: tuple[str, ...], asked: tuple[str, ...]) -> dict[str, Opening]:
        """What ``asked`` give where all ``survivors`` among them are told of the same set."""
        words: dict[str, Agreed] = {n: self.devices[n].receive(Survivors(survivors)) for n in asked}  # type: ignore[misc]
        agreement = Agreement(tuple((n, word.signature) for n, word in sorted(words.items())))
        return {n: self.devices[n].receive(agreement) for n in asked}  # type: ignore[misc]

    def joined(self, openings: Mapping[str, Opening], kind: str, tier: int = 0) -> bytes:
        """The victim's secret of ``kind`` from what was opened."""
        holders, size = self.roster.holders(VICTIM), shamir.SHARE_BYTES
        found = {
            holders.index(giver) + 1: dict(getattr(one, kind))[VICTIM][tier * size : (tier + 1) * size]
            for giver, one in openings.items()
            if VICTIM in dict(getattr(one, kind))
        }
        return shamir.join(dict(list(found.items())[: self.roster.own_threshold]))

    def without_pairs(self, key: bytes) -> Array:
        """The victim's masked values without the masks that it shares with others."""
        values = np.frombuffer(self.masked[VICTIM].values, "<u4").copy()
        for other in self.roster.neighbours[VICTIM]:
            common = keystream.agreeing(key)(self.roster.adverts[other].mask_key)
            at = COORDINATES.within(self.blocks.of(VICTIM), self.blocks.of(VICTIM) & self.blocks.of(other))
            stream_key = pair_key(common, self.digest, "values", VICTIM, other)
            count = len(values) if at is None else len(at)
            stream = keystream.stream(stream_key, count, np.dtype(np.uint32))
            values[slice(None) if at is None else at] -= stream if other > VICTIM else -stream
        return values

    def truth(self) -> Array:
        """What the victim sent, unmasked."""
        one = self.given[VICTIM]
        state = begun(self.terms, COORDINATES, one.tensors, one.mask, one.weight, one.metrics)
        whole = np.frombuffer(state.values, "<u4")
        mine = COORDINATES.rows(one.mask)
        at = COORDINATES.within(mine, self.blocks.of(VICTIM))
        return whole if at is None else whole[at]


class Forgetful(DeviceHalf):
    """Agrees to any set, however often it is asked."""

    def receive(self, message: Any) -> Any:
        if isinstance(message, Survivors):
            self._state.survivors, self._state.agreed, self._state.opening = [], b"", b""
        return super().receive(message)


def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a cohort be of any size, whatever the threshold."""
    whole = Roster.of

    def unchecked(terms: Terms, coordinates: Any, cohort: Cohort, authority: bytes) -> Roster:
        asked = terms.threshold
        _ = terms.digest
        loosened(terms, threshold=len(cohort.adverts))
        try:
            return whole(terms, coordinates, cohort, authority)
        finally:
            loosened(terms, threshold=asked)

    monkeypatch.setattr(Roster, "of", staticmethod(unchecked))


def own(seed: bytes, count: int, digest: bytes) -> Array:
    return keystream.stream(seed_key(seed, digest), count, np.dtype(np.uint32))


@pytest.mark.parametrize("taken", ["mask_key", "share_key"])
@pytest.mark.parametrize("place", ["mask_key", "share_key"])
def test_no_device_begins_among_two_that_have_one_key(taken: str, place: str) -> None:
    """As where a coordinator lets two members in that are one, who would count for two among whom it hides."""
    terms = terms_of(3, tiers=1)
    attack = Round(terms, contributions(NAMES[:5], 1, terms, kinds=0))
    adverts = {name: half.advert() for name, half in attack.devices.items()}
    adverts["d1"] = replace(adverts["d1"], **{place: getattr(adverts["d0"], taken)}).signed(who()["d1"].signer)
    with pytest.raises(WireError, match="a key comes twice in the cohort"):
        attack.devices["d2"].receive(Cohort(tuple(one.encode() for one in adverts.values())))


@FLAW
def test_both_shares_of_one_device(flaw: bool) -> None:
    terms = terms_of(3, tiers=1)
    attack = Round(terms, contributions(NAMES[:5], 1, terms, kinds=0), Forgetful if flaw else DeviceHalf)
    attack.share()
    attack.mask()
    seeds = attack.open(NAMES[:5], NAMES[:5])
    seed = attack.joined(seeds, "seeds")
    if not flaw:
        with pytest.raises(WireError, match="other survivors than before"):
            attack.open(NAMES[1:5], NAMES[1:5])
        assert all(VICTIM not in dict(one.keys) for one in seeds.values())
        return
    key = attack.joined(attack.open(NAMES[1:5], NAMES[1:5]), "keys")
    shown = attack.without_pairs(key)
    shown -= own(seed, len(shown), attack.digest)
    assert np.array_equal(shown, attack.truth())


@FLAW
def test_swapped_keys(flaw: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator puts devices of its own beside one honest device, under its neighbours' names."""
    terms = terms_of(4)
    given = contributions(NAMES[:5], 2, terms, kinds=0)
    victim = device(terms, VICTIM, given[VICTIM])
    mine = identities("fleet", NAMES, Signer.generate())
    puppets = {
        name: DeviceHalf.begin(terms, COORDINATES, mine[name], one.tensors, mask=one.mask)
        for name, one in given.items()
        if name != VICTIM
    }
    everyone = {VICTIM: victim, **puppets}
    if not flaw:
        cohort = Cohort(tuple(half.advert().encode() for half in everyone.values()))
        with pytest.raises(WireError, match="did not enrol"):
            victim.receive(cohort)
        # Nor may a key within an honest advert be another one.
        honest = [device(terms, name, one).advert() for name, one in given.items() if name != VICTIM]
        other = replace(honest[0], mask_key=puppets["d1"].advert().mask_key)
        cohort = Cohort((victim.advert().encode(), other.encode(), *(one.encode() for one in honest[1:])))
        with pytest.raises(WireError, match="not signed by it"):
            victim.receive(cohort)
        return
    monkeypatch.setattr(roster, "vouched", lambda fleet, authority, data: True)
    coordinator = CoordinatorHalf(terms, COORDINATES, AUTHORITY.public)
    for half in everyone.values():
        coordinator.receive(half.advert())
    while coordinator.phase != "done":
        for name, message in coordinator.proceed().items():
            coordinator.receive(everyone[name].receive(message))
    known = {name: one for name, one in given.items() if name != VICTIM}
    known[VICTIM] = Contribution({k: np.zeros(s, np.float32) for k, s in SHAPES.items()})
    shown = coordinator.opened().sums - plain_sum(terms, COORDINATES, known).sums
    alone = {**known, **{n: Contribution({k: 0 * v for k, v in one.tensors.items()}) for n, one in known.items()}}
    alone[VICTIM] = given[VICTIM]
    assert np.array_equal(shown, plain_sum(terms, COORDINATES, alone).sums)


@FLAW
def test_split_survivor_sets(flaw: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One half of the devices is told that the victim is there, the other that it left."""
    names = NAMES[:6]
    terms = terms_of(3 if flaw else 4, tiers=1)
    given = contributions(names, 3, terms, kinds=0)
    if not flaw:
        loose = terms_of(3, tiers=1)
        with pytest.raises(WireError, match="more than half"):
            Round(loose, given).share()
        attack = Round(terms, given)
        attack.share()
        attack.mask()
        attack.open(names[:4], names[:4])
        with pytest.raises(WireError, match="4 at least"):
            attack.open(names[4:], names[4:])
        attack.devices["d4"].receive(Survivors(names[2:]))
        with pytest.raises(WireError, match="4 must"):
            attack.devices["d4"].receive(Agreement(()))
        return
    attack = Round(terms, given)
    any_size(monkeypatch)
    attack.share()
    attack.mask()
    seed = attack.joined(attack.open(names[:3], names[:3]), "seeds")
    key = attack.joined(attack.open(names[3:], names[3:]), "keys")
    shown = attack.without_pairs(key)
    shown -= own(seed, len(shown), attack.digest)
    assert np.array_equal(shown, attack.truth())


@FLAW
def test_a_seed_used_twice(flaw: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device is asked for two updates under the same masks: their difference would show."""
    terms = terms_of(3, tiers=1)
    given, later = (contributions(NAMES[:4], seed, terms, kinds=0) for seed in (4, 5))
    if flaw:
        monkeypatch.setattr(device_module.secrets, "token_bytes", bytes)
    attack = Round(terms, {VICTIM: given[VICTIM]})
    again = device(terms, VICTIM, later[VICTIM])
    monkeypatch.undo()
    others = {name: device(terms, name, given[name]) for name in NAMES[1:4]}
    attack.given, attack.devices = given, {VICTIM: attack.devices[VICTIM], **others}
    attack.cohort = Cohort(tuple(half.advert().encode() for half in attack.devices.values()))
    attack.share()
    attack.mask()
    if not flaw:
        with pytest.raises(WireError, match="what this device said"):
            again.receive(attack.cohort)
        kept = DeviceHalf.load(attack.devices[VICTIM].save(), terms, COORDINATES, who()[VICTIM])
        assert kept.receive(attack.delivery(VICTIM)) == attack.masked[VICTIM]
        with pytest.raises(WireError, match="masked once"):
            kept.receive(Delivery(NAMES[:3], ()))
        with pytest.raises(WireError, match="another cohort"):
            kept.receive(Cohort(attack.cohort.adverts[:3]))
        return
    again.receive(attack.cohort)
    second = again.receive(attack.delivery(VICTIM))
    assert isinstance(second, Masked)
    difference = np.frombuffer(second.values, "<u4") - np.frombuffer(attack.masked[VICTIM].values, "<u4")
    before = attack.truth()
    attack.given = later
    assert np.array_equal(difference, attack.truth() - before)


@FLAW
def test_a_cohort_below_the_threshold(flaw: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator says that everybody but the victim left."""
    terms = terms_of(3, tiers=1)
    if flaw:
        _ = terms.digest
        loosened(terms, threshold=1, holders=1)
        any_size(monkeypatch)
        monkeypatch.setattr(device_module, "require_terms", lambda *_: None)
    given = contributions(NAMES[:4], 6, terms, kinds=0)
    attack = Round(terms, given)
    attack.share()
    attack.mask()
    alone = (VICTIM,)
    if not flaw:
        with pytest.raises(WireError, match="3 at least"):
            attack.open(alone, alone)
        with pytest.raises(WireError, match="3 at least"):
            attack.devices["d1"].receive(Survivors(("d1", "d2")))
        with pytest.raises(ConfigError, match="owner asks for"):
            DeviceHalf.begin(terms_of(2), COORDINATES, who()[VICTIM], given[VICTIM].tensors, least=3)
        few = terms_of(6, degree=2, own_threshold=2)  # whatever the cohort, two neighbours know all that hides it
        with pytest.raises(ConfigError, match=r"own_threshold=2 of them.*owner asks for"):
            DeviceHalf.begin(few, COORDINATES, who()[VICTIM], given[VICTIM].tensors, least=3)
        return
    opening = attack.open(alone, alone)[VICTIM]
    seed = dict(opening.seeds)[VICTIM][1 : shamir.SHARE_BYTES]
    shown = np.frombuffer(attack.masked[VICTIM].values, "<u4") - own(seed, len(attack.truth()), attack.digest)
    for other, key in opening.keys:  # of a threshold of one, a share is the secret
        common = keystream.agreeing(key[1:])(attack.roster.adverts[VICTIM].mask_key)
        stream_key = pair_key(common, attack.digest, "values", VICTIM, other)
        shown -= keystream.stream(stream_key, len(shown), np.dtype(np.uint32))
    assert np.array_equal(shown, attack.truth())


@FLAW
def test_a_block_held_by_one(flaw: bool) -> None:
    """Only the victim keeps a channel: the sum over it would be the victim's own values."""
    terms = terms_of(3, holders=2, tiers=3)
    _ = terms.digest
    given = contributions(NAMES[:4], 7, terms, kinds=0)
    narrow = ChannelMask(LAYOUT, {"a": (0, 1, 2, 3), "b": (0, 1, 2, 3)})
    cut = {n: Contribution(gather(dict(one.tensors), narrow), narrow) for n, one in given.items() if n != VICTIM}
    given = {VICTIM: given[VICTIM], **cut}
    lonely = COORDINATES.rows(None) & ~COORDINATES.rows(narrow)
    if flaw:
        loosened(terms, holders=1)
    coordinator = CoordinatorHalf(terms, COORDINATES, AUTHORITY.public)
    devices = {
        name: DeviceHalf.begin(terms, COORDINATES, who()[name], one.tensors, mask=one.mask, least=1)
        for name, one in given.items()
    }
    for half in devices.values():
        coordinator.receive(half.advert())
    sizes = {}
    while coordinator.phase != "done":
        for name, message in coordinator.proceed().items():
            said = devices[name].receive(message)
            if isinstance(said, Masked):
                sizes[name] = len(said.values) // 4
            coordinator.receive(said)
    opened = coordinator.opened()
    there = COORDINATES.values(lonely)
    truth = np.frombuffer(begun(terms, COORDINATES, given[VICTIM].tensors, None, 1, {}).values, "<u4")
    assert np.array_equal(opened.sums[there], truth[there]) is flaw
    assert opened.rows[lonely].all() == flaw
    if not flaw:
        assert not opened.sums[there].any()
        assert sizes[VICTIM] == COORDINATES.count(~lonely)  # they never left the device


def test_a_block_whose_holders_left_stays_closed() -> None:
    """Three hold a channel and one of them leaves: what two are left with is below the three that it takes."""
    terms = terms_of(3, holders=3, tiers=3)
    given = contributions(NAMES[:5], 8, terms, kinds=0)
    narrow = ChannelMask(LAYOUT, {"a": (0, 1, 2, 3), "b": (0, 1, 2, 3)})
    given |= {n: Contribution(gather(dict(given[n].tensors), narrow), narrow) for n in ("d3", "d4")}
    attack = Round(terms, given)
    attack.share()
    attack.mask()
    survivors = ("d0", "d1", "d3", "d4")
    openings = attack.open(survivors, survivors)
    rare = COORDINATES.rows(None) & ~COORDINATES.rows(narrow)
    closed = set(np.unique(attack.blocks.tier[rare]).tolist())
    opened = attack.blocks.open_tiers(survivors)
    assert closed
    assert not closed & set(opened)
    sizes = {len(shares) for one in openings.values() for _, shares in one.seeds}
    assert sizes == {len(opened) * shamir.SHARE_BYTES}  # nobody gave a share of a closed tier's seed


def weak_seed(key: bytes) -> int:
    """28 bits of a key, as a fold of its text leaves them."""
    return int.from_bytes(key[:4], "little") & 0x0FFFFFFF


def weak_stream(seeds: Array, at: int | Array) -> Array:
    """The numbers at the places ``at`` from 28-bit seeds: a cheap mixer, as any generator is that 28 bits seed."""
    x = seeds * np.uint32(0x9E3779B1) + (np.asarray(at, np.uint64) * 0x85EBCA6B & 0xFFFFFFFF).astype(np.uint32)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x2C1B3C6D)
    x ^= x >> np.uint32(13)
    return x


def weak_mask(total: Array, keys: Sequence[tuple[bytes, bool]]) -> None:
    """The flaw in the place of :func:`keystream.mask`."""
    for key, plus in keys:
        one = weak_stream(np.array([weak_seed(key)], np.uint32), np.arange(len(total)))
        (np.add if plus else np.subtract)(total, one, out=total)


def brute_forced(captured: Array, span: int) -> int | None:
    """The one seed of 28 bits whose stream was added to numbers as small as honest ones; None where there is none."""
    wide = np.uint32(span)
    for start in range(0, 1 << 28, 1 << 18):
        left = np.arange(start, start + (1 << 18), dtype=np.uint32)
        for at, number in enumerate(captured):
            left = left[number - weak_stream(left, at) + wide <= 2 * wide]
            if not len(left):
                break
        else:
            return int(left[0])
    return None


@FLAW
def test_a_brute_force_of_28_bits(flaw: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the traffic of a round of three, of whom one left once it had shared: the coordinator knows the masks that the
    victim shared with it, and the victim's own. What is left hides a small update under one mask alone, and a right
    seed shows itself: values of 22 bits in a modulus of 32. All 2^28 seeds are tried in seconds."""
    terms, span = terms_of(2, tiers=1), 1 << 21
    if flaw:
        monkeypatch.setattr(keystream, "mask", weak_mask)
    given = {
        name: Contribution({k: v / 2000 for k, v in one.tensors.items()})  # as small as updates are
        for name, one in contributions(NAMES[:3], 9, terms, kinds=0).items()
    }
    attack = Round(terms, given)
    attack.share()
    attack.mask()
    openings = attack.open(NAMES[:2], NAMES[:2])
    assert np.abs(attack.truth().view(np.int32)).max() <= span
    captured = np.frombuffer(attack.masked[VICTIM].values, "<u4").copy()
    captured -= own(attack.joined(openings, "seeds"), len(captured), attack.digest)
    size, holders = shamir.SHARE_BYTES, attack.roster.holders("d2")
    found = {holders.index(giver) + 1: dict(one.keys)["d2"][:size] for giver, one in openings.items()}
    common = keystream.agreeing(shamir.join(found))(attack.roster.adverts[VICTIM].mask_key)
    known = pair_key(common, attack.digest, "values", VICTIM, "d2")
    captured -= keystream.stream(known, len(captured), np.dtype(np.uint32))  # d0 added it, as the lesser name
    seed = brute_forced(captured[:12], span)
    if not flaw:
        assert seed is None
        return
    assert seed is not None
    shown = captured - weak_stream(np.array([seed], np.uint32), np.arange(len(captured)))
    assert np.array_equal(shown, attack.truth())


@FLAW
def test_lying_about_who_left(flaw: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The victim's update came, and the coordinator says that it did not: the key opens, the own mask must hold."""
    terms = terms_of(3, tiers=1)
    if flaw:  # no mask of its own
        monkeypatch.setattr(device_module, "seed_key", lambda seed, members: bytes(32))
    attack = Round(terms, contributions(NAMES[:4], 10, terms, kinds=0))
    attack.share()
    attack.mask()
    key = attack.joined(attack.open(NAMES[1:4], NAMES[1:4]), "keys")
    shown = attack.without_pairs(key)
    if flaw:
        shown -= keystream.stream(bytes(32), len(shown), np.dtype(np.uint32))
    assert np.array_equal(shown, attack.truth()) is flaw
    with pytest.raises(WireError, match="among them"):
        attack.devices[VICTIM].receive(Survivors(NAMES[1:4]))


@FLAW
def test_weights_out_of_bounds(flaw: bool) -> None:
    """A weight beyond the largest would count many times, and could wrap the sum around."""
    terms = terms_of(3, most_weight=100)
    given = contributions(NAMES[:4], 11, terms, kinds=0)
    lie = Contribution(given[VICTIM].tensors, None, 1e8)
    if not flaw:
        for weight in (1e8, 101.0, 0.0, -1.0, 0.5, float("nan")):
            with pytest.raises(AggregationError, match="must be a whole number"):
                device(terms, VICTIM, Contribution(given[VICTIM].tensors, None, weight))
        return
    _ = terms.digest
    loosened(terms, most_weight=1 << 30)
    devices = {VICTIM: device(terms, VICTIM, lie)}
    loosened(terms, most_weight=100)
    devices |= {name: device(terms, name, one) for name, one in given.items() if name != VICTIM}
    coordinator = CoordinatorHalf(terms, COORDINATES, AUTHORITY.public)
    for half in devices.values():
        coordinator.receive(half.advert())
    while coordinator.phase != "done":
        for name, message in coordinator.proceed().items():
            coordinator.receive(devices[name].receive(message))
    others = sum(int(one.weight) for name, one in given.items() if name != VICTIM)
    assert coordinator.opened().weights == (10**8 + others,)  # it outweighs all others together


@pytest.mark.parametrize("kind", ["shares", "boxes", "values", "silent"])
@FLAW
def test_a_device_that_sends_garbage(kind: str, flaw: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of five spoils its shares, its boxes or its update: the round is repaired, or fails; it never shows anything.
    The flaw: no promises, no seals and no signatures, by which wrong ones are told from right ones."""
    if flaw:
        right = keystream.unsealed

        def unsealed(key: bytes, box: bytes, context: bytes) -> bytes:
            try:
                return right(key, box, context)
            except WireError:
                return box[:-16]

        monkeypatch.setattr(keystream, "unsealed", unsealed)
        for module in (device_module, coordinator_module):
            monkeypatch.setattr(module, "commitment", lambda seed: bytes(32))
        monkeypatch.setattr(CoordinatorHalf, "_require", lambda self, message: None)
    terms = terms_of(3, tiers=2)
    names = NAMES[:5]
    given = contributions(names, 12, terms, kinds=1)
    devices = {name: device(terms, name, one) for name, one in given.items()}
    coordinator = CoordinatorHalf(terms, COORDINATES, AUTHORITY.public)
    for half in devices.values():
        coordinator.receive(half.advert())
    signer = who()["d1"].signer
    while coordinator.phase != "done":
        for name, message in coordinator.proceed().items():
            said: Any = devices[name].receive(message)
            if name == "d1" and kind == "boxes" and isinstance(said, Shares):
                said = replace(said, boxes=tuple((n, bytes(len(box))) for n, box in said.boxes)).signed(signer)
            if name == "d1" and kind == "shares" and isinstance(said, Opening):
                spoilt = tuple((n, bytes(len(share) - 1) + b"\x07") for n, share in said.seeds)
                said = replace(said, seeds=spoilt).signed(signer)
            if name == "d1" and kind == "values" and isinstance(said, Masked) and flaw:
                coordinator.receive(replace(said, values=bytes(len(said.values))))  # unsigned, and it is added up
                continue
            if name == "d1" and kind == "values" and isinstance(said, Masked):
                with pytest.raises(WireError, match="need"):
                    coordinator.receive(replace(said, values=said.values[4:]).signed(signer))
                with pytest.raises(WireError, match="signature"):
                    coordinator.receive(replace(said, values=bytes(len(said.values))))
                continue
            if name == "d1" and kind == "silent" and isinstance(said, Masked | Opening):
                continue
            coordinator.receive(said)
    if flaw and kind != "silent":
        plain = plain_sum(terms, COORDINATES, given)
        assert not np.array_equal(coordinator.opened().sums, plain.sums)  # and nobody notices
        return
    if kind == "boxes":  # nobody can give a share of its seeds but itself
        with pytest.raises(NoSecretError, match="do not give its secret") as found:
            coordinator.opened()
        assert found.value.device == "d1"
        return
    opened = coordinator.opened()
    assert coordinator.opened() is opened  # worked out once
    assert list(coordinator.liars) == (["d1"] if kind == "shares" else [])
    left = set(names) - ({"d1"} if kind in ("values", "silent") else set())
    plain = plain_sum(terms, COORDINATES, given, members=names, survivors=left)
    assert np.array_equal(opened.sums, plain.sums)
