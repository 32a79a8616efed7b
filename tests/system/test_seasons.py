"""A trial that passes, one that goes astray, and members that are away for a season."""

import asyncio
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from talaria.errors import DataError
from talaria.federated.run import Run
from talaria_coordinator.cli.orders import given
from talaria_coordinator.config.fleet import Canary, load_config
from talaria_coordinator.fleet.operator_commands import Order
from talaria_coordinator.maintenance.fsck import check
from talaria_coordinator.storage.blobs import FolderBlobs
from talaria_coordinator.storage.store import Store
from talaria_edge.agent.training import Learner
from talaria_edge.deployment import gate

sys.path.insert(0, str(Path(__file__).parent))
from test_in_process import House, run_all


def learned_by(one, shown=""):
    """The coordinator and its devices, which serve what they learned, to the end; what the devices told."""
    coordinator = one.serve()
    url = coordinator.wait_for("ready")["broker"]
    files = [one.device_config(name, url) for name in one.devices]
    for path, name in zip(files, one.devices, strict=True):
        served = f'bundle = "{name}.talaria"\nvariants = ["fp32"]\n[fleet]'
        path.write_text(path.read_text().replace("[fleet]", served) + shown)
    agents = one._start("edge", "run", *files, "--json")
    assert (coordinator.end(), agents.end()) == (0, 0)
    return agents.events


@pytest.mark.parametrize("ask", [False, True])
def test_a_run_that_does_as_well_goes_on_with_all(fleet, a_run, ask):
    """A class more, of which nobody has a sample yet: no gate has a reason to refuse, nor to deploy."""
    one = fleet(a_run("fedper", rounds=2, epochs=4), devices=("anna", "bela"), extra="[canary]\nshare = 0.5\n")
    shown = "[home_assistant]\nask = true\n" if ask else ""
    for name in one.devices:  # easily told apart, so that all models name each
        kept = dict(np.load(one.folder / f"{name}.npz"))
        for part in ("train", "val"):
            kept[f"x_{part}"][:, :3] = 9 * np.eye(3)[kept[f"y_{part}"]][:, :, None]
        np.savez(one.folder / f"{name}.npz", **kept)
    learned_by(one, shown)
    assert given(load_config(one.config), Order("next", rounds=4, classes=4)) == "running"
    learned_by(one, shown)
    with Store(one.folder / "state" / "coordinator.db") as store:
        (passed,) = [event for event in store.audit.events("watch", 500) if event["kind"].startswith("canary-")]
    assert (passed["kind"], passed["answered"], passed["refused"]) == ("canary-passed", 1, 0)


def test_a_run_that_gates_let_pass_goes_on_with_all(fleet, a_run):
    one = fleet(a_run("fedper", rounds=2, epochs=4), devices=("anna", "bela"), extra="[canary]\nshare = 0.5\n")
    config = load_config(one.config)
    learned_by(one)
    assert given(config, Order("next", rounds=4, classes=4)) == "running"
    for seed, name in enumerate(one.devices):  # what runs cannot say the new class
        one.write_data(name, seed, classes=4)
    told = learned_by(one)
    state = one.folder / "state"
    with Store(state / "coordinator.db") as store:
        assert not check(store, FolderBlobs(state / "blobs")).damage
        fleet_, events = store.fleets.get("watch"), store.audit.events("watch", 500)
        rows = {row.round: row for row in store.attempts.of("watch") if row.model_digest}
    (passed,) = [event for event in events if event["kind"] == "canary-passed"]
    assert (passed["asked"], passed["answered"], passed["refused"]) == (1, 1, 0)
    (tried,) = passed["members"]
    assert [rows[round].cohort for round in (3, 4)] == [(tried,)] * 2
    assert [rows[round].cohort for round in (5, 6)] == [("anna", "bela")] * 2
    assert (fleet_.round, fleet_.status, fleet_.life.canary) == (6, "done", {})
    assert Run.from_json(fleet_.run).identity == passed["identity"]
    assert tried in {item["device"] for item in told if item["event"] == "deployed"}


