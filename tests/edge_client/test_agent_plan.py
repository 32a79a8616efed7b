"""A plan travels to the agent and is applied whole, to the bytes of a simulation; one for another run is declined."""

import asyncio
import hashlib
import json
from dataclasses import replace

import pytest
from memory_broker import Hub

from talaria import tensors
from talaria.errors import ConfigError
from talaria.federated import global_model, rounds, run_model
from talaria.federated import kit as kits
from talaria.federated.make_kit import kit_of
from talaria.planning.budget import Budget
from talaria.planning.plan import Plan
from talaria.protocol.coordinator import machine
from talaria_edge.agent.training import Learner
from talaria_edge.config import DeviceConfig, load_config
from talaria_edge.data import Given
from talaria_edge.storage.state import DeviceStore
from talaria_export import open_bundle

DEVICE = """
[device]
id = "anna"
plan = "plan.json"
[fleet]
name = "watch"
broker = "mqtt://127.0.0.1"
[data]
source = "npz"
path = "anna.npz"
"""


def test_a_planned_agent_learns_what_the_simulation_learns(house, run_all, a_run):
    one = house(a_run(rounds=2, codec="fp16"))
    widths = {g: max(4, n // 3) for g, n in run_model.layout_of(one.run.spec).sizes.items()}
    plan = Plan(widths=widths, batch=5, accumulate=2, steps=3, codec="int8", model=one.run.spec.to_json())
    results = run_all(one.serve(), one.agent("anna", plan=plan), one.agent("bela"))
    simulated = one.simulated()
    assert tensors.equal(one.shared(), simulated.shared)
    for name in one.data:
        assert tensors.equal(one.private(name), simulated.private[name]), name
    assert results[1]["plan"] == {"wider_than_planned": {}, "accuracy": None}
    sent = {t["device"]: t["update_bytes"] for t in one.of("trained")}
    assert sent["anna"] < 0.5 * sent["bela"]


@pytest.mark.parametrize("engine", ["torch", "onnx"])
def test_a_plan_that_changed_while_the_device_was_off_holds_from_the_next_round_on(
    tmp_path, a_run, device_data, engine
):
    """Narrower, and then none: whatever the private part was learned with."""
    run = a_run("fedper", rounds=3, codec="int8")
    model = global_model.encode_model(rounds.start(run)[0])
    digest = hashlib.sha256(model).digest()

    def started(plan):
        config = DeviceConfig(
            device="anna", fleet="watch", broker="mqtt://127.0.0.1", state=tmp_path / "anna", plan=plan, engine=engine,
            source=Given(lambda: device_data(0)),
        )  # fmt: skip
        return DeviceStore(config.state, "watch", "anna"), config

    sent = []
    for round, plan in enumerate((None, Plan(widths={"conv1": 8, "conv3": 16}), None), 1):
        store, config = started(plan)
        with store:
            store.model_part("x").write_bytes(model)
            store.adopt_model("x")
            learner = Learner(config, store, run)
            learner.keeps()
            sent.append(learner.learn(round, digest)[0].update)
            learner.keeps()
            found = learner.finish(digest)
        kept = sum(
            (dict(plan.widths) if plan else {}).get(g, n) for g, n in run_model.layout_of(run.spec).sizes.items()
        )
        assert found["channels_kept"] == kept / sum(run_model.layout_of(run.spec).sizes.values())
    assert len(sent[1]) < 0.8 * len(sent[0])
    assert abs(len(sent[2]) - len(sent[0])) < 0.1 * len(sent[0])


def test_who_wants_secure_rounds_by_now_does_not_offer_again_what_it_would_show(house, a_run, monkeypatch):
    """An update that was made before, and waits on flash for its receipt."""
    one = house(a_run(rounds=1), quorum=1.0)
    publish = Hub.publish

    def deaf_to_offers(hub, topic, payload, retain=False):
        if not (topic.endswith("anna/evt") and one.of("trained", "anna")):
            publish(hub, topic, payload, retain)

    async def story():
        async with asyncio.timeout(60):
            others = [asyncio.ensure_future(work) for work in (one.serve(), one.agent("bela"))]
            monkeypatch.setattr(Hub, "publish", deaf_to_offers)
            anna = asyncio.ensure_future(one.agent("anna"))
            while not one.of("trained", "anna") or b"offering" not in (one.folder / "anna/protocol.bin").read_bytes():
                await asyncio.sleep(0.01)
            one.hub.cut("anna")
            anna.cancel()
            await asyncio.wait([anna])
            monkeypatch.setattr(Hub, "publish", publish)
            anna = asyncio.ensure_future(one.agent("anna", secure=True))
            while not (one.of("received", "anna") or any(t["phase"] == "declined" for t in one.of("progress", "anna"))):
                await asyncio.sleep(0.01)
            for task in (anna, *others):
                task.cancel()
            await asyncio.wait([anna, *others])

    asyncio.run(story())
    assert one.of("received", "anna") == []
    assert "wants secure rounds" in next(t["reason"] for t in one.of("progress", "anna") if t["phase"] == "declined")


def test_a_plan_for_another_model_is_declined_and_the_others_go_on(house, run_all, a_run):
    one = house(a_run(), quorum=0.5)
    plan = Plan(batch=4, model=replace(one.run.spec, classes=5).to_json())
    _, anna, _ = run_all(one.serve(), one.agent("anna", plan=plan), one.agent("bela"))
    said = "plan: its classes is 5, the run's is 3; plan again with `talaria plan` for this run's model"
    assert said in anna["error"]
    assert said in one.of("error", "anna")[0]["error"]
    assert any(t["phase"] == "declined" and said in t["reason"] for t in one.of("progress", "anna"))
    assert one.store.attempts.of("watch")[0].counted == ((1, "bela"),)


def test_names_for_other_classes_are_told_before_the_first_round_and_not_after_the_last(
    house, run_all, a_run, tmp_path
):
    one = house(a_run())
    bundle = tmp_path / "anna.talaria"
    run_all(one.serve(), one.agent("anna", labels=("rest", "walk"), bundle=bundle), one.agent("bela", labels=("rest",)))
    said = [t.get("error") for t in one.told if t.get("device") == "anna" and t["event"] in ("error", "training")]
    assert "labels=2 names are not for the 3 classes of the run" in said[0]
    assert one.of("error", "bela") == []


def test_a_class_to_come_may_have_its_name_before_a_run_has_it(house, run_all, a_run, tmp_path):
    """So that nobody has to change each device in the moment in which `next --classes` begins a run with it."""
    one = house(a_run())
    bundle = tmp_path / "anna.talaria"
    anna = one.agent("anna", labels=("rest", "walk", "run", "jump"), bundle=bundle, variants=("fp32",))
    run_all(one.serve(), anna, one.agent("bela"))
    assert one.of("error", "anna") == []
    assert open_bundle(bundle).manifest["output"]["labels"] == ["rest", "walk", "run"]


def test_what_the_planner_prints_is_what_the_device_reads(tmp_path):
    made = Plan(widths={"conv1": 16}, batch=16, steps=4, codec="fp16", precision="fp16", accuracy_drop=0.01)
    (tmp_path / "device.toml").write_text(DEVICE)
    for text in (made.to_json(), {"model": None, "plan": made.to_json(), "machine": "ab"}):
        (tmp_path / "plan.json").write_text(json.dumps(text))
        assert load_config(tmp_path / "device.toml").plan == made


@pytest.mark.parametrize(
    ("text", "toml", "said"),
    [
        ("{", DEVICE, "plan.json is not JSON"),
        ("[" * 100_000, DEVICE, "plan.json is not JSON"),
        ("[]", DEVICE, "need an object, got list"),
        ('{"widths": {"a": 0}}', DEVICE, "must be at least 1"),
        ('{"wdths": {}}', DEVICE, r"plan.json: plan: wdths=.* is unknown; did you mean 'widths'"),
        (" " * (1 << 20) + "{}", DEVICE, "so it is no plan"),
        (None, DEVICE, "No such file.*talaria plan --json"),
        ("{}", DEVICE + "[plan.widths]\nconv1 = 8\n", "both given"),
        ('{"precision": "fp16"}', DEVICE.replace("[fleet]", 'variants = ["fp32"]\n[fleet]'), "leave out 'fp16'"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(tmp_path, text, toml, said):
    (tmp_path / "device.toml").write_text(toml)
    if text is not None:
        (tmp_path / "plan.json").write_text(text)
    with pytest.raises(ConfigError, match=said):
        load_config(tmp_path / "device.toml")


def test_a_budget_that_no_widths_keep_is_planned_for_once(house, run_all, a_run, tmp_path, monkeypatch):
    """Not each time that the coordinator says its state again: measuring takes seconds of a battery."""
    monkeypatch.setattr(machine, "REPEAT_SECONDS", 0.2)
    one = house(a_run(rounds=1), quorum=0.5)
    kit = tmp_path / "watch.kit"
    kit.write_bytes(kits.encode(kit_of(one.run)))

    async def for_a_while():
        anna = one.agent("anna", budget=Budget(bundle_mb=1e-4), engine="onnx", kit=kit)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.gather(one.serve(), anna, one.agent("bela")), 4)

    run_all(for_a_while())
    assert "bundle_mb=0.0001 is impossible" in one.of("declined", "anna")[0]["reason"]
    assert len(one.of("planning", "anna")) == len(one.of("error", "anna")) == 1
