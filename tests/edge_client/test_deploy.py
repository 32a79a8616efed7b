"""Deployed where it is better on the user's own held-out data, kept where it is not; and back by hand."""

import asyncio
from copy import deepcopy
from dataclasses import replace

import pytest

from talaria.cli.main import main
from talaria.errors import StateError
from talaria.federated import rounds, run_model
from talaria.planning.plan import Plan
from talaria_edge.agent import agent as agents
from talaria_edge.data import DeviceData
from talaria_edge.deployment import gate
from talaria_edge.deployment.deploy import judged
from talaria_edge.home_assistant import HomeAssistant
from talaria_export import make_bundle
from talaria_export.bundle.bundle import open_bundle


@pytest.fixture(scope="module")
def bundles(learned, tmp_path_factory):
    """The bundles of the untrained and of the learned global model."""
    from talaria.federated.run_model import template
    from talaria.model.state import load, state_of

    run, *models = learned
    found = []
    for shared in models:
        path = tmp_path_factory.mktemp("made") / "me.talaria"
        model = load(deepcopy(template(run.spec)), {**state_of(template(run.spec)), **shared}).eval()
        make_bundle(path, model, example=rounds.zoo.example(run.spec), variants=("fp32",), seconds=0)
        found.append(path.read_bytes())
    return found


@pytest.fixture
def state(tmp_path):
    folder = tmp_path / "anna"
    folder.mkdir()
    return folder


@pytest.fixture
def edge(tmp_path, monkeypatch, capsys):
    """``talaria edge ...`` with the settings of the device that ``finished`` lets deploy: status, stdout, stderr."""
    path = tmp_path / "device.toml"
    path.write_text(
        '[device]\nid = "anna"\nstate = "anna"\nbundle = "me.talaria"\n[fleet]\nname = "watch"\n'
        'broker = "mqtt://127.0.0.1"\n[data]\nsource = "npz"\npath = "none.npz"\n'
    )

    def run(*words):
        monkeypatch.setattr("sys.argv", ["talaria", "edge", *words, str(path)])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return ended.value.code or 0, said.out, said.err

    return run


def test_only_better_models_are_deployed_and_a_rollback_holds(finished, learned, bundles, state, edge, tmp_path):
    run, poor, good = learned
    bundle = tmp_path / "me.talaria"
    gate.deploy(state, bundles[0], bundle)

    second = finished(run, good, bundle=bundle)
    assert second["deployed"]
    assert second["accuracy"]["new"] > second["accuracy"]["in_force"]
    assert second["why"].startswith("better: ")
    assert second["report"]["path"] == str(bundle)
    better = bundle.read_bytes()
    assert better != bundles[0]
    assert open_bundle(bundle).manifest["card"]["device"] == "anna"

    third = finished(run, poor, bundle=bundle)
    assert not third["deployed"]
    assert "not better" in third["why"]
    assert third["accuracy"] == {"new": second["accuracy"]["in_force"], "in_force": second["accuracy"]["new"]}
    assert bundle.read_bytes() == better
    assert not (state / "candidate.talaria").exists()

    status, said, _ = edge("rollback")
    assert status == 0
    assert gate.read(state).current in said
    assert bundle.read_bytes() == bundles[0]
    fourth = finished(run, good, bundle=bundle)
    assert not fourth["deployed"]
    assert "rolled back by hand" in fourth["why"]
    assert bundle.read_bytes() == bundles[0]
    status, _, error = edge("rollback")
    assert status == 1
    assert "no earlier bundle" in error


def test_what_waits_to_be_installed_is_the_same_bundle_after_a_start(finished, learned, bundles, state, tmp_path):
    """It was made anew, another version each time; measured it is, for whoever decides."""
    run, _, good = learned
    bundle, asking = tmp_path / "me.talaria", HomeAssistant(ask=True)
    gate.deploy(state, bundles[0], bundle)
    first = finished(run, good, bundle=bundle, home_assistant=asking)
    held = gate.waiting(state)
    again = finished(run, good, bundle=bundle, home_assistant=asking)
    assert gate.waiting(state) == held
    assert again["why"] == first["why"] == f"waits to be installed; {held.reason}"
    assert again["accuracy"] == first["accuracy"]
    assert not (state / "candidate.talaria").exists()
    (state / "waiting.talaria").write_bytes(b"damaged")
    finished(run, good, bundle=bundle, home_assistant=asking)
    assert gate.install(state, bundle).model == held.model


def test_a_tie_keeps_what_runs_and_no_held_out_sample_keeps_it_too(bundles, state, motions, tmp_path):
    poor, good = bundles
    gate.deploy(state, poor, tmp_path / "me.talaria")
    decision, accuracy = judged(state, poor, motions(12, 100))
    assert not decision
    assert accuracy["new"] == accuracy["in_force"]
    decision, accuracy = judged(state, good, motions(0, 1))
    assert not decision
    assert "no held-out samples" in decision.reason
    assert accuracy == {"new": None, "in_force": None}


