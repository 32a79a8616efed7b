"""What must hold after every event of a history, whatever happened to it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np

from talaria.errors import StateError, WireError
from talaria.tensors import Tensors
from talaria.wire import messages as m
from talaria.wire.frames import decode_frame
from talaria.wire.transport import Arrival
from talaria_bench.history import exact
from talaria_coordinator.storage.blobs import Blobs
from talaria_coordinator.storage.store import Store


class BrokenError(Exception):
    """A promise was broken; ``kind`` is one word for it."""

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(f"{kind}: {what}")
        self.kind = kind


@dataclass(frozen=True)
class Record:
    """What the coordinator's record must say, as far as it was looked at; one restored from a backup goes back."""

    checked: int = 0
    """The round up to which rounds were looked at."""
    round: int = 0
    model: Tensors = field(default_factory=lambda: dict(exact.ZERO), repr=False)
    digest: str = ""
    """That of the last global model."""
    off: int = 0
    """In the log: the last run that was called off."""
    counted: frozenset[tuple[str, str]] = frozenset()
    """(device, digest) of all updates that counted."""
    receipts: frozenset[tuple[int, str, str]] = frozenset()
    """(round, device, digest) of all updates that a device was told to be stored."""


class Promises:
    """The promises of one history. ``honest`` are the devices that do nothing wrong."""

    def __init__(self, fleet: str, honest: set[str]) -> None:
        self.fleet, self.honest = fleet, honest
        self.record = Record()
        self.damaged: set[str] = set()
        """Digests of updates that a fault damaged: these alone may be left out, and their rounds may fail."""
        self.refused: set[str] = set()
        """Identities of runs that no gate lets pass."""
        self.since: Counter[str] = Counter()
        """By device, how often it counted since :meth:`forget`."""
        self.commits = 0
        self._unsettled: set[tuple[int, str, str]] = set()
        self._epoch = self._floor = 0

    def forget(self) -> None:
        """Count anew from here."""
        self.since.clear()
        self.commits = 0

    def heard(self, device: str, arrival: Arrival) -> None:
        """A message came to a device: it may be the receipt of its update."""
        if not arrival.topic.endswith("/cmd") or device not in self.honest:
            return
        try:
            frame = decode_frame(arrival.payload)
            message = m.decode_message(frame)
        except WireError:
            return
        self._epoch = max(self._epoch, frame.header.boot)
        if frame.header.boot <= self._floor:
            return  # on its way since before the record went back
        if isinstance(message, m.Receipt) and message.outcome == "stored":
            entry = (message.attempt, device, message.sha256.hex())
            if entry not in self.record.receipts:
                self.record = replace(self.record, receipts=self.record.receipts | {entry})
                self._unsettled.add(entry)

    def shut_out(self, device: str, reason: str) -> None:
        """The coordinator shut a device out."""
        if device in self.honest:
            raise BrokenError("shut-out", f"{device} is honest and was shut out: {reason}")

    def look(self, store: Store, blobs: Blobs) -> None:
        """Compare what is new in the record with what must be there."""
        known = {row.attempt: row for row in store.attempts.of(self.fleet, last=40)}
        for row in (known[n] for n in sorted(known) if n > self.record.checked):
            if row.closed is None:
                break
            if row.counted is not None:
                self._begins(store, blobs, row.attempt, row.base_digest)
                self._committed(store, blobs, row.attempt, row.round, str(row.model_digest), row.counted)
            self.record = replace(self.record, checked=row.attempt)
        for number, device, digest in sorted(self._unsettled):
            mine = [u for u in store.updates.of(self.fleet, number) if u.device == device]
            if not mine or mine[0].digest != digest or mine[0].status not in ("stored", "counted"):
                self._lost(number, device, f"the record holds {mine[0].status if mine else 'nothing'}", digest)
                continue
            row_ = known.get(number)
            if row_ is not None and row_.counted is not None and mine[0].status != "counted":
                self._lost(number, device, "the round was committed without it", digest)
            if mine[0].status == "counted" or (row_ is not None and row_.closed is not None):
                self._unsettled.discard((number, device, digest))
            elif digest not in self.damaged:
                try:
                    blobs.get(digest)
                except StateError as error:
                    self._lost(number, device, str(error), digest)

    def _lost(self, number: int, device: str, why: str, digest: str) -> None:
        if digest not in self.damaged:
            raise BrokenError("lost", f"{device} was told that its update of attempt {number} is stored, but {why}")
        self._unsettled.discard((number, device, digest))

    def _begins(self, store: Store, blobs: Blobs, number: int, base: str) -> None:
        """A round begins from the last global model; after a run that was called off, from the one before its trial."""
        if base == self.record.digest or not self.record.digest:
            return
        off = [e for e in store.audit.events(self.fleet, 10_000) if e["kind"] == "canary-called-off"]
        if not off or off[-1]["seq"] <= self.record.off or off[-1]["model_digest"] != base:
            raise BrokenError("model", f"attempt {number} begins from {base[:12]}, which is not the last global model")
        model = exact.opened(blobs.get(base))
        self.record = replace(self.record, model=model, digest=base, off=off[-1]["seq"])

    def _committed(
        self,
        store: Store,
        blobs: Blobs,
        number: int,
        round: int,
        model_digest: str,
        counted: tuple[tuple[int, str], ...],
    ) -> None:
        if round != self.record.round + 1:
            raise BrokenError("model", f"attempt {number} committed round {round} after {self.record.round}")
        now, seen = self.record.model, self.record.counted
        for made, device in sorted(counted, key=lambda pair: (pair[1], pair[0])):
            row = next(u for u in store.updates.of(self.fleet, made) if u.device == device)
            if (device, row.digest) in seen:
                raise BrokenError("twice", f"attempt {number} counts again the update {row.digest[:12]} of {device}")
            seen |= {(device, row.digest)}
            try:
                now = exact.added(now, exact.checked(blobs.get(row.digest), device))
            except StateError as error:
                raise BrokenError("model", f"attempt {number} counts an update that cannot be read: {error}") from None
            self.since[device] += 1
        self._same(number, exact.opened(blobs.get(model_digest)), now)
        self.commits += 1
        self.record = replace(self.record, round=round, model=now, digest=model_digest, counted=seen)

    def finally_(self, store: Store, blobs: Blobs) -> None:
        """The whole record once more, from its beginning, and the chain of its log."""
        self.look(store, blobs)
        try:
            store.audit.verify()
        except StateError as error:
            raise BrokenError("model", str(error)) from None
        for event in store.audit.events(self.fleet, 10_000):
            if event["kind"] == "canary-passed" and event["identity"] in self.refused:
                raise BrokenError(
                    "canary", f"all gates refuse the run {event['identity'][:12]}, and it passed its trial"
                )
        before = dict(exact.ZERO)
        for row in store.attempts.of(self.fleet):
            if row.model_digest is None or row.counted is None:
                continue
            mine = [u for made, device in row.counted for u in store.updates.of(self.fleet, made) if u.device == device]
            after = exact.opened(blobs.get(row.model_digest))
            # A backup holds global models, and no updates that are folded into them.
            if all(blobs.has(u.digest) and u.digest not in self.damaged for u in mine):
                made = exact.opened(blobs.get(row.base_digest)) if blobs.has(row.base_digest) else before
                for u in mine:
                    made = exact.added(made, exact.checked(blobs.get(u.digest), u.device))
                self._same(row.attempt, after, made)
            before = after

    def _same(self, number: int, have: Tensors, made: Tensors) -> None:
        if any(not np.array_equal(have[name], made[name]) for name in made):
            told, right = have["marks"].tolist(), made["marks"].tolist()
            raise BrokenError("model", f"the global model of attempt {number} has marks {told}, by its record {right}")

    def went_back(self, to: Record) -> None:
        """The record is that of a backup again: what came after it is known to be gone."""
        self.record, self._floor = to, self._epoch
        self._unsettled = {r for r in to.receipts if r[0] > to.checked}
