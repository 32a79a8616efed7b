"""What a device keeps where a run that it tried was called off."""

import hashlib
from dataclasses import replace

import pytest

from talaria import tensors
from talaria.errors import StateError
from talaria.federated import global_model, rounds, warm_start
from talaria.types import Recipe
from talaria_coordinator.config.fleet import Canary, FleetConfig
from talaria_coordinator.fleet.life import carry_out
from talaria_coordinator.fleet.operator_commands import Order
from talaria_edge.agent.training import Learner
from talaria_edge.config import DeviceConfig
from talaria_edge.data import Given
from talaria_edge.storage.state import DeviceStore


@pytest.fixture
def anna(tmp_path, device_data):
    """Learns rounds of any run, each from that run's first global model, and gives the private state after it."""
    config = DeviceConfig(
        device="anna",
        fleet="watch",
        broker="mqtt://127.0.0.1",
        state=tmp_path / "anna",
        source=Given(lambda: device_data(0)),
    )
    with DeviceStore(config.state, "watch", "anna") as store:

        def learn(run, round, epoch=1):
            model = global_model.encode_model(rounds.start(run)[0])
            store.model_part("x").write_bytes(model)
            store.adopt_model("x")
            Learner(config, store, run).learn(round, hashlib.sha256(model).digest(), epoch=epoch)
            store.publish()
            return store.private()

        yield learn


def runs(a_run):
    """A run, one that was called off, one that followed it there, and one that follows the first."""
    first = a_run("fedper", rounds=9)
    off = warm_start.following(first, replace(first, recipe=Recipe(batch=8, lr=0.5)))
    further = warm_start.following(off, replace(off, recipe=Recipe(batch=8, lr=0.2)))
    third = warm_start.following(first, replace(first, recipe=Recipe(batch=8, lr=0.01)))
    return first, off, further, third


def test_a_device_that_was_away_while_the_run_it_tried_was_called_off_goes_on_from_the_one_before(anna, a_run):
    first, off, _, third = runs(a_run)
    kept = anna(first, 1)
    tried = anna(off, 2)
    assert not tensors.equal(kept.tensors, tried.tensors)
    found = anna(third, 3)  # it has not heard of the first one again
    assert found.follows == third.follows == (first.identity,)
    again = anna(warm_start.following(third, first), 4)
    assert again.run != first.identity


def test_what_a_restore_took_back_gives_way_however_many_runs_it_were(anna, a_run):
    first, off, further, third = runs(a_run)
    anna(first, 1)
    anna(off, 2)
    anna(further, 3)
    assert anna(third, 2, epoch=2).follows == (first.identity,)


def test_the_state_of_another_run_is_refused_still(anna, a_run):
    first, off, _, _ = runs(a_run)
    anna(off, 1)
    with pytest.raises(StateError, match="belongs to another run of this fleet"):
        anna(replace(first, seed=77), 2)


def test_a_trial_whose_members_can_make_no_bundle_ends_and_their_owners_are_told(house, run_all, a_run, tmp_path):
    """Each of its rounds was declined, again and again, so that no gate was asked."""
    canary = Canary(share=0.5, rounds=1)
    one = house(a_run("fedper", recipe=Recipe(epochs=1, batch=8, lr=0.05)), quorum=1.0, canary=canary)

    async def served():
        await one.serve()
        if one.of("canary"):  # it begins anew with the run before
            await one.serve()

    def lived():
        names = {"labels": ("rest", "walk"), "bundle": tmp_path / "personal.talaria"}  # of three classes
        run_all(served(), *(one.agent(name, **names) for name in one.data))

    lived()
    config = FleetConfig(name="watch", run=one.run, state=tmp_path, members=tuple(one.data), canary=canary)
    carry_out(Order("next", rounds=3), one.store.fleets.get("watch"), config, one.store, one.blobs)
    lived()
    (off,) = [event for event in one.store.audit.events("watch", 500) if event["kind"] == "canary-called-off"]
    assert (off["asked"], off["answered"]) == (1, 0)
    assert any("no voice in the trial: device: labels=2 names" in told["error"] for told in one.of("error"))
