"""A story's rounds learned again, undisturbed, along the audit log: each run from what it began with, what was called
off, and what a restore took back. Nothing may be lost but what the restore did, and nothing counts twice."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.numpy import load_file

from talaria import tensors
from talaria.errors import StateError
from talaria.federated import device_task, global_model, rounds, warm_start
from talaria.federated.run import Member, Run
from talaria.tensors import Tensors
from talaria.types import Update
from talaria.wire import codec
from talaria_bench.fleet.replay import MOST, Ledger, Receipt, promises, twice, update_of
from talaria_coordinator.fleet.aggregation import Learning
from talaria_coordinator.storage.blobs import FolderBlobs
from talaria_coordinator.storage.records import Attempt
from talaria_coordinator.storage.store import Store

Event = Mapping[str, Any]
MemberOf = Callable[[str, Run], Member]


@dataclass(frozen=True, eq=False)
class Own:
    """A private state that a device may have, of the run ``of``, beside that of the run before."""

    tensors: Tensors
    of: str
    follows: tuple[str, ...]
    before: Own | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Global:
    """What is learned just now, and from which model; ``before``: what a trial that is called off gives way to."""

    run: Run
    shared: Tensors
    server: Tensors
    before: Global | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Record:
    """One coordinator's record, read whole."""

    blobs: FolderBlobs
    attempts: tuple[Attempt, ...]
    events: tuple[Event, ...]
    digests: Mapping[tuple[int, str], str]
    """The sha256 of every update, by attempt and device."""

    @staticmethod
    def of(state: Path, fleet: str, receipts: Collection[Receipt], ledger: Ledger) -> Record:
        """What lies in the folder ``state``; ``ledger`` is told what was promised, kept and counted."""
        with Store(state / "coordinator.db") as store:
            every, events = store.attempts.of(fleet), store.audit.events(fleet, last=10**9)
            updates = {row.attempt: store.updates.of(fleet, row.attempt) for row in every}
            promises(ledger, every, updates, receipts)
            twice(ledger, every, events, updates)
            try:
                ledger.log = store.audit.verify()
            except StateError as error:
                ledger.wrong.append(str(error))
        digests = {(row.attempt, row.device): row.digest for found in updates.values() for row in found}
        return Record(FolderBlobs(state / "blobs"), tuple(every), tuple(events), digests)


class Retelling:
    """All rounds of a story again. ``runs`` are those that may follow, by identity, and ``began`` says which device
    told that it trains in which round."""

    def __init__(
        self, first: Run, runs: Mapping[str, Run], member: MemberOf, devices: Collection[str],
        began: Collection[tuple[str, int]], ledger: Ledger,
    ) -> None:  # fmt: skip
        self.runs, self.member, self.began, self.ledger = runs, member, began, ledger
        self.now = Global(first, *rounds.start(first))
        self.own: dict[str, list[Own | None]] = {name: [None] for name in devices}

    def tell(self, record: Record, events: Sequence[Event]) -> int:
        """Live through these events of the record; how many rounds were committed in them."""
        found, rows = 0, {row.attempt: row for row in record.attempts}
        for event in events:
            match event["kind"]:
                case "run-extended":
                    self.now = replace(self.now, run=replace(self.now.run, rounds=event["rounds"]))
                case "run-followed":
                    self._follow(event)
                case "canary-passed":
                    self.now = replace(self.now, before=None)
                case "canary-called-off" if self.now.before is not None:
                    off, self.now = self.now.run.identity, self.now.before
                    self._same(event["model_digest"], "called off")
                    self.own = {name: _distinct([_taken_back(s, off) for s in own]) for name, own in self.own.items()}
                case "round-closed":
                    self._commit(record, rows[event["attempt"]])
                    found += 1
        return found

    def _follow(self, event: Event) -> None:
        if event["identity"] not in self.runs:
            self.ledger.wrong.append(f"a run follows that nobody planned: {event['identity'][:16]}")
            return
        run, old = self.runs[event["identity"]], self.now
        shared = warm_start.carried(old.run, run, old.shared).tensors
        server = rounds.rule_of(run, None).init(shared)
        self.now = Global(run, shared, server, before=old)
        self._same(event["model_digest"], "a warm start")

    def _same(self, digest: str, what: str) -> bool:
        data = global_model.encode_model(self.now.shared, self.now.run.download)
        self.ledger.final = hashlib.sha256(data).hexdigest()
        if self.ledger.final != digest:
            self.ledger.wrong.append(f"{what}: its model is {digest[:16]}, undisturbed {self.ledger.final[:16]}")
        return self.ledger.final == digest

    def _commit(self, record: Record, row: Attempt) -> None:
        run, shared = self.now.run, self.now.shared
        learning, tries = Learning(run, record.blobs), [r for r in record.attempts if r.round == row.round]
        counted: dict[str, Update] = {}
        for name in sorted({device for t in tries for device in t.cohort}):
            told = {record.digests[t.attempt, name] for t in tries if (t.attempt, name) in record.digests}
            if not told and (name, row.round) not in self.began:
                continue  # it was away
            learned = [self._learn(name, one, row.round) for one in self.own[name]]
            after = [(data, own) for data, own in learned if hashlib.sha256(data).hexdigest() in told]
            if told:
                self.ledger.updates_equal += bool(after)
                if not after:
                    self.ledger.wrong.append(f"round {row.round}: {name} sent another update than the undisturbed one")
                    after = learned[:1]
                counted[name] = update_of(learning, after[0][0], name, row)
                self.own[name] = _distinct([own for _, own in after])
            else:
                self.own[name] = _distinct([*self.own[name], *(own for _, own in learned)])
        named = sorted(device for _, device in row.counted or ())
        if missing := [device for device in named if device not in counted]:
            self.ledger.wrong.append(f"round {row.round}: counted {missing}, of whom no update is stored")
            return
        if named:
            shared, server = rounds.close(run, shared, self.now.server, [counted[name] for name in named], None)
            self.now = replace(self.now, shared=shared, server=server)
        self.ledger.models += 1
        self.ledger.models_equal += self._same(str(row.model_digest), f"round {row.round}")

    def _learn(self, name: str, own: Own | None, round: int) -> tuple[bytes, Own]:
        """As the agent does it: what a run before left is carried over."""
        run, shared = self.now.run, self.now.shared
        member = self.member(name, run)
        private, before = None if own is None else own.tensors, None if own is None else own.before
        if own is not None and own.of != run.identity:
            private, before = warm_start.private_of(run, member, shared, own.tensors).tensors, replace(own, before=None)
        update, moved = rounds.participate(run, member, shared, private, round)
        data = codec.encode_update(update, device_task.codec_of(run, member))
        return data, Own(moved, run.identity, run.follows, before)


