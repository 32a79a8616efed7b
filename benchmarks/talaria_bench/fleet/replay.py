"""What a fleet left behind, compared with the same contributions computed undisturbed, in this process."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.numpy import load_file

from talaria import tensors
from talaria.aggregate.base import Aggregator
from talaria.errors import StateError
from talaria.federated import global_model, rounds
from talaria.federated.private_rule import coordinates_of
from talaria.federated.run import Member, Run
from talaria.privacy.in_process import plain_sum
from talaria.privacy.rule import Privacy, contribution, inner_of, with_sum
from talaria.tensors import Tensors
from talaria.types import Update
from talaria.wire import codec
from talaria_coordinator.fleet.aggregation import Learning
from talaria_coordinator.storage.blobs import FolderBlobs
from talaria_coordinator.storage.records import Attempt, Received
from talaria_coordinator.storage.store import Store

Receipt = tuple[str, int]
"""A device and the number of the round whose update it was told to be stored."""
MOST = 64
"""Private states that a device may have had, as far as the coordinator can tell."""


@dataclass
class Ledger:
    """What was promised, kept and counted, and where it was not as it must be (``wrong``, in words)."""

    rounds: int = 0
    failed: int = 0
    stored: int = 0
    counted: int = 0
    receipts: int = 0
    lost: int = 0
    twice: int = 0
    models: int = 0
    models_equal: int = 0
    updates_equal: int = 0
    private_equal: int = 0
    log: int = 0
    final: str = ""
    wrong: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Every committed global model is the undisturbed one, to the byte."""
        return self.rounds > 0 and self.models == self.models_equal == self.rounds


