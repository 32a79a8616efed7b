""":class:`Learning`: checks updates and folds them into the global model. It uses no network."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from talaria.aggregate.base import Aggregator
from talaria.errors import AggregationError, StateError, TalariaError, WireError
from talaria.federated import global_model, rounds
from talaria.federated.fedbuff_run import Buffering
from talaria.federated.run import Run
from talaria.federated.server_rule import aggregator_of, least_of
from talaria.protocol.actions import Counted
from talaria.tensors import Tensors
from talaria.types import Update
from talaria.wire import codec
from talaria_coordinator.fleet.culprits import culprits
from talaria_coordinator.storage.blobs import BlobLost, Blobs
from talaria_coordinator.storage.records import Fleet


@dataclass(frozen=True)
class Learning:
    """One run's learning over blobs; ``rule`` names an aggregator that replaces the algorithm's own, and ``buffering``
    is that of an asynchronous run."""

    run: Run
    blobs: Blobs
    rule: str | None = None
    max_update: int = 64 << 20
    buffering: Buffering | None = None
    _latest: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def aggregator(self) -> Aggregator | None:
        """What replaces the algorithm's own rule, if anything does."""
        return aggregator_of(self.run, self.rule, self.buffering)

    @cached_property
    def dense(self) -> int:
        """Bytes of an update that sends every shared value as it is."""
        specs = rounds.update_schema(self.run).values()
        return sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs)

    def first(self) -> tuple[str, str]:
        """The digests of the first global model and server state."""
        shared, server = self._start()
        return self.blobs.put(global_model.encode_model(shared)), self.blobs.put(codec.encode_tensors(server))

    def require(self, fleet: Fleet) -> None:
        """Read what the next round begins from. Raises :class:`~talaria.errors.StateError` where it is missing or
        damaged."""
        for digest in (fleet.model_digest, fleet.server):
            self.blobs.get(digest)

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

    def checked(self, data: bytes, device: str, round: int | None, base_digest: str) -> Update:
        """The update in ``data``. Raises :class:`~talaria.errors.WireError` where it may not count; ``round`` is the
        round that it must have been made for (None: any), and ``base_digest`` the digest of the global model that it
        began from, with which it is compared as the fold will."""
        shared = self._shared(base_digest)
        try:
            update = self._decoded(data, device)
            if round is not None and update.base_version != round - 1:
                raise WireError(
                    f"update says it was made from global model {update.base_version}, but round {round} began from "
                    f"{round - 1}; it may be replayed"
                )
            self._require(shared, update)
        except WireError:
            raise
        except AggregationError as error:
            raise WireError(str(error)) from None
        except Exception as error:
            if passing(error):
                raise
            raise WireError(f"update cannot be read ({type(error).__name__}: {str(error)[:200]})") from error
        return update

    def _decoded(self, data: bytes, device: str) -> Update:
        return codec.decode_update(
            data,
            schema=rounds.update_schema(self.run),
            layout=rounds.layout_of(self.run.spec),
            limits=codec.Limits(total=self.max_update),
            client=device,
        )

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

    def _model(self, data: bytes) -> Tensors:
        return global_model.decode_model(self.run, data)

    def _require(self, shared: Tensors, update: Update) -> None:
        rounds.require_update(self.run, shared, update, self.aggregator)

    def _close(self, shared: Tensors, server: Tensors, updates: Iterator[Update]) -> tuple[Tensors, Tensors]:
        return rounds.close(self.run, shared, server, updates, self.aggregator)

    # -- folding

    def fold(self, fleet: Fleet, counted: Sequence[Counted]) -> Made:
        """The global model and server state after these updates, one of them in memory at a time.

        An update that is damaged by now, or cannot be folded, is left out, and said to be. Where none does not fit by
        itself, but they do not fold together, a minority without which the others do is found by leaving out. Raises
        :class:`NothingLeft` where too few stay.
        """
        shared = self._model(self.blobs.get(fleet.model_digest))
        server = codec.decode_tensors(self.blobs.get(fleet.server), schema=None)
        kept, left = list(counted), list[LeftOut]()

        def folded(entries: Sequence[Counted]) -> tuple[Tensors, Tensors]:
            return self._close(shared, server, self._updates(entries, shared))

        while len(kept) >= self.least:
            try:
                after, state = folded(kept)
            except Exception as error:
                if passing(error):
                    raise
                found = self._unfit(kept, shared, error) or self._together(kept, folded, error)
                if not found:
                    raise
                left += found
                kept = [entry for entry in kept if entry not in {out.entry for out in found}]
            else:
                new = self.blobs.put(global_model.encode_model(after))
                return Made(new, self.blobs.put(codec.encode_tensors(state)), tuple(kept), tuple(left))
        raise NothingLeft(
            f"{len(kept)} of {len(counted)} updates can be folded, and {self.least} are needed", tuple(left)
        )

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
        return least_of(self.run, self.aggregator)

    def _updates(self, counted: Sequence[Counted], shared: Tensors) -> Iterator[Update]:
        for entry in counted:
            try:
                update = self._decoded(self.blobs.get(entry.sha256.hex()), entry.device)
                self._require(shared, update)
            except BlobLost as error:
                raise _UnfitError(LeftOut(entry, str(error), liar=False)) from error
            except Exception as error:
                if passing(error):
                    raise
                raise _UnfitError(LeftOut(entry, str(error)[:300], liar=True)) from error
            yield update


@dataclass(frozen=True)
class LeftOut:
    """An update that a fold went on without. Where its sender is no ``liar``, our own disk lost it."""

    entry: Counted
    reason: str
    liar: bool


@dataclass(frozen=True)
class Made:
    """What a fold made: digests of the new global model and server state, what counts in them, and what was left
    out."""

    model_digest: str
    server: str
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
