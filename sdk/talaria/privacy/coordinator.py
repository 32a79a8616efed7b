"""The coordinator's half of secure aggregation: it collects, relays, and opens one sum; it decides and never sends.

Phases follow one another when :meth:`CoordinatorHalf.proceed` is called: when all have come (:attr:`complete`), or at
a deadline, with those who have. It keeps a running sum of masked updates, O(model), and :meth:`CoordinatorHalf.save`
is all that a restart needs. Nothing that it holds before the end tells more than who takes part and which masks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal

import msgpack
import numpy as np

from talaria.errors import AggregationError, StateError, WireError
from talaria.model.masks import ChannelMask
from talaria.privacy import keystream, shamir
from talaria.privacy.blocks import Blocks
from talaria.privacy.coordinates import Coordinates, Places
from talaria.privacy.device import commitment
from talaria.privacy.messages import (
    Advert,
    Agreed,
    Agreement,
    Cohort,
    Delivery,
    Masked,
    Message,
    Opening,
    Shares,
    Survivors,
    decode,
)
from talaria.privacy.roster import Roster, cover, pair_key, read_advert, seed_key, sign
from talaria.privacy.terms import Terms
from talaria.tensors import Array

FORMAT = 1
Phase = Literal["adverts", "shares", "masked", "agreed", "openings", "done"]
_NEXT: dict[str, Phase] = {
    "adverts": "shares",
    "shares": "masked",
    "masked": "agreed",
    "agreed": "openings",
    "openings": "done",
}


@dataclass(frozen=True)
class Opened:
    """What a round came to: sums over ``survivors`` and nothing else.

    ``sums`` are whole numbers modulo the grid's, one for each value of the unpruned model, zero where ``rows`` (bool)
    is False: there nothing opened. ``holders`` (int64, rows) counts the survivors who hold a row. ``weights`` is the
    weight of the survivors of each mask class (empty where all weigh the same), ``metrics`` the means.
    """

    blocks: Blocks = field(repr=False)
    survivors: tuple[str, ...]
    rows: Array = field(repr=False)
    sums: Array = field(repr=False)
    holders: Array = field(repr=False)
    weights: tuple[int, ...]
    metrics: Mapping[str, float]

    def weight(self) -> Array:
        """float64 (rows,): the weight of the survivors who hold each row, in shares of the largest possible one."""
        terms = self.blocks.terms
        if not terms.most_weight:
            return np.asarray(self.holders.astype(np.float64))
        total = np.zeros(len(self.rows), np.int64)
        for kept, weight in zip(self.blocks.kept, self.weights, strict=True):
            total[kept] += weight
        return np.asarray(total / terms.most_weight)


@dataclass
class _State:
    phase: Phase = "adverts"
    adverts: dict[str, bytes] = field(default_factory=dict)
    shares: dict[str, bytes] = field(default_factory=dict)
    members: list[str] = field(default_factory=list)
    masked: dict[str, bytes] = field(default_factory=dict)
    """By device, the sha256 of what came; the values are in the sums."""
    values: bytes = b""
    side: bytes = b""
    agreed: dict[str, bytes] = field(default_factory=dict)
    openings: dict[str, bytes] = field(default_factory=dict)


class NoSecretError(AggregationError):
    """What ``device`` shared among others does not come to what it promised."""

    def __init__(self, device: str, shares: int) -> None:
        super().__init__(
            f"secure: of {device!r} {shares} shares came, which do not give its secret; it shared what is none"
        )
        self.device = device


class CoordinatorHalf:
    """One attempt at one round. ``authority`` is the public key that devices' badges are signed by."""

    def __init__(self, terms: Terms, coordinates: Coordinates, authority: bytes, state: _State | None = None) -> None:
        if terms.coordinates != coordinates.digest:
            raise AggregationError("secure: the terms are for another model")
        self.terms, self.coordinates, self.authority = terms, coordinates, authority
        self._state = state or _State()
        self._values: Array | None = None
        self._side: Array | None = None
        self._keys = {*self._cohort.keys}
        self._places: dict[int, Places] = {}
        """Where the values of each mask class stand among all."""
        self._shared: dict[str, Shares] = {}
        self._opened: Opened | None = None
        self.liars: Mapping[str, str] = {}
        """Known once the sum is open: who gave wrong shares of most of those whose shares it holds, and how many."""

    @property
    def phase(self) -> Phase:
        """What it collects now."""
        return self._state.phase

    @property
    def came(self) -> tuple[str, ...]:
        """Whose word of this phase came."""
        return tuple(sorted(self._phase_of()))

    @property
    def masks(self) -> Mapping[str, ChannelMask | None]:
        """By device of the cohort, the mask that it said. For the second phase and those after it."""
        return self._roster.masks

    @property
    def survivors(self) -> tuple[str, ...]:
        """Whose masked updates came, and so who is in the sum. For the phases after that."""
        return self._survivors.names

    @property
    def complete(self) -> bool:
        """True where nobody's word of this phase is missing (who may come in the first is not known here)."""
        waits = {
            "shares": self._state.adverts,
            "masked": self._state.members,
            "agreed": self._state.masked,
            "openings": self._state.agreed,
        }
        return self.phase in waits and len(self.came) == len(waits[self.phase])

    def receive(self, message: Message) -> bool:
        """Take what a device says; True where it was new. The same again changes nothing.

        Raises :class:`WireError` for what is not signed by a device of this round, says other than before, does not
        fit, or comes out of its phase; :class:`AggregationError` for an advert with a key that another device has.
        """
        kinds = {Advert: "adverts", Shares: "shares", Masked: "masked", Agreed: "agreed", Opening: "openings"}
        phase = kinds.get(type(message))
        if phase is None or not isinstance(message, Advert | Shares | Masked | Agreed | Opening):
            raise WireError(f"secure: a coordinator does not take {message.TYPE!r}")
        known: dict[str, bytes] = getattr(self._state, phase)
        said = message.digest() if isinstance(message, Masked) else message.encode()
        if message.device in known:
            if known[message.device] != said:
                raise WireError(f"secure: {message.device!r} says other than before in {phase}; the first stands")
            return False
        if phase != self.phase:
            raise WireError(f"secure: {message.TYPE!r} of {message.device!r} comes in the phase {self.phase!r}")
        self._require(message)
        known[message.device] = said
        if isinstance(message, Masked):
            self._add(message)
        return True

    def _require(self, message: Advert | Shares | Masked | Agreed | Opening) -> None:
        if isinstance(message, Advert):
            read_advert(self.terms, self.coordinates, message.encode(), self.authority)
            if len(self._state.adverts) >= self.terms.most:
                raise WireError(f"secure: there are {self.terms.most} devices already")
            if not self._keys.isdisjoint(message.keys):  # which of the two is to blame, nobody knows
                raise AggregationError(f"secure: a key of {message.device!r} is another device's too")
            self._keys.update(message.keys)
            return
        roster = self._roster
        if message.device not in roster.adverts or message.terms != self.terms.digest:
            raise WireError(f"secure: {message.device!r} is not in this round")
        if not message.signed_by(roster.adverts[message.device].identity):
            raise WireError(f"secure: the signature of {message.device!r} does not fit")
        if isinstance(message, Shares):
            targets = tuple(name for name, _ in message.boxes)
            if message.cohort != roster.digest or targets != roster.neighbours[message.device]:
                raise WireError(f"secure: {message.device!r} shares with others than its neighbours")
            if len(message.commitments) != self.terms.tiers + 1:
                raise WireError(f"secure: {message.device!r} commits to {len(message.commitments)} seeds")
            return
        waited = {Masked: self._state.members, Agreed: self._state.masked, Opening: self._state.agreed}[type(message)]
        if message.device not in waited or message.members != self._members_digest:
            raise WireError(f"secure: {message.TYPE!r} of {message.device!r} is for other members")
        if isinstance(message, Masked):
            count = self.coordinates.count(self._blocks.of(message.device))
            if (len(message.values), len(message.side)) != (count * self._dtype.itemsize, 4 * self._beside):
                raise WireError(
                    f"secure: {message.device!r} sent {len(message.values)} and {len(message.side)} bytes, need "
                    f"{count * self._dtype.itemsize} and {4 * self._beside}"
                )
        elif isinstance(message, Agreed) and message.survivors != self._survivors.digest():
            raise WireError(f"secure: {message.device!r} agreed to other survivors")

    def _add(self, message: Masked) -> None:
        values, side = self._totals()
        found = self._class_of(message.device)
        if found not in self._places:
            self._places[found] = self.coordinates.places(self._every, self._blocks.of(message.device))
        sign(values, self._places[found], np.frombuffer(message.values, self._dtype.newbyteorder("<")), plus=True)
        side += np.frombuffer(message.side, "<u4")

    def proceed(self) -> dict[str, Message]:
        """Go on with those who have come: what to send, by device. After ``openings`` nothing, and :meth:`opened`.

        Raises :class:`AggregationError` where they are fewer than the threshold: the round cannot be opened any more.
        """
        came = self.came
        if self.phase == "done":
            raise AggregationError("secure: the round is done")
        if len(came) < self.terms.threshold:
            raise AggregationError(
                f"secure: {len(came)} devices in {self.phase}, {self.terms.threshold} must be there; try again"
            )
        out: dict[str, Message] = {}
        if self.phase == "adverts":
            _ = self._roster  # which may refuse them
            out = dict.fromkeys(came, self._cohort)
        elif self.phase == "shares":
            self._state.members = list(came)
            out = self._deliveries()
        elif self.phase == "masked":
            out = dict.fromkeys(came, self._survivors)
        elif self.phase == "agreed":
            words = [(name, decode(data)) for name, data in sorted(self._state.agreed.items())]
            signatures = tuple((name, word.signature) for name, word in words if isinstance(word, Agreed))
            out = dict.fromkeys(came, Agreement(signatures))
        self._state.phase = _NEXT[self.phase]
        return out

    def require_holders(self) -> None:
        """Raise :class:`AggregationError` where nothing would open: too few survived to hold any coordinate, or too few
        said the last word of those who hold shares of a secret that the sum needs (with neighbours alone that may be).
        Before anybody is asked to open, it may be tried again."""
        there, survivors = self._state.openings or self._state.agreed, set(self.survivors)
        if not self._blocks.open_tiers(survivors):
            raise AggregationError(f"secure: {len(survivors)} are too few for holders={self.terms.needed}; try again")
        for owner in self._state.members:
            if owner not in survivors and survivors.isdisjoint(self._roster.neighbours[owner]):
                continue  # it shared no mask with them
            holders = sum(name in there for name in self._roster.holders(owner))
            if holders < self._roster.own_threshold:
                raise AggregationError(
                    f"secure: {holders} of those who hold shares of {owner!r} stayed, and {self._roster.own_threshold} "
                    "must; let devices have more neighbours (degree)"
                )

    def again(self) -> dict[str, Message]:
        """What to send once more, by device, to those of whom this phase still waits; nothing in the first."""
        before = {after: phase for phase, after in _NEXT.items()}
        if self.phase not in before or self.phase == "done":
            return {}
        missing = set(self.came)
        past = CoordinatorHalf(self.terms, self.coordinates, self.authority, _State(**vars(self._state)))
        past._state.phase = before[self.phase]  # type: ignore[assignment]
        return {name: message for name, message in past.proceed().items() if name not in missing}

    def _deliveries(self) -> dict[str, Message]:
        boxes: dict[str, list[tuple[str, bytes]]] = {name: [] for name in self._state.members}
        for source in self._state.members:
            for target, box in self._shares_of(source).boxes:
                if target in boxes:
                    boxes[target].append((source, box))
        members = tuple(self._state.members)
        return {name: Delivery(members, tuple(found)) for name, found in boxes.items()}

    def opened(self) -> Opened:
        """The sums. Raises :class:`AggregationError` where too few stayed, or too many shares are wrong, and
        :class:`NoSecretError` where those of a device are, though more answered than must."""
        if self._opened is None:
            self._opened = self._open()
        return self._opened

    def _open(self) -> Opened:
        if self.phase != "done":
            raise AggregationError(f"secure: the round is in the phase {self.phase!r}; nothing is open yet")
        self.require_holders()
        blocks, survivors = self._blocks, set(self._survivors.names)
        tiers = blocks.open_tiers(survivors)
        values, side = (total.copy() for total in self._totals())
        rows = np.isin(blocks.tier, [tier for tier in tiers if tier < self.terms.tiers])
        seeds, keys = self._secrets(tiers)
        digest = self._members_digest
        own: dict[tuple[int, int], list[tuple[bytes, bool]]] = {}
        for name in sorted(survivors):
            for tier, seed in zip(tiers, seeds[name], strict=True):
                key = seed_key(seed, digest)
                if tier == self.terms.tiers:
                    side -= keystream.stream(key, len(side), side.dtype)
                else:
                    own.setdefault((self._class_of(name), tier), []).append((key, True))
        for (found, tier), streams in own.items():
            self._subtract(values, np.asarray(blocks.kept[found] & (blocks.tier == tier)), streams)
        self._take_out(keys, values, side)
        values[~self.coordinates.values(rows)] = 0
        split = len(blocks.kept) if self.terms.most_weight else 0
        mean = self.terms.side.decode(side[split:], self.terms.metric_bound) / len(survivors)
        return Opened(
            blocks,
            tuple(sorted(survivors)),
            rows,
            values,
            np.where(rows, blocks.left(survivors), 0),
            tuple(side[:split].tolist()),
            dict(zip(self.terms.metrics, mean.tolist(), strict=True)),
        )

    def _take_out(self, keys: Mapping[str, bytes], values: Array, side: Array) -> None:
        """The masks that survivors shared with those who left after that, whose ``keys`` are open."""
        roster, digest, blocks = self._roster, self._members_digest, self._blocks
        shared: dict[tuple[int, int], list[tuple[bytes, bool]]] = {}
        survivors = set(self._survivors.names)
        for name, key in keys.items():
            agree = keystream.agreeing(key)
            for other in roster.neighbours[name]:
                if other not in survivors:
                    continue
                common, plus = agree(roster.adverts[other].mask_key), other < name
                stream = pair_key(common, digest, "values", name, other)
                classes = sorted((self._class_of(name), self._class_of(other)))
                shared.setdefault((classes[0], classes[1]), []).append((stream, plus))
                beside = keystream.stream(pair_key(common, digest, "side", name, other), len(side), side.dtype)
                sign(side, None, beside, plus=not plus)
        for (low, high), streams in shared.items():
            self._subtract(values, np.asarray(blocks.kept[low] & blocks.kept[high] & blocks.sent), streams)

    def _subtract(self, values: Array, rows: Array, streams: Sequence[tuple[bytes, bool]]) -> None:
        """Take the masks of ``streams`` over ``rows`` out of all values."""
        out = [(key, not plus) for key, plus in streams]
        cover(values, self.coordinates.places(self._every, rows), out, self.coordinates.count(rows))

    def _class_of(self, name: str) -> int:
        return self._blocks.class_of[name]

    def _secrets(self, tiers: tuple[int, ...]) -> tuple[dict[str, list[bytes]], dict[str, bytes]]:
        """The survivors' seeds of ``tiers``, and the keys of those who left after sharing."""
        size, survivors = shamir.SHARE_BYTES, set(self._survivors.names)
        by_owner: dict[str, dict[int, bytes]] = {name: {} for name in self._state.members}
        places = {owner: {name: x for x, name in enumerate(self._roster.holders(owner), 1)} for owner in by_owner}
        for giver, data in sorted(self._state.openings.items()):
            opening = decode(data)
            if not isinstance(opening, Opening):
                raise StateError("secure: the saved state is damaged")
            for owner, share in (*opening.seeds, *opening.keys):
                wanted = size * (len(tiers) if owner in survivors else 1)
                if giver in places.get(owner, ()) and len(share) == wanted:
                    by_owner[owner][places[owner][giver]] = share
        seeds, keys, wrong = dict[str, list[bytes]](), dict[str, bytes](), set[str]()
        used: dict[str, list[tuple[dict[int, bytes], tuple[int, ...]]]] = {}
        for owner, shares in by_owner.items():
            who = tuple(places[owner])
            if owner in survivors:
                promised = [self._shares_of(owner).commitments[tier] for tier in tiers]
                cut = [{x: s[at : at + size] for x, s in shares.items()} for at in range(0, size * len(tiers), size)]
                found = [self._joined(owner, who, s, wrong, commitment, p) for s, p in zip(cut, promised, strict=True)]
                seeds[owner] = [secret for secret, _ in found]
                used[owner] = [(s, chosen) for s, (_, chosen) in zip(cut, found, strict=True)]
            elif any(other in survivors for other in self._roster.neighbours[owner]):
                public = self._roster.adverts[owner].mask_key
                keys[owner], chosen = self._joined(owner, who, shares, wrong, keystream.public_of, public)
                used[owner] = [(shares, chosen)]
        if any(set(chosen) != set(sorted(shares)[: len(chosen)]) for all_ in used.values() for shares, chosen in all_):
            self.liars = self._found_out(used)
        return seeds, keys

    def _found_out(self, used: Mapping[str, Sequence[tuple[Mapping[int, bytes], tuple[int, ...]]]]) -> dict[str, str]:
        """Who gave shares that are not on the polynomial of those which came to a secret. One such share may be its
        owner's lie; wrong ones of most owners are the giver's, as most are honest."""
        scales, gave, wrong = dict[tuple[tuple[int, ...], int], list[int]](), Counter[str](), Counter[str]()
        for owner, parts in used.items():
            holders = self._roster.holders(owner)
            for x in parts[0][0]:
                gave[holders[x - 1]] += 1
                for shares, chosen in parts:
                    scale = scales[chosen, x] = scales.get((chosen, x)) or shamir.weights(chosen, at=x)
                    if not shamir.is_on(shares[x], [shares[c] for c in chosen], scale):
                        wrong[holders[x - 1]] += 1
                        break
        return {
            giver: f"it gave wrong shares of {wrong[giver]} of {gave[giver]} devices in a secure round"
            for giver in sorted(wrong)
            if 2 * wrong[giver] > gave[giver]
        }

    def _joined(
        self, owner: str, holders: Sequence[str], shares: Mapping[int, bytes], wrong: set[str],
        told: Callable[[bytes], bytes], promised: bytes,
    ) -> tuple[bytes, tuple[int, ...]]:  # fmt: skip
        """The secret of ``owner``, of which ``told`` is what it ``promised``, and whose shares gave it; where one is
        wrong, others are tried, and who gave it is among the ``wrong``, whose shares are tried last."""
        threshold, order = self._roster.own_threshold, sorted(shares, key=lambda x: (holders[x - 1] in wrong, x))
        for chosen, scale in shamir.choices(order, threshold):
            with suppress(WireError):
                secret = shamir.join({x: shares[x] for x in chosen}, scale)
                if told(secret) == promised:
                    wrong |= {holders[x - 1] for x in order[: order.index(chosen[-1])] if x not in chosen}
                    return secret, chosen
        if shamir.wrong_ones(threshold, givers := len({*holders} & {*self._state.openings})):
            raise NoSecretError(owner, len(shares))
        raise AggregationError(
            f"secure: of {owner!r} {len(shares)} shares came, which do not give its secret; whether it lied, or one of "
            f"{givers} who answered, nobody knows, as no more did than must"
        )

    # What is kept.

    def save(self) -> bytes:
        """Everything that :meth:`load` needs, O(model). It holds nothing that tells of a single device's values."""
        if self._values is not None and self._side is not None:
            self._state.values = self._values.astype(self._dtype.newbyteorder("<")).tobytes()
            self._state.side = self._side.astype("<u4").tobytes()
        kept = {f.name: getattr(self._state, f.name) for f in fields(_State)}
        whole: bytes = msgpack.packb({"format": FORMAT, "terms": self.terms.digest, **kept})
        return whole

    @classmethod
    def load(cls, data: bytes, terms: Terms, coordinates: Coordinates, authority: bytes) -> CoordinatorHalf:
        """What :meth:`save` kept. Raises :class:`StateError` for what is damaged or of another round."""
        try:
            found: Any = msgpack.unpackb(data)
            about = [found.pop(name) for name in ("format", "terms")]
            state = _State(**found)
        except (ValueError, TypeError, KeyError, AttributeError, msgpack.exceptions.UnpackException) as error:
            raise StateError(f"secure: the saved state is damaged ({type(error).__name__}); begin anew") from None
        if about != [FORMAT, terms.digest]:
            raise StateError("secure: the saved state is of another round or version; begin anew")
        return cls(terms, coordinates, authority, state)

    def _phase_of(self) -> Mapping[str, bytes]:
        found: Mapping[str, bytes] = getattr(self._state, "openings" if self.phase == "done" else self.phase)
        return found

    def _shares_of(self, name: str) -> Shares:
        if name not in self._shared:
            shares = decode(self._state.shares[name])
            if not isinstance(shares, Shares):
                raise StateError("secure: the saved state is damaged")
            self._shared[name] = shares
        return self._shared[name]

    def _totals(self) -> tuple[Array, Array]:
        if self._values is None or self._side is None:
            dtype = self._dtype
            values, side = self._state.values, self._state.side
            count = int(self.coordinates.widths.sum())
            self._values = (
                np.frombuffer(values, dtype.newbyteorder("<")).astype(dtype) if values else np.zeros(count, dtype)
            )
            self._side = np.frombuffer(side, "<u4").astype(np.uint32) if side else np.zeros(self._beside, np.uint32)
        return self._values, self._side

    @property
    def _dtype(self) -> np.dtype[Any]:
        return self.terms.grid.dtype

    @cached_property
    def _every(self) -> Array:
        return np.ones(len(self.coordinates.widths), bool)

    @property
    def _beside(self) -> int:
        return (len(self._blocks.kept) if self.terms.most_weight else 0) + len(self.terms.metrics)

    @property
    def _cohort(self) -> Cohort:
        return Cohort(tuple(data for _, data in sorted(self._state.adverts.items())))

    @cached_property
    def _roster(self) -> Roster:
        return Roster.of(self.terms, self.coordinates, self._cohort, self.authority)

    @cached_property
    def _blocks(self) -> Blocks:
        return self._roster.blocks(self._state.members)

    @property
    def _members_digest(self) -> bytes:
        return self._roster.members_digest(self._state.members)

    @property
    def _survivors(self) -> Survivors:
        return Survivors(tuple(sorted(self._state.masked)))
