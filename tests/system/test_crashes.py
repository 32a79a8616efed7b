"""Killed in mid-round and started again, the fleet learns the same bytes as undisturbed."""

from dataclasses import replace

import pytest

from talaria import tensors


def finish(one, coordinator, *groups):
    for group in groups:
        assert group.end() == 0, (group.errors, group.events[-12:])
    assert coordinator.end() == 0
    simulated = one.simulated()
    assert tensors.equal(one.shared(), simulated.shared)
    for device in one.devices:
        assert tensors.equal(one.private(device), simulated.private[device]), device


def test_an_edge_process_is_killed_in_every_round(fleet, a_run):
    one = fleet(a_run("hermes", epochs=3, threshold=0.0), devices=("anna", "bela", "carl"))
    one.extra = "quorum = 1.0"  # else a round goes on without those who are killed
    coordinator = one.serve()
    url = coordinator.wait_for("ready")["broker"]
    steady = one.agents(url, "anna")
    shaky = one.agents(url, "bela", "carl")
    for round, moment in ((1, "training"), (2, "trained"), (3, "received")):
        shaky.wait_for(moment, round=round)
        shaky.kill()
        shaky = one.agents(url, "bela", "carl")
    finish(one, coordinator, steady, shaky)


@pytest.mark.parametrize("broker", ["mosquitto", "amqtt"])
def test_the_coordinator_is_killed_in_every_round(fleet, a_run, broker):
    one = fleet(a_run("fedper", epochs=3), devices=("anna", "bela", "carl"), broker=broker)
    one.extra = "quorum = 1.0"  # the broker ends with it, and says everybody's last will
    coordinator = one.serve()
    url = coordinator.wait_for("ready")["broker"]
    group = one.agents(url)
    epoch = 0
    for round, moment in ((1, "round-opened"), (2, "progress"), (3, "round-opened")):
        coordinator.wait_for("round-opened", round=round)
        if moment == "progress":
            coordinator.wait_for("progress", phase="working")
        coordinator.kill()
        coordinator = one.serve()
        again = coordinator.wait_for("ready")
        assert again["broker"] == url, "devices must find the broker where it was"
        before, epoch = epoch, coordinator.wait_for("started")["epoch"]
        assert epoch > before
    finish(one, coordinator, group)


def test_who_was_killed_and_began_again_downloads_what_changed_since(fleet, a_run):
    run = a_run("fedper")
    one = fleet(replace(run, recipe=run.recipe.but(lr=0.001)), devices=("anna", "bela"))
    one.extra = "quorum = 1.0"
    coordinator = one.serve()
    url = coordinator.wait_for("ready")["broker"]
    steady, shaky = one.agents(url, "anna"), one.agents(url, "bela")
    whole = shaky.wait_for("model")
    shaky.wait_for("received", round=1)
    shaky.kill()
    again = one.agents(url, "bela")
    finish(one, coordinator, steady, again)
    first, *later = [event for event in again.events if event["event"] == "model"]
    assert not whole.get("changes")
    assert first["changes"]
    assert first["bytes"] < 0.8 * whole["bytes"]
    assert later