def audit(
    state: Path,
    fleet: str,
    run: Run,
    members: Mapping[str, Member],
    devices: Path,
    receipts: Iterable[Receipt],
    began: Collection[tuple[str, int]],
    privacy: Privacy | None = None,
) -> Ledger:
    """The ledger of the fleet in the folder ``state``, whose devices' own folders lie in ``devices``. ``began`` says
    which device told that it trains in which round. With ``privacy`` nobody can read a single update: the sums are
    compared, made in the open of the same whole numbers."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as the programs train: sums may depend on it
    try:
        with Store(state / "coordinator.db") as store:
            ledger, every, updates = _promised(store, fleet, receipts)
            try:
                ledger.log = store.audit.verify()
            except StateError as error:
                ledger.wrong.append(str(error))
            learning = Learning(run, FolderBlobs(state / "blobs"), privacy=privacy)
            private = _replay(ledger, learning, members, every, updates, began)
            _private(ledger, private, devices)
    finally:
        torch.set_num_threads(before)
    return ledger


def promised(state: Path, fleet: str, receipts: Iterable[Receipt]) -> Ledger:
    """The ledger without learning anything again: what was promised, kept and counted."""
    with Store(state / "coordinator.db") as store:
        return _promised(store, fleet, receipts)[0]


def _promised(
    store: Store, fleet: str, receipts: Iterable[Receipt]
) -> tuple[Ledger, list[Attempt], dict[int, list[Received]]]:
    ledger, every = Ledger(), store.attempts.of(fleet)
    updates = {row.attempt: store.updates.of(fleet, row.attempt) for row in every}
    promises(ledger, every, updates, receipts)
    twice(ledger, every, store.audit.events(fleet, last=10**9), updates)
    return ledger, every, updates


def counted_in(state: Path, fleet: str) -> list[list[str]]:
    """The devices in each committed global model, the first one first."""
    with Store(state / "coordinator.db") as store:
        return [[device for _, device in row.counted] for row in store.attempts.of(fleet) if row.counted]


def promises(
    ledger: Ledger, every: Sequence[Attempt], updates: Mapping[int, Sequence[Received]], receipts: Iterable[Receipt]
) -> None:
    """Whoever was told ``stored`` is stored, and counts where the round was committed."""
    committed = {row.attempt for row in every if row.counted is not None}
    counted = {pair for row in every for pair in row.counted or ()}
    rows = {(row.attempt, row.device): row for found in updates.values() for row in found}
    ledger.rounds, ledger.failed = len(committed), sum(row.failure is not None for row in every)
    ledger.stored = sum(row.status in ("stored", "counted") for row in rows.values())
    for device, number in sorted(set(receipts)):
        ledger.receipts += 1
        row = rows.get((number, device))
        kept = row is not None and row.status in ("stored", "counted")
        if not kept or (number in committed and (number, device) not in counted):
            ledger.lost += 1
            ledger.wrong.append(f"lost: {device} has a receipt for attempt {number}")
    if counted and not ledger.receipts:
        ledger.wrong.append("updates counted, and no device told of a receipt: nothing shows that none was lost")


def twice(
    ledger: Ledger,
    every: Sequence[Attempt],
    events: Sequence[Mapping[str, Any]],
    updates: Mapping[int, Sequence[Received]],
) -> None:
    """No update stands in two global models, and no device in one global model twice: by the rounds and by the audit
    log."""
    by_rows = Counter((made, device) for row in every for made, device in row.counted or ())
    by_log = Counter((int(m), str(d)) for e in events if e["kind"] == "round-closed" for m, d in e["counted"])
    round = {row.attempt: row.round for row in every}
    learned = Counter((round[made], device) for made, device in by_rows.elements())
    marked = sum(row.status == "counted" for found in updates.values() for row in found)
    ledger.counted = sum(by_rows.values())
    ledger.twice = sum(n - 1 for found in (by_rows, learned) for n in found.values())
    if by_log != by_rows or marked != ledger.counted:
        ledger.wrong.append("the audit log, the rounds and the updates' marks do not name the same counted updates")
    if ledger.twice:
        ledger.wrong.append(f"counted twice: {[k for k, n in (by_rows | learned).items() if n > 1][:5]}")


def update_of(learning: Learning, data: bytes, device: str, row: Attempt) -> Update:
    """The update in ``data``, checked as the coordinator checks it in this round; no device here is a gateway."""
    found = learning.checked(data, device, row.round, row.base_digest)
    if not isinstance(found, Update):
        raise StateError(f"{device} sent a partial sum")
    return found


def _replay(
    ledger: Ledger,
    learning: Learning,
    members: Mapping[str, Member],
    every: Sequence[Attempt],
    updates: Mapping[int, Sequence[Received]],
    began: Collection[tuple[str, int]],
) -> dict[str, list[Tensors | None]]:
    """Learn all committed rounds again. A device that trained without counting may or may not have gone on from
    what it learned: both are followed until its next update tells."""
    run = learning.run
    shared, server = rounds.start(run)
    private: dict[str, list[Tensors | None]] = {name: [None] for name in members}
    for row in (row for row in every if row.counted is not None):
        tries = [r for r in every if r.round == row.round]
        counted: dict[str, Update] = {}
        for name in sorted({device for t in tries for device in t.cohort}):
            told = {u.digest for t in tries for u in updates[t.attempt] if u.device == name}
            if not told and (name, row.round) not in began:
                continue  # it was away
            learned = [(state, _learn(run, members[name], shared, state, row.round)) for state in private[name]]
            if told and learning.privacy is not None:
                private[name] = _distinct(own for _, (_, own) in learned)
                counted[name] = update_of(learning, learned[0][1][0], name, row)
            elif told:
                after = [(data, own) for _, (data, own) in learned if hashlib.sha256(data).hexdigest() in told]
                ledger.updates_equal += bool(after)
                if not after:
                    ledger.wrong.append(f"attempt {row.attempt}: {name} sent another update than the undisturbed one")
                    after = [learned[0][1]]
                private[name] = _distinct([own for _, own in after])
                counted[name] = update_of(learning, after[0][0], name, row)
            else:
                private[name] = _distinct([*private[name], *(own for _, (_, own) in learned)])
        named = sorted(device for _, device in row.counted or ())
        if missing := [device for device in named if device not in counted]:
            ledger.wrong.append(f"attempt {row.attempt}: counted {missing}, of whom no update is stored")
            continue
        if named:
            rule = learning.aggregator if learning.privacy is None else _in_the_open(learning, shared, row, counted)
            shared, server = rounds.close(run, shared, server, [counted[device] for device in named], rule)
        ledger.models += 1
        ledger.final = hashlib.sha256(global_model.encode_model(shared, run.download)).hexdigest()
        if ledger.final == row.model_digest:
            ledger.models_equal += 1
        else:
            ledger.wrong.append(
                f"attempt {row.attempt}: its model is {str(row.model_digest)[:16]}, undisturbed {ledger.final[:16]}"
            )
    return private


def _in_the_open(learning: Learning, shared: Tensors, row: Attempt, counted: Mapping[str, Update]) -> Aggregator:
    """The rule of a secure round, given the sum that its whole numbers come to."""
    rule, coordinates = learning.aggregator, coordinates_of(learning.run)
    if rule is None:
        raise StateError("chaos: a secure run has a private rule")
    mean, named = inner_of(rule), sorted(device for _, device in row.counted or ())
    most = mean.privacy.most_weight or 0
    terms = mean.terms(coordinates, len(row.cohort), most, fleet="bench", round=row.round, attempt=row.attempt)
    given = {name: contribution(shared, coordinates, terms, counted[name]) for name in named}
    return with_sum(rule, coordinates, plain_sum(terms, coordinates, given), [given[name].mask for name in named], 0)


def _learn(run: Run, member: Member, shared: Tensors, state: Tensors | None, round: int) -> tuple[bytes, Tensors]:
    update, own = rounds.participate(run, member, shared, state, round)
    return codec.encode_update(update, run.codec), own


def _distinct(states: Iterable[Tensors | None]) -> list[Tensors | None]:
    found: list[Tensors | None] = []
    for state in states:
        if not any(_same(state, other) for other in found):
            found.append(state)
    if len(found) > MOST:
        raise StateError(f"chaos: a device took part {MOST} ways and more without counting; look at its journal")
    return found


def _same(one: Tensors | None, other: Tensors | None) -> bool:
    return one is other or (one is not None and other is not None and tensors.equal(one, other))


def _private(ledger: Ledger, private: Mapping[str, Sequence[Tensors | None]], devices: Path) -> None:
    """Each device's private state on flash is one that it can have undisturbed."""
    for name, states in sorted(private.items()):
        path = devices / name / "private.safetensors"
        have = load_file(path) if path.exists() else None
        if any(_same(have, state) for state in states):
            ledger.private_equal += 1
        else:
            ledger.wrong.append(f"{name}: the private state on flash is none that it can have undisturbed")