def _taken_back(own: Own | None, off: str) -> Own | None:
    """The state of the run before in place of that of a run that was called off."""
    return own.before if own is not None and own.of == off else own


def _distinct(states: Sequence[Own | None]) -> list[Own | None]:
    found: list[Own | None] = []
    for state in states:
        if not any(_same(state, other) for other in found):
            found.append(state)
    if len(found) > MOST:
        raise StateError(f"story: a device took part {MOST} ways and more without counting; look at its journal")
    return found


def _same(one: Own | None, other: Own | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.of == other.of and tensors.equal(one.tensors, other.tensors) and _same(one.before, other.before)


@dataclass(frozen=True)
class Found:
    """What a story left behind. ``before`` are the promises of the record that the restore gave up, ``ledger`` those of
    the last one, with all that was learned again."""

    ledger: Ledger
    before: Ledger
    record: Record
    lost_by_restore: int
    rounds_again: int
    """Committed before the restore, and gone with it."""


def audit(
    state: Path, gone: Path, fleet: str, first: Run, runs: Mapping[str, Run], member: MemberOf,
    devices: Mapping[str, Path], receipts: tuple[Collection[Receipt], Collection[Receipt]],
    began: Collection[tuple[str, int]],
) -> Found:  # fmt: skip
    """Compare the record in ``state``, and the one in ``gone`` in whose place it was restored, with what is learned
    again here. ``receipts`` are those before and after the restore, ``devices`` the devices' own folders."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the programs train: sums may depend on it
    try:
        ledger, before = Ledger(), Ledger()
        old, new = Record.of(gone, fleet, receipts[0], before), Record.of(state, fleet, receipts[1], ledger)
        at = next((i for i, event in enumerate(new.events) if event["kind"] == "restored"), len(new.events))
        lost = lost_receipts(old, new, new.events[:at], receipts[0], ledger)
        ledger.wrong += before.wrong
        retelling = Retelling(first, runs, member, devices, began, ledger)
        retelling.tell(new, new.events[:at])
        kept, own = retelling.now, dict(retelling.own)
        again = retelling.tell(old, old.events[at:])
        # The fleet is back where it was; its devices are not, and go on from what they have.
        retelling.now = kept
        retelling.own = {name: _distinct([*retelling.own[name], *own[name]]) for name in own}
        retelling.tell(new, new.events[at:])
        ledger.rounds += again
        for name, folder in sorted(devices.items()):
            path = folder / "private.safetensors"
            have = load_file(path) if path.exists() else None
            states = [None if one is None else one.tensors for one in retelling.own[name]]
            if any(
                have is one or (have is not None and one is not None and tensors.equal(have, one)) for one in states
            ):
                ledger.private_equal += 1
            else:
                ledger.wrong.append(f"{name}: the private state on flash is none that it can have undisturbed")
    finally:
        torch.set_num_threads(threads)
    return Found(ledger, before, new, lost, again)


def lost_receipts(
    old: Record, new: Record, kept: Sequence[Event], receipts: Collection[Receipt], ledger: Ledger
) -> int:
    """How many receipts the restore took back. They are all of attempts that its backup had not committed."""
    committed = {event["attempt"] for event in kept if event["kind"] == "round-closed"}
    gone = [(name, n) for name, n in set(receipts) if old.digests.get((n, name)) != new.digests.get((n, name))]
    for name, number in gone:
        if number in committed:
            ledger.wrong.append(f"lost: {name} has a receipt for attempt {number}, which the backup has committed")
            ledger.lost += 1
    return len(gone)
