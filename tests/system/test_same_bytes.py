"""What is simulated is what is deployed: over a real broker, between processes, to the byte."""

import json

import pytest

from talaria import tensors
from talaria.federated.run_model import layout_of

RUNS = {"fedavg": {}, "fedper": {}, "hermes": {"threshold": 0.0}}


@pytest.mark.parametrize("broker", ["mosquitto", "amqtt"])
@pytest.mark.parametrize("algorithm", RUNS)
def test_simulation_and_fleet_give_the_same_bytes(fleet, a_run, broker, algorithm):
    run = a_run(algorithm, **RUNS[algorithm])
    sizes = layout_of(run.spec).sizes
    narrow = {g: max(8, n // 2) for g, n in sizes.items()}
    one = fleet(run, broker=broker, widths={"anna": narrow, "carl": narrow})
    coordinator = one.serve()
    ready = coordinator.wait_for("ready")
    assert ready["kind"] == broker
    groups = [one.agents(ready["broker"], "anna", "bela"), one.agents(ready["broker"], "carl", "dora")]
    assert [group.end() for group in groups] == [0, 0]
    assert coordinator.end() == 0

    simulated = one.simulated()
    assert tensors.equal(one.shared(), simulated.shared)
    for device in one.devices:
        assert tensors.equal(one.private(device), simulated.private[device]), device
        result = json.loads((one.state_of(device) / "result.json").read_text())
        assert result["rounds"] == run.rounds
        assert sorted(map(int, result["traffic"])) == list(range(1, run.rounds + 2))
