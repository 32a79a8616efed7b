"""A device's plan in a fleet's run: what takes effect, and what is refused with its difference."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from talaria import tensors
from talaria.errors import ConfigError
from talaria.federated import device_task, rounds
from talaria.federated.plan_compat import codec_under, recipe_under
from talaria.federated.run import Member, Run
from talaria.model.spec import AdapterSpec, ModelSpec
from talaria.planning.plan import Plan
from talaria.simulation.run import simulate
from talaria.training.batching import steps_of
from talaria.types import Recipe, Samples

SPEC = ModelSpec("imu_cnn", (6, 32), 3, seed=1)
RUN = Run(
    spec=SPEC, algorithm="fedavg", rounds=1, recipe=Recipe(batch=8, epochs=2, lr=0.05, momentum=0.0), codec="fp16"
)


def member(plan: Plan | None = None, name: str = "a") -> Member:
    y = torch.arange(24) % 3
    x = torch.randn(24, 6, 32, generator=torch.Generator().manual_seed(3)) + y[:, None, None]
    return Member(name, Samples.of(x[:18], y[:18]), Samples.of(x[18:], y[18:]), plan)


def test_a_plan_that_says_nothing_changes_nothing() -> None:
    assert recipe_under(RUN.recipe, None) is RUN.recipe
    assert recipe_under(RUN.recipe, Plan()) == RUN.recipe
    shared, _ = rounds.start(RUN)
    plain, with_plan = (rounds.participate(RUN, member(p), shared, None, 1)[0] for p in (None, Plan()))
    assert tensors.equal(plain.tensors, with_plan.tensors)


@given(
    batch=st.none() | st.integers(1, 64),
    steps=st.none() | st.integers(1, 50),
    slices=st.integers(1, 8),
    count=st.integers(1, 200),
)
def test_a_plan_never_takes_more_steps_than_it_has_room_for(
    batch: int | None, steps: int | None, slices: int, count: int
) -> None:
    made = recipe_under(RUN.recipe, Plan(batch=batch, steps=steps, accumulate=slices))
    assert made.batch == (batch or RUN.recipe.batch)
    assert made.accumulate == slices
    for asked in (made, made.but(epochs=50, steps=None), made.but(steps=1000)):
        assert steps is None or steps_of(asked, count) <= steps
    assert steps_of(made, count) <= steps_of(RUN.recipe.but(batch=made.batch), count)


def test_batch_and_steps_of_the_plan_are_what_trains() -> None:
    one = device_task.task_of(RUN, member(Plan(batch=4, accumulate=2, steps=3)), 1, None).recipe
    assert (one.batch, one.accumulate, steps_of(one, 18)) == (4, 2, 3)
    shared, _ = rounds.start(RUN)
    planned, _ = rounds.participate(RUN, member(Plan(batch=4, steps=3)), shared, None, 1)
    by_hand = replace(RUN, recipe=RUN.recipe.but(batch=4, steps=3))
    assert tensors.equal(planned.tensors, rounds.participate(by_hand, member(), shared, None, 1)[0].tensors)
    assert not tensors.equal(planned.tensors, rounds.participate(RUN, member(), shared, None, 1)[0].tensors)


def test_widths_are_kept_exactly_as_planned() -> None:
    mask = device_task.mask_of(RUN, member(Plan(widths={"conv1": 12, "conv2": 20})), None)
    assert mask is not None
    assert {g: len(mask.kept[g]) for g in ("conv1", "conv2")} == {"conv1": 12, "conv2": 20}


def test_each_device_sends_by_its_own_codec_where_that_is_smaller() -> None:
    assert codec_under("fp16", None) == "fp16"
    assert codec_under("fp16", Plan()) == "fp16"
    assert codec_under("fp16", Plan(codec="int8")) == "int8"
    assert codec_under("int8", Plan(codec="fp16")) == "int8"
    assert codec_under("int8", Plan(codec="topk:0.01")) == "topk:0.01"
    found = simulate(RUN, {"a": member(), "b": member(Plan(codec="int8"), "b")})
    assert 0.4 < found.bytes_up["b"] / found.bytes_up["a"] < 0.75


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (Plan(codec="int8"), r'codec = "int8" under \[run\]'),
        (Plan(codec="zip"), "codec='zip' is unknown"),
        (Plan(adapter="lowrank", rank=4), r"adapters is \('lowrank', 4\), the run's is None"),
        (Plan(model=replace(SPEC, classes=4).to_json()), "classes is 4, the run's is 3"),
        (Plan(model=replace(SPEC, name="mlp").to_json()), "name is mlp, the run's is imu_cnn"),
        (
            Plan(model=replace(SPEC, options={"width": 9}).to_json()),
            r"options is \(\('width', 9\),\), the run's is \(\)",
        ),
        (Plan(trained=("head",)), r"only head may train and travel.*talaria algorithms"),
        (Plan(model={"name": "x"}), "fields missing"),
    ],
)
def test_what_the_run_cannot_give_is_refused_by_name(plan: Plan, said: str) -> None:
    run = replace(RUN, codec="raw")
    with pytest.raises(ConfigError, match=said):
        device_task.require_plan(run, plan)
    shared, _ = rounds.start(run)
    with pytest.raises(ConfigError, match=said):
        rounds.participate(run, member(plan), shared, None, 1)


def test_a_plan_for_adapters_fits_the_run_that_has_them() -> None:
    adapted = replace(SPEC, adapters=AdapterSpec("lowrank", 4))
    plan = Plan(adapter="lowrank", rank=4, trained=("adapters", "head"), model=adapted.to_json())
    run = replace(RUN, spec=replace(adapted, seed=9), algorithm="heart_pfl", hparams={"trains": "adapters"})
    device_task.require_plan(run, plan)
    device_task.require_plan(run, Plan(widths={"conv1.base": 16}))
    with pytest.raises(ConfigError, match=r"widths name head, but the run's model has conv1"):
        device_task.require_plan(run, Plan(widths={"head": 1}))
    with pytest.raises(ConfigError, match=r"sends .conv1\.base\.weight"):
        device_task.require_plan(replace(run, algorithm="fedavg", hparams={}), plan)
    with pytest.raises(ConfigError, match="'lowrank', 8"):
        device_task.require_plan(run, Plan(adapter="lowrank", rank=8))


def test_a_plan_is_read_from_what_the_planner_prints_and_back() -> None:
    made = Plan(widths={"conv1": 16}, batch=16, steps=9, codec="int8", accuracy_drop=0.02, model=SPEC.to_json())
    document = {"model": SPEC.to_json(), "plan": made.to_json(), "machine": "ab"}
    assert Plan.from_json(json.loads(json.dumps(document))) == made
    assert Plan.from_json(made.to_json()) == made


@pytest.mark.parametrize(
    "wrong",
    [
        {"plan": []},
        {"plan": {"plan": {}}},
        {"plan": {}, "budget": 1},
        {"plan": {"model": {"name": "a"}}, "model": {"name": "b"}},
        {"accuracy_drop": 1.0},
        {"accuracy_drop": True},
        {"adapter": 3},
        {"model": "imu"},
        {"trained": [["head"]]},
        {7: 1},
    ],
)
def test_a_document_that_is_none_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="plan"):
        Plan.from_json(wrong)