def tried_and_called_off(one, tmp_path, then):
    """A first run that three devices serve, a second one that is tried and called off, and ``then``."""

    async def serving():
        await one.serve()
        while one.services[-1].again:
            await one.serve()

    async def story():
        served = {"bundle": tmp_path / "x", "variants": ("fp32",), "stay": True}
        work = [asyncio.ensure_future(serving())]
        work += [
            asyncio.ensure_future(one.agent(name, **served | {"bundle": tmp_path / f"{name}.talaria"}))
            for name in one.data
        ]
        while len(one.of("deployed")) < 3:
            await asyncio.sleep(0.02)
        await one.services[-1].order(Order("next", rounds=3))
        await then(await one.told_of("canary"))
        while not work[0].done():  # the one that was told may be beginning anew
            one.services[-1].stop()
            await asyncio.sleep(0.02)
        await work.pop(0)
        for task in work:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    try:
        run_all(story())
        return one.store.fleets.get("watch")
    finally:
        one.close()


def test_a_run_whose_rounds_fail_when_its_gates_have_refused_is_called_off(tmp_path, a_run, monkeypatch):
    real = Learner.learn

    def astray(learner, round, *rest):
        if learner.run.follows and round == 3:
            raise DataError("nothing can be learned")
        return real(learner, round, *rest)

    monkeypatch.setattr(Learner, "learn", astray)
    monkeypatch.setattr(
        gate, "decide", lambda new, old, *rest, **more: gate.Decision(old is None, "for the test", old is not None)
    )
    one = House(tmp_path, a_run("fedper", rounds=1), stay=True, canary=Canary(share=0.4, rounds=1))

    async def then(off):
        assert (off["called_off"], off["asked"], off["answered"], off["refused"]) == (True, 2, 2, 2)
        await one.told_of("done", round=2)  # with the run before in force again
        while len(one.of("kept")) < 4:  # as gates, and as those who serve that run again
            await asyncio.sleep(0.02)

    fleet_ = tried_and_called_off(one, tmp_path, then)
    assert (fleet_.status, fleet_.round) == ("done", 2)
    assert Run.from_json(fleet_.run).identity == one.run.identity


def test_a_run_with_which_the_training_of_one_diverges_is_called_off_though_no_round_of_it_is_committed(
    tmp_path, a_run, monkeypatch
):
    real, astray = Learner._require_sound, []

    def spoiled(learner, shared, data):
        if learner.run.follows and not astray:
            astray.append(learner.config.device)
        real(learner, shared, b"" if learner.run.follows and learner.config.device in astray else data)

    monkeypatch.setattr(Learner, "_require_sound", spoiled)
    one = House(tmp_path, a_run("fedper", rounds=1), stay=True, quorum=1.0, canary=Canary(share=0.4, rounds=1))

    async def then(off):
        assert (off["called_off"], off["asked"], off["answered"], off["refused"]) == (True, 2, 1, 1)

    fleet_ = tried_and_called_off(one, tmp_path, then)
    assert (fleet_.round, fleet_.life.canary) == (1, {})
    assert Run.from_json(fleet_.run).identity == one.run.identity


def test_members_that_are_away_for_a_season_are_not_waited_for_and_come_back(fleet, a_run):
    one = fleet(a_run(rounds=3), devices=("anna", "bela", "carl"), extra="quorum = 1.0\ndeadline_s = 0\n")
    path = one.config
    path.write_text(path.read_text().replace('[fleet]\nname = "watch"', '[fleet]\nname = "watch"\naway_days = 2e-5'))
    config = load_config(path)

    def serve():
        return one._start("coordinator", "serve", path, "--json")

    coordinator = serve()
    url = coordinator.wait_for("ready")["broker"]
    carl = one.agents(url, "carl")
    coordinator.wait_for("device-up", device="carl")
    with carl.stopped():  # no round ends before the fleet is paused
        stay = one.agents(url, "anna", "bela")
        assert coordinator.wait_for("round-opened", round=1)["cohort"] == 3
        given(config, Order("pause"))
    coordinator.wait_for("round-closed", round=1)
    carl.close()
    coordinator.wait_for("device-down", device="carl")
    time.sleep(2)  # longer than two hundred thousandths of a day
    coordinator.close()
    again = serve()
    up = {again.wait_for("device-up")["device"] for _ in range(2)}
    assert up == {"anna", "bela"}
    with stay.stopped():
        given(config, Order("resume"))
        assert again.wait_for("resting")["devices"] == ["carl"]
        assert again.wait_for("round-opened", round=2)["cohort"] == 2  # nobody waits for carl; anna and bela were here
        given(config, Order("pause"))
    again.wait_for("round-closed", round=2)
    carl = one.agents(url, "carl")
    again.wait_for("device-up", device="carl")
    given(config, Order("resume"))
    assert again.wait_for("round-opened", round=3)["cohort"] == 3
    assert (again.end(), stay.end(), carl.end()) == (0, 0, 0)
