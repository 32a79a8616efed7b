"""Who made which version of a fleet's body, from the store: what a replay needs to come to the same bytes."""

from __future__ import annotations

from talaria.federated.rounds import Run
from talaria.simulation.schedules import Record
from talaria_coordinator.storage.store import Store


def records(store: Store, fleet: str) -> tuple[Record, ...]:
    """One record for each version made, for :func:`talaria.simulation.run.replay`.

    In rounds, updates that were received whole and came too late are named too, since their training moved the device's
    private part; one whose update was never received is not known here, and a replay may then differ by it. In an
    asynchronous run what does not count leaves no trace on the device, and is not named.
    """
    every = store.rounds(fleet)
    step = {row.round: row.step for row in every}
    made = [row for row in every if row.counted is not None]
    counted = [tuple(sorted((device, step[number] - 1) for number, device in row.counted or ())) for row in made]
    known = {training for version in counted for training in version}
    late: dict[int, set[tuple[str, int]]] = {}
    known_fleet = store.fleet(fleet)
    asynchronous = known_fleet is not None and Run.from_json(known_fleet.run, allow=None).asynchronous
    for row in every if not asynchronous else ():
        for update in store.updates(fleet, row.round):
            training = (update.device, row.step - 1)
            if update.status == "stored" and training not in known and row.step <= len(made):
                late.setdefault(row.step - 1, set()).add(training)
    return tuple(Record(version, tuple(sorted(late.get(index, ())))) for index, version in enumerate(counted))
