"""A real fleet under a few faults of every kind: all promises kept, the same bytes. `talaria bench chaos` does more."""

import json

import pytest

from talaria.federated.run import Engine
from talaria_bench.fleet import replay
from talaria_bench.fleet.files import FLEET, member, run_of
from talaria_coordinator.storage.audit import append
from talaria_coordinator.storage.store import Store

DEVICES: dict[str, Engine] = {"edge-00": "torch", "edge-01": "onnx", "edge-02": "torch"}
"""And who trains in each."""


@pytest.mark.timeout(900)
def test_a_disturbed_fleet_keeps_its_promises(command, tmp_path):
    place = tmp_path / "fleet"
    status, out, errors = command(
        "bench",
        "chaos",
        "--faults",
        15,
        "--seed",
        3,
        "--devices",
        3,
        "--engine",
        "both",
        "--folder",
        place,
        "--json",
        seconds=840,
    )
    found = json.loads(out)
    assert status == 0, (found["wrong"], errors[-2000:])
    assert found["kept"] is True
    assert found["faults"] == 15
    assert min(found["by_kind"].values()) >= 1
    assert (found["lost"], found["twice"], found["wrong"]) == (0, 0, [])
    assert found["rounds"] == found["models_equal"] == 8
    assert found["equal"] is True
    assert found["receipts"] > 0
    assert found["private_equal"] == 3
    assert found["starts"]["coordinator"] > 1
    assert_that_the_audit_sees(place, found)


def assert_that_the_audit_sees(place, found):
    """What the bench would say, had a promise been broken."""
    run = run_of("fedper", found["rounds"], 3)
    members = {name: member(place / f"{name}.npz", name, engine) for name, engine in DEVICES.items()}
    state = place / "state"
    began = {(name, round) for name in DEVICES for round in range(1, found["rounds"] + 1)}

    ledger = replay.audit(state, FLEET, run, members, state, [("edge-00", 999)], began)
    assert (ledger.lost, ledger.wrong) == (1, ["lost: edge-00 has a receipt for attempt 999"])

    ledger = replay.promised(state, FLEET, [])
    assert ledger.wrong == ["updates counted, and no device told of a receipt: nothing shows that none was lost"]

    other = {**members, "edge-01": member(place / "edge-00.npz", "edge-01", "onnx")}
    ledger = replay.audit(state, FLEET, run, other, state, [], began)
    assert not ledger.equal
    assert any("edge-01 sent another update" in line for line in ledger.wrong)

    store = Store(state / "coordinator.db")
    try:
        last = next(row for row in reversed(store.attempts.of(FLEET)) if row.counted)
        with store.database.writing(FLEET) as tx:
            append(tx, "round-closed", {"counted": last.counted}, fleet=FLEET, attempt=last.attempt)
    finally:
        store.close()
    ledger = replay.promised(state, FLEET, [])
    assert any("do not name the same" in line for line in ledger.wrong)