def test_what_cannot_run_on_this_users_samples_is_replaced(bundles, state, motions, tmp_path):
    poor, good = bundles
    bundle = tmp_path / "me.talaria"
    bundle.write_bytes(b"no bundle at all")
    gate.adopt(state, bundle)
    decision, accuracy = judged(state, poor, motions(12, 100))
    assert decision
    assert accuracy["in_force"] is None
    gate.deploy(state, good, bundle)
    for stored in (state / "bundles").iterdir():
        stored.write_bytes(b"rot")
    with pytest.raises(StateError, match="not what was deployed"):
        gate.in_force(state)
    assert judged(state, poor, motions(12, 100))[0]
    assert not judged(state, b"no bundle either", motions(12, 100))[0]


def test_an_agent_that_was_cut_while_deploying_puts_it_right_when_it_starts(house, run_all, bundles, state, tmp_path):
    one = house(names=("anna",))
    bundle = tmp_path / "me.talaria"
    gate.deploy(state, bundles[1], bundle)
    bundle.write_bytes(bundles[0])  # the ledger was written, then the power went

    async def until_it_is_there():
        agent = asyncio.ensure_future(one.agent("anna", bundle=bundle))
        while not one.of("connected"):
            await asyncio.sleep(0.02)
        agent.cancel()
        await asyncio.gather(agent, return_exceptions=True)

    run_all(until_it_is_there())
    assert bundle.read_bytes() == bundles[1]


def test_a_device_that_stays_writes_its_bundle_once_the_disk_takes_it(
    house, run_all, bundles, state, tmp_path, monkeypatch
):
    """Where its folder could not be made, the agent ended with Python's words; a full disk was final until a start."""
    monkeypatch.setattr(agents, "FINISH_AGAIN_S", 0.1)
    one = house(names=("anna",))
    (tmp_path / "in-the-way").write_text("no folder")
    bundle = tmp_path / "in-the-way" / "me.talaria"

    async def until_it_is_written():
        serving = asyncio.ensure_future(one.serve())
        agent = asyncio.ensure_future(one.agent("anna", bundle=bundle, stay=True, variants=("fp32",)))
        while not one.of("error"):
            await asyncio.sleep(0.02)
        (tmp_path / "in-the-way").unlink()
        while not bundle.exists():
            await asyncio.sleep(0.02)
        for task in (serving, agent):
            task.cancel()
        await asyncio.gather(serving, agent, return_exceptions=True)

    run_all(until_it_is_written(), seconds=40)
    said = f"state: the folder {bundle.parent} cannot be made: File exists; make that folder, or give another path"
    assert {told["error"] for told in one.of("error")} == {said}


def test_an_agent_tells_what_became_of_its_plan_and_its_bundle(house, run_all, motions, tmp_path, edge):
    one = house(names=("anna",))
    one.data["anna"] = DeviceData(motions(24, 0), motions(60, 100))
    widths = dict.fromkeys(run_model.layout_of(one.run.spec).sizes, 1)
    plan = Plan(widths=widths, precision="fp16", accuracy_drop=0.02, model=one.run.spec.to_json())
    bundle = tmp_path / "me.talaria"
    _, result = run_all(
        one.serve(), one.agent("anna", bundle=bundle, variants=("fp32", "fp16"), plan=plan, labels=("a", "b", "c"))
    )
    (deployed,), (broken,) = one.of("deployed"), one.of("budget-broken")
    assert deployed["reason"] == "nothing is deployed yet"
    assert "accuracy_drop=0.02 is broken" in broken["reason"]
    made = open_bundle(bundle)
    assert made.variants == ("fp16",)
    assert Plan.from_json(made.manifest["card"]["plan"]) == plan
    assert made.manifest["card"]["planned"] == result["plan"]
    assert made.manifest["gate"]["accuracy_drop"] == 0.0
    assert edge("result")[0] == 1  # it takes the state folder


def test_the_plan_is_held_to_the_accuracy_it_may_cost(finished, learned, motions):
    run, _, good = learned
    data = DeviceData(motions(24, 0), motions(60, 100))
    tiny = Plan(widths=dict.fromkeys(run_model.layout_of(run.spec).sizes, 1), accuracy_drop=0.02)
    broken = finished(run, good, data, plan=tiny)["plan"]["accuracy"]
    assert broken["kept"] is False
    assert broken["drop"] == pytest.approx(broken["dense"] - broken["planned"])
    assert broken["drop"] > 0.02
    loose = finished(run, good, data, plan=replace(tiny, accuracy_drop=0.99))["plan"]["accuracy"]
    assert loose["kept"] is True
    whole = finished(run, good, data, plan=Plan(accuracy_drop=0.0))["plan"]["accuracy"]
    assert (whole["kept"], whole["drop"]) == (True, 0.0)
    blind = finished(run, good, DeviceData(data.train, motions(0, 1)), plan=tiny)["plan"]["accuracy"]
    assert blind["kept"] is None
    assert "without held-out samples" in blind["reason"]


def test_groups_that_an_algorithm_left_wider_than_planned_are_told(finished, learned):
    run, _, good = learned
    gated = replace(run, algorithm="hermes", hparams={"threshold": 1.0, "cap": 0.5})
    plan = Plan(widths={"conv1": 8})
    found = finished(gated, rounds.start(gated)[0], plan=plan)["plan"]
    assert found["wider_than_planned"] == {"conv1": [8, run_model.layout_of(run.spec).sizes["conv1"]]}
    assert finished(run, good, plan=plan)["plan"]["wider_than_planned"] == {}
