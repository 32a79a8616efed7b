""":class:`Learning`: checks updates and folds them into the global model. It uses no network."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from talaria.aggregate.base import Aggregator
from talaria.aggregate.fedbuff import VERSION
from talaria.aggregate.partial_sum import PartialSum, partial_sum, require_summable
from talaria.errors import AggregationError, ConfigError, StateError, TalariaError, WireError
from talaria.federated import global_model, rounds, run_model, warm_start
from talaria.federated.fedbuff_run import Buffering
from talaria.federated.private_rule import private_rule
from talaria.federated.run import Run
from talaria.federated.server_rule import aggregator_of, least_of
from talaria.privacy.accounting import KEY as LEDGER
from talaria.privacy.accounting import Ledger, epsilon, ledger_in
from talaria.privacy.clipping import KEY as LENGTH
from talaria.privacy.clipping import clip_in
from talaria.privacy.forms import FORMS
from talaria.privacy.rule import Privacy
from talaria.protocol.actions import Counted
from talaria.tensors import Tensors
from talaria.types import Update
from talaria.wire import codec
from talaria.wire.messages import MAX_TRANSFER
from talaria.wire.partial_sums import Bounds, decode_partial_sum, encode_partial_sum, is_partial_sum
from talaria_coordinator.config.gateways import MOST
from talaria_coordinator.config.privacy import LEAST
from talaria_coordinator.fleet import blueprints
from talaria_coordinator.fleet.culprits import culprits
from talaria_coordinator.fleet.secure import Secure
from talaria_coordinator.storage.blobs import BlobLost, Blobs
from talaria_coordinator.storage.records import Fleet, Spent

T = TypeVar("T")


@dataclass(frozen=True)
class Learning:
    """One run's learning over blobs; ``rule`` names an aggregator that replaces the algorithm's own, and ``buffering``
    is that of an asynchronous run. ``gateways`` are the members that send partial sums, each with the most devices that
    it may speak for: who sends tells what must come, not its bytes."""

    run: Run
    blobs: Blobs
    rule: str | None = None
    max_update: int = 64 << 20
    buffering: Buffering | None = None
    privacy: Privacy | None = None
    gateways: Mapping[str, int] = field(default_factory=dict)
    _latest: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.gateways:
            require_summable(rounds.rule_of(self.run, self.aggregator))

    @cached_property
    def aggregator(self) -> Aggregator | None:
        """What replaces the algorithm's own rule, if anything does."""
        named = aggregator_of(self.run, self.rule, self.buffering)
        # The noise of each process is its own: nobody could draw it again.
        return private_rule(self.run, named, self.privacy, secrets.randbits(62))

    @cached_property
    def dense(self) -> int:
        """Bytes of an update that sends every shared value as it is."""
        return run_model.dense_bytes(self.run)

    def first(self) -> tuple[str, str]:
        """The digests of the first global model and server state."""
        shared, server = self._start()
        return self.blobs.put(self._encoded(shared)), self.blobs.put(codec.encode_tensors(server))

    def after(self, old: Run, fleet: Fleet, state: Path) -> tuple[str, str, dict[str, list[str]]]:
        """What this run begins from after ``old``, which ``fleet`` has learned: the digests of global model and server
        state, and what of the model is new, as it is logged. What privacy has cost stays counted. What is worked out
        about the models lies in the folder ``state``.

        Raises :class:`~talaria.errors.ConfigError`, naming what cannot be carried over."""
        found = self._carried(old, self.blobs.get(fleet.model_digest), state)
        server, ledger = self._first_server(found.tensors), ledger_in(self._server(fleet))
        if ledger is not None:
            server = ledger.within(server)
        model = self.blobs.put(self._encoded(found.tensors))
        return model, self.blobs.put(codec.encode_tensors(server)), found.facts()

    def require(self, fleet: Fleet) -> None:
        """Read what the next round begins from. Raises :class:`~talaria.errors.StateError` where it is missing or
        damaged, and :class:`~talaria.errors.ConfigError` where rounds with noise and without would follow each other in
        this run: what it has cost would be told as if all had it."""
        for digest in (fleet.model_digest, fleet.server):
            self.blobs.get(digest)
        noise = 0.0 if self.privacy is None else self.privacy.noise or 0.0
        if fleet.round >= self.run.rounds or not (noise or fleet.spent):
            return
        ledger = ledger_in(codec.decode_tensors(self.blobs.get(fleet.server), schema=None))
        if noise and (ledger is None or not ledger.noise):
            raise ConfigError(
                f"privacy: noise={noise:g}, and this run began without: its rounds until now have none, and no budget "
                "covers them. Leave noise and epsilon out until it is done or paused, and begin another run with them "
                "by `talaria coordinator next FLEET.TOML`; or give the fleet another state folder"
            )
        if not noise and ledger is not None and ledger.noise and ledger.version:
            raise ConfigError(
                f"privacy: no noise is given, and this run counts what it has cost with noise={ledger.noise:g}: rounds "
                "without would be covered by nothing. Take [privacy] back as it was until it is done or paused; "
                "`talaria coordinator next FLEET.TOML` then begins another run without"
            )

    def require_unused(self) -> None:
        """Raise :class:`~talaria.errors.StateError` where a fleet has learned into these blobs: what a database without
        any fleet goes with holds at most the first global model and server state, from a start that was cut off."""
        first = self.first()
        if next((digest for digest in self.blobs.digests() if digest not in first), None) is not None:
            raise StateError(
                "store: the database holds no fleet, but its blobs are those of one that has learned: the database was "
                "lost, or another is meant. Correct [fleet] state or [store]; or restore a backup by `talaria "
                "coordinator restore`; or, to begin anew and lose what was learned, move the blobs away"
            )

    def require_beside(self, others: Sequence[Fleet]) -> None:
        """Raise :class:`~talaria.errors.StateError` where a fleet of the same database has its blobs elsewhere: a
        backup has all that a database names, and found some of it nowhere."""
        away = next((fleet.name for fleet in others if not self.blobs.has(fleet.model_digest)), None)
        if away is not None:
            raise StateError(
                f"store: the database has fleet {away!r} too, and its blobs are not where this fleet's are; give all "
                "fleets of one database one place as [store] blobs, or this one a database of its own"
            )

    def checked(self, data: bytes, device: str, round: int | None, base_digest: str) -> Update | PartialSum:
        """The update in ``data``, or a gateway's partial sum. Raises :class:`~talaria.errors.WireError` where it may
        not count; ``round`` is the round that it must have been made for (None: any), and ``base_digest`` the digest of
        the global model that it began from, with which it is compared as the fold will."""
        shared = self._shared(base_digest)
        try:
            update = self._decoded(data, device)
            if round is not None and update.base_version != round - 1:
                raise WireError(
                    f"update says it was made from global model {update.base_version}, but round {round} began from "
                    f"{round - 1}; it may be replayed"
                )
            self._require_fits(shared, update)
        except WireError:
            raise
        except AggregationError as error:
            raise WireError(str(error)) from None
        except Exception as error:
            if passing(error):
                raise
            raise WireError(f"update cannot be read ({type(error).__name__}: {str(error)[:200]})") from error
        return update

    def _decoded(self, data: bytes, device: str) -> Update | PartialSum:
        return self._opened(data, device, self.gateways.get(device), self.max_update)

    def _let_in(self, data: bytes, device: str) -> Update | PartialSum:
        """An update that is in the store: what an operator bounds otherwise since, was no lie when it came."""
        found = self._opened(data, device, MOST if is_partial_sum(data) else None, MAX_TRANSFER)
        if isinstance(found, PartialSum):
            require_summable(rounds.rule_of(self.run, self.aggregator))
        return found

    def _opened(self, data: bytes, device: str, most: int | None, size: int) -> Update | PartialSum:
        schema, layout = run_model.update_schema(self.run), run_model.layout_of(self.run.spec)
        limits = codec.Limits(total=size)
        if is_partial_sum(data) != (most is not None):
            raise WireError(
                "a partial sum of a device that is no gateway; where it is one, name it in [gateways]"
                if most is None
                else "no partial sum, though [gateways] names this device; where it is none, leave it out there"
            )
        if most is None:
            return codec.decode_update(data, schema=schema, layout=layout, limits=limits, client=device)
        bounds = Bounds(clients=most, update=limits)
        return decode_partial_sum(data, schema=schema, bounds=bounds, layout=layout, client=device)

    def _require_fits(self, shared: Tensors, update: Update | PartialSum) -> None:
        """Of a partial sum its means, of which each class keeps a part."""
        self._require(shared, update.whole if isinstance(update, PartialSum) else update)

    def _shared(self, digest: str) -> Tensors:
        """The global model of this digest; the latest one asked for is kept, since all updates of a round name the
        same."""
        held: tuple[str, Tensors] = self._latest.get("model", ("", {}))  # one value: several threads ask
        if held[0] != digest:
            held = self._latest["model"] = digest, self._model(self.blobs.get(digest))
        return held[1]

    # What follows from the run alone.

    def _start(self) -> tuple[Tensors, Tensors]:
        return rounds.start(self.run, self.aggregator)

    def _carried(self, old: Run, data: bytes, state: Path) -> warm_start.Carried:
        for run in (old, self.run):
            blueprints.prepare(run, state)
        return warm_start.carried(old, self.run, global_model.decode_model(old, data))

    def _first_server(self, shared: Tensors) -> Tensors:
        return rounds.rule_of(self.run, self.aggregator).init(shared)

    def _encoded(self, shared: Tensors) -> bytes:
        return global_model.encode_model(shared, self.run.download)

    def _model(self, data: bytes) -> Tensors:
        return global_model.decode_model(self.run, data)

    def _require(self, shared: Tensors, update: Update) -> None:
        rounds.require_update(self.run, shared, update, self.aggregator)

    def _close(self, shared: Tensors, server: Tensors, updates: Iterator[Update]) -> tuple[Tensors, Tensors]:
        return rounds.close(self.run, shared, server, updates, self.aggregator)

    # -- folding

    def fold(self, fleet: Beginning, counted: Sequence[Counted]) -> Made:
        """The global model and server state after these updates, one of them in memory at a time.

        An update that is damaged by now, or cannot be folded, is left out, and said to be. Where none does not fit by
        itself, but they do not fold together, those few without whom the others do are found by leaving out. Raises
        :class:`NothingLeft` where too few stay.
        """
        if why := self.unaffordable(fleet, [entry.device for entry in counted]):
            raise NothingLeft(why, ())  # the others could be afforded without who was counted most, and nobody lied
        shared = self._model(self.blobs.get(fleet.model_digest))
        server = self._remembered(fleet, shared)

        def folded(entries: Sequence[Counted]) -> tuple[Tensors, Tensors]:
            return self._close(shared, server, self._updates(entries, shared))

        (after, state), kept, left = self._of_most(counted, shared, folded)
        new = self.blobs.put(self._encoded(after))
        return Made(new, self.blobs.put(codec.encode_tensors(state)), kept, left)

    def added_up(self, fleet: Beginning, counted: Sequence[Counted], client: str) -> Total:
        """The partial sum of these updates as it travels, ``client`` being who sends it; otherwise as :meth:`fold`."""
        shared = self._model(self.blobs.get(fleet.model_digest))

        def added(entries: Sequence[Counted]) -> PartialSum:
            return partial_sum(shared, self._updates(entries, shared), client)

        total, kept, left = self._of_most(counted, shared, added)
        return Total(encode_partial_sum(total, run_model.layout_of(self.run.spec)), kept, left)

    def _of_most(
        self, counted: Sequence[Counted], shared: Tensors, folded: Callable[[Sequence[Counted]], T]
    ) -> tuple[T, tuple[Counted, ...], tuple[LeftOut, ...]]:
        """What ``folded`` makes of these updates, or of as many as it takes; these, and those that were left out."""
        kept, left = list(counted), list[LeftOut]()
        while len(kept) >= self.least:
            try:
                made = folded(kept)
            except Exception as error:
                if passing(error):
                    raise
                found = self._unfit(kept, shared, error) or self._together(kept, folded, error)
                if not found:
                    raise
                left += found
                kept = [entry for entry in kept if entry not in {out.entry for out in found}]
            else:
                return made, tuple(kept), tuple(left)
        raise NothingLeft(
            f"{len(kept)} of {len(counted)} updates can be folded, and {self.least} are needed", tuple(left)
        )

    def fold_sum(self, fleet: Fleet, counted: Sequence[Counted], secure: Secure, attempt: int) -> Made:
        """As :meth:`fold`, of updates that nobody can read but as a sum. Where that cannot be used, what garbage in one
        of them does, the global model stays as it is: to add up almost the same once more would tell of single ones."""
        shared = self._model(self.blobs.get(fleet.model_digest))
        server = self._remembered(fleet, shared)
        try:
            after, state, opened = secure.fold(attempt, shared, server)
        except AggregationError as error:
            left = tuple(LeftOut(entry, str(error), liar=False) for entry in counted)
            return Made(fleet.model_digest, fleet.server, (), left)
        kept = tuple(entry for entry in counted if entry.device in opened.survivors)
        if len(kept) != len(opened.survivors):
            raise StateError(
                f"attempt {attempt}: {len(opened.survivors)} updates are in the sum, and {len(kept)} in the store"
            )
        new = self.blobs.put(self._encoded(after))
        return Made(new, self.blobs.put(codec.encode_tensors(state)), kept, (), secure.told(opened))

    def unaffordable(self, fleet: Beginning, devices: Sequence[str]) -> str:
        """Why no round of ``devices`` may be opened any more, empty where one may: the budget of privacy."""
        if self.privacy is None or self.privacy.epsilon is None:
            return ""
        ledger = ledger_in(self._server(fleet))
        try:
            if ledger is not None:
                ledger.after(devices).require(self.privacy.epsilon)
        except AggregationError as error:
            return str(error)
        return ""

    def clip(self, fleet: Fleet) -> float | None:
        """The length that differences are cut to in the next round, where it moves."""
        return None if self.privacy is None or self.privacy.quantile is None else clip_in(self._server(fleet))

    def promises(self, fleet: Fleet, devices: Sequence[str]) -> dict[str, dict[str, float | str]]:
        """By device, what it will have spent once it is counted in the next round, and who adds the noise; empty where
        nothing is counted."""
        ledger = None if self.privacy is None else ledger_in(self._server(fleet))
        if ledger is None or not ledger.noise or self.privacy is None:
            return {}
        often = {name: ledger.rounds.get(name, 0) + 1 for name in devices}
        cost = {n: epsilon(ledger.noise, n, ledger.delta) for n in set(often.values())}
        form = FORMS[self.privacy.noise_by]
        return {name: {"epsilon": cost[n], "delta": ledger.delta, "form": form} for name, n in often.items()}

    def spent(self, server: str) -> Spent | None:
        """What differential privacy has cost by this server state; None where nothing is counted."""
        state = codec.decode_tensors(self.blobs.get(server), schema=None)
        return self._spent(ledger_in(state), state)

    def paid(self, fleet: Fleet, devices: Sequence[str]) -> Spent | None:
        """What it has cost once ``devices`` opened a sum, whatever became of that; None where nothing is counted."""
        state = self._server(fleet)
        ledger = ledger_in(state)
        return None if ledger is None else self._spent(ledger.after(devices), state)

    def _spent(self, ledger: Ledger | None, state: Tensors) -> Spent | None:
        if ledger is None or self.privacy is None or not ledger.noise:
            return None
        return Spent(
            epsilon=ledger.epsilon, delta=ledger.delta, budget=self.privacy.epsilon, noise=ledger.noise,
            secure=self.privacy.secure, rounds=dict(ledger.rounds), version=ledger.version,
            noise_by=self.privacy.noise_by, clip=clip_in(state) if self.privacy.quantile else None,
        )  # fmt: skip

    def _remembered(self, fleet: Beginning, shared: Tensors) -> Tensors:
        """The server's state as the rule has it; what another rule did not keep, which fleet.toml named before, begins
        anew. There is one ledger, wherever that rule kept it."""
        first, server = self._first_server(shared), self._server(fleet)
        kept = {k: v for k, v in server.items() if k in first or not k.endswith((LEDGER, LENGTH))}
        if self.buffering is not None:  # rounds count on where a run follows another
            kept[VERSION] = np.array(fleet.round, np.int64)
        ledger = ledger_in(server)
        return first | kept if ledger is None else ledger.within(first | kept)

    def _server(self, fleet: Beginning) -> Tensors:
        """The server's state that the next round begins from; its ledger also knows what was learned and called off,
        and counts with the noise that is asked for now."""
        server = codec.decode_tensors(self.blobs.get(fleet.server), schema=None)
        ledger, known, asked = ledger_in(server), fleet.spent, self.privacy
        if ledger is None:
            return server
        if known is not None:
            past = Ledger(known.noise, known.delta, known.rounds, known.version).at(ledger.noise, ledger.delta)
            ledger = ledger.with_past(past.rounds, past.version)
        return (ledger if asked is None else ledger.at(asked.noise or 0.0, asked.delta)).within(server)

    def _unfit(self, kept: Sequence[Counted], shared: Tensors, error: Exception) -> list[LeftOut]:
        """The update that ``error`` is about, or else the first that does not fit by itself."""
        if isinstance(error, _UnfitError):
            return [error.left]
        try:
            for _ in self._updates(kept, shared):
                pass
        except _UnfitError as found:
            return [found.left]
        return []

    def _together(
        self, kept: Sequence[Counted], folded: Callable[[Sequence[Counted]], object], error: Exception
    ) -> list[LeftOut]:
        """Those without whom the others fold, where each fits by itself."""

        def folds(entries: Sequence[Counted]) -> bool:
            if len(entries) < self.least:
                return True
            try:
                folded(entries)
            except Exception as trouble:
                if passing(trouble):
                    raise
                return False
            return True

        reason = f"the others fold without it, and not with it: {str(error)[:200]}"
        return [LeftOut(entry, reason, liar=True) for entry in culprits(kept, folds)]

    @cached_property
    def least(self) -> int:
        """The fewest updates that the rule folds."""
        asked = self.privacy
        private = 1 if asked is None else max(LEAST, asked.threshold or 0, asked.holders or 0)
        return max(private, least_of(self.run, aggregator_of(self.run, self.rule, self.buffering)))

    def _updates(self, counted: Sequence[Counted], shared: Tensors) -> Iterator[Update]:
        for entry in counted:
            try:
                update = self._let_in(self.blobs.get(entry.sha256.hex(), again=False), entry.device)
                self._require_fits(shared, update)
            except (BlobLost, ConfigError) as error:
                raise _UnfitError(LeftOut(entry, str(error), liar=False)) from error
            except Exception as error:
                if passing(error):
                    raise
                raise _UnfitError(LeftOut(entry, str(error)[:300], liar=True)) from error
            if isinstance(update, PartialSum):
                yield from update.updates()
            else:
                yield update


