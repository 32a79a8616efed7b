"""A device's owner takes it out of the fleet for good: over a real broker, while the others go on."""

import json
from pathlib import Path

from talaria_coordinator.storage.store import Store


def test_an_owner_takes_a_device_out_while_a_round_waits_for_it(fleet, a_run, command):
    one = fleet(a_run("fedper", rounds=3), devices=("anna", "bela", "carl"))
    one.extra = "quorum = 1.0\n"  # a round waits for everybody
    coordinator = one.serve()
    broker = coordinator.wait_for("ready")["broker"]
    stranger = one.device_config("carl", broker)
    stranger.write_text(stranger.read_text().replace('name = "watch"', 'name = "other"'))
    status, _, errors = command("edge", "leave", stranger, "--wait", 2)
    assert status == 1
    assert "no coordinator of fleet 'other' answered within 2 s, so it belongs to the fleet still" in errors
    others = one.agents(broker, "anna", "bela")
    carl = one.agents(broker, "carl")
    carl.wait_for("connected")
    assert "in use by another process; stop that agent" in command("edge", "leave", one.folder / "carl.toml")[2]
    carl.wait_for("training", round=2)
    carl.kill()
    status, said, errors = command("edge", "leave", one.folder / "carl.toml", "--erase")
    assert (status, said.startswith("carl has left fleet watch")) == (0, True), errors
    assert sorted(path.name for path in one.state_of("carl").iterdir()) == ["left.json", "lock"]
    assert (one.folder / "carl.npz").exists(), "its samples are its owner's"
    assert coordinator.wait_for("left")["device"] == "carl"
    # Neither the open round nor any later one waits for it.
    assert (coordinator.end(), others.end()) == (0, 0)
    assert [e["cohort"] for e in coordinator.events if e["event"] == "round-opened"][-1] == 2
    config = one.config
    found = json.loads(command("coordinator", "status", config, "--json")[1])
    (row,) = [row for row in found["devices"] if row["device"] == "carl"]
    assert (found["round"], found["roster"], row["left_by"]) == (3, ["anna", "bela"], "owner")
    assert "left by its owner" in " ".join(command("coordinator", "status", config)[1].split())
    told = command("coordinator", "report", config)[1]
    assert "carl leaves for good by its owner's hand" in told
    assert "1 left for good, 1 of them by their owner's hand" in told
    with Store(one.folder / "state" / "coordinator.db") as store:
        assert len([event for event in store.audit.events("watch") if event["kind"] == "device-retired"]) == 1
    again = one.agents(broker, "carl")
    assert again.end() == 1
    assert "this device left its fleet 'watch' for good" in again.errors
    (kept := one.state_of("carl") / "private.safetensors").write_bytes(b"what a kill left before it was erased")
    assert "this device left its fleet" in command("edge", "leave", one.folder / "carl.toml")[2]
    assert command("edge", "leave", one.folder / "carl.toml", "--erase")[0] == 0, "it needs nobody who answers"
    assert not kept.exists()
    assert "by its owner's hand" in command("edge", "check", one.folder / "carl.toml", "--wait", 0.5)[1]


def test_a_fleet_that_cannot_be_reached_is_not_left(fleet, a_run, command):
    one = fleet(a_run(rounds=1), devices=("anna",))
    path = one.device_config("anna", "mqtt://127.0.0.1:9")
    kept = one.state_of("anna") / "private.safetensors"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"kept")
    status, _, errors = command("edge", "leave", path, "--erase", "--wait", 1)
    assert status == 1
    assert "127.0.0.1" in errors
    assert "it belongs to the fleet still, and nothing has changed here; try again later" in errors
    assert kept.read_bytes() == b"kept"
    assert not (Path(one.state_of("anna")) / "left.json").exists()
