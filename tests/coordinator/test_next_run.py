"""What a run that begins from another's model takes over, and what is refused while one is tried."""

from dataclasses import replace

import pytest

from talaria.errors import ConfigError
from talaria.federated.run import Run
from talaria.model.spec import ModelSpec
from talaria.privacy.accounting import ledger_in
from talaria.privacy.rule import Privacy
from talaria.wire import codec
from talaria_coordinator.config.fleet import Canary, FleetConfig
from talaria_coordinator.config.privacy import PrivacyConfig
from talaria_coordinator.fleet.life import carry_out, follow, judge, learning_of
from talaria_coordinator.fleet.operator_commands import Order
from talaria_coordinator.storage.blobs import FolderBlobs
from talaria_coordinator.storage.devices import Sight
from talaria_coordinator.storage.store import Store

MEMBERS = ("anna", "bela", "carl", "dora")


def test_what_privacy_has_cost_is_not_forgotten_by_another_run_nor_by_one_that_is_called_off(tmp_path):
    run = Run(spec=ModelSpec("imu_cnn", (6, 32), 3), algorithm="fedavg", rounds=2)
    privacy = PrivacyConfig(rule=Privacy(clip=1.0, noise=2.0, epsilon=50.0))
    config = FleetConfig(
        name="watch", run=run, state=tmp_path, members=MEMBERS, privacy=privacy, canary=Canary(share=0.5, rounds=1)
    )
    blobs, learning = FolderBlobs(tmp_path / "blobs"), None
    with Store(tmp_path / "coordinator.db") as store:

        def ledger_of(fleet):
            return ledger_in(learning._server(fleet))

        def spent(fleet, devices):
            """A round of ``devices``, as its commit leaves the record."""
            ledger = ledger_of(fleet).after(devices)
            store.attempts.open("watch", fleet.round + 1, devices, fleet.model_digest)
            facts = {"model_digest": fleet.model_digest, "server": blobs.put(codec.encode_tensors(ledger.as_tensors()))}
            number = fleet.tried + 1
            facts["spent"] = learning.spent(facts["server"])
            store.attempts.commit("watch", number, epoch=fleet.epoch, counted=[], **facts)
            return store.fleets.get("watch")

        learning = learning_of(config, run, blobs)
        fleet = store.fleets.enter("watch", run.to_json(), *learning.first())
        store.fleets.set_roster("watch", MEMBERS)
        fleet = spent(fleet, MEMBERS)
        store.fleets.set_status("watch", "paused")
        follow(Order("next", rounds=3), store.fleets.get("watch"), config, store, blobs)
        fleet = store.fleets.get("watch")
        assert Run.from_json(fleet.run).follows == (run.identity,)
        held = ledger_of(fleet)
        assert (held.noise, held.version, dict(held.rounds)) == (2.0, 1, dict.fromkeys(MEMBERS, 1))
        with pytest.raises(ConfigError, match=r"being tried by .* until round 3; `resume` it"):
            follow(Order("next", rounds=3), replace(fleet, status="paused"), config, store, blobs)
        tried = fleet.life.canary["members"]
        fleet = spent(spent(fleet, tried), tried)
        assert judge(fleet, store)["called_off"]
        fleet = store.fleets.get("watch")
        assert fleet.run == replace(run, rounds=4).to_json()
        assert dict(ledger_of(fleet).rounds) == dict.fromkeys(MEMBERS, 1) | dict.fromkeys(tried, 3)
        (told,) = [event for event in store.audit.events("watch") if event["kind"] == "canary-called-off"]
        assert (told["round"], told["model_digest"], told["answered"]) == (3, fleet.model_digest, 0)


@pytest.fixture
def tried(tmp_path):
    """A fleet whose second run is tried by all four members, and what makes gates answer."""
    run = Run(spec=ModelSpec("imu_cnn", (6, 32), 3), algorithm="fedavg", rounds=2)
    config = FleetConfig(name="watch", run=run, state=tmp_path, members=MEMBERS, canary=Canary(share=1.0, rounds=1))
    blobs = FolderBlobs(tmp_path / "blobs")
    with Store(tmp_path / "coordinator.db") as store:
        store.fleets.enter("watch", run.to_json(), *learning_of(config, run, blobs).first())
        store.fleets.set_roster("watch", MEMBERS)
        store.fleets.set_status("watch", "paused")
        follow(Order("next", rounds=3), store.fleets.get("watch"), config, store, blobs)

        def answer(names, *, deployed):
            gate = {"run": store.fleets.get("watch").life.canary["identity"][:16], "deployed": deployed}
            for name in names:
                store.devices.see("watch", Sight(name, 1, {"gate": gate}))

        def give(order):
            carry_out(order, store.fleets.get("watch"), config, store, blobs)
            return store.fleets.get("watch")

        yield store, run, answer, give


def test_gates_that_have_refused_enough_call_a_run_off_though_their_round_is_never_committed(tried):
    store, run, answer, _ = tried
    answer(["anna"], deployed=False)
    assert judge(store.fleets.get("watch"), store) is None  # the other three may let it pass
    answer(["bela"], deployed=False)
    assert judge(store.fleets.get("watch"), store) == {"called_off": True, "asked": 4, "answered": 2, "refused": 2}
    fleet = store.fleets.get("watch")
    assert (fleet.run, fleet.status, fleet.life.canary) == (run.to_json(), "running", {})


def test_a_run_that_fewer_try_than_the_rule_folds_is_called_off(tried):
    store, _, answer, _ = tried
    answer(["anna"], deployed=False)
    assert judge(store.fleets.get("watch"), store, least=3) is None
    assert judge(store.fleets.get("watch"), store, least=4)["called_off"]


def test_a_round_of_a_refused_run_that_is_open_still_ends_first(tried):
    store, _, answer, give = tried
    answer(store.fleets.get("watch").life.canary["members"], deployed=False)
    fleet = store.fleets.get("watch")
    row = store.attempts.open("watch", 2, fleet.life.canary["members"], fleet.model_digest)
    assert judge(fleet, store) is None  # a coordinator that starts again finds it so
    give(Order("abort"))
    assert store.attempts.get("watch", row.attempt).failure == "called off with the run"
    assert store.attempts.unclosed("watch") == []


def test_gates_that_let_a_run_pass_are_waited_for_until_their_round_is_committed(tried):
    store, _, answer, _ = tried
    answer(store.fleets.get("watch").life.canary["members"], deployed=True)
    assert judge(store.fleets.get("watch"), store) is None


def test_abort_calls_a_trial_off_and_resume_goes_on_with_the_run_before(tried):
    store, run, _, give = tried
    fleet = give(Order("abort", reason="it learns nothing"))
    assert (fleet.run, fleet.status, fleet.life.canary) == (run.to_json(), "aborted", {})
    (told,) = [event for event in store.audit.events("watch") if event["kind"] == "canary-called-off"]
    assert (told["answered"], told["refused"]) == (0, 0)
    assert give(Order("resume")).status == "running"


def test_a_fleet_that_is_paused_stays_so_when_its_trial_ends(tried):
    store, _, answer, give = tried
    give(Order("pause"))
    answer(store.fleets.get("watch").life.canary["members"], deployed=False)
    assert judge(store.fleets.get("watch"), store)["called_off"]
    assert store.fleets.get("watch").status == "paused"