class Beginning(Protocol):
    """What a round begins from: that of a :class:`~talaria_coordinator.storage.records.Fleet`."""

    @property
    def model_digest(self) -> str: ...

    @property
    def server(self) -> str: ...

    @property
    def round(self) -> int: ...

    @property
    def spent(self) -> Spent | None: ...


@dataclass(frozen=True)
class LeftOut:
    """An update that a fold went on without. Where its sender is no ``liar``, our own disk lost it."""

    entry: Counted
    reason: str
    liar: bool


@dataclass(frozen=True)
class Made:
    """What a fold made: digests of the new global model and server state, what counts in them, what was left out, and
    the means of what devices told within a sum."""

    model_digest: str
    server: str
    counted: tuple[Counted, ...]
    left: tuple[LeftOut, ...]
    means: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Total:
    """A partial sum as it travels, what counts in it, and what was left out."""

    data: bytes = field(repr=False)
    counted: tuple[Counted, ...]
    left: tuple[LeftOut, ...]


class NothingLeft(AggregationError):  # noqa: N818 - it says what is, and carries why
    """Too few updates stay; ``left`` are those that were left out, and why."""

    def __init__(self, message: str, left: tuple[LeftOut, ...]) -> None:
        super().__init__(message)
        self.left = left


class _UnfitError(TalariaError):
    def __init__(self, left: LeftOut) -> None:
        super().__init__(left.reason)
        self.left = left


def passing(error: BaseException) -> bool:
    """True for trouble of this machine, which no update is to blame for: memory, disk, database. It may pass."""
    if isinstance(error, StateError | MemoryError | OSError):
        return True
    return type(error) is RuntimeError and "alloc" in str(error)  # how torch says that memory is out
