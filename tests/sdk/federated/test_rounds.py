"""A round from each side: seeds, masks, order, first participation, and the run that travels."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from talaria.errors import ConfigError
from talaria.federated import device_task, rounds, run_model
from talaria.federated.run import Member, Run
from talaria.model import masks, zoo
from talaria.model.spec import ModelSpec
from talaria.model.state import state_of
from talaria.planning.plan import Plan
from talaria.tensors import copied, equal, minus
from talaria.training import loop
from talaria.types import Recipe, Samples

SPEC = ModelSpec("imu_cnn", (3, 16), 3)
RUN = Run(spec=SPEC, algorithm="fedavg", recipe=Recipe(epochs=1, batch=4, lr=0.05, momentum=0.0), rounds=2, seed=5)


def samples(seed: int, count: int = 8) -> Samples:
    g = torch.Generator().manual_seed(seed)
    return Samples.of(torch.randn(count, 3, 16, generator=g), np.arange(count) % 3)


def member(name: str, plan: Plan | None = None) -> Member:
    return Member(name, samples(len(name)), samples(99, 3), plan)


def test_a_run_travels_as_text_and_comes_back_equal() -> None:
    run = replace(RUN, algorithm="hermes", hparams={"cap": 0.25}, fraction=0.5, buffers="aggregate")
    assert Run.from_json(run.to_json()) == run
    assert Run.from_json(run.to_json()).to_json() == run.to_json()


def test_what_is_worked_out_of_a_run_is_that_of_its_equals_alone() -> None:
    """fedper shares the body, fedavg the head too; a whole number for a fraction is the same run."""
    run = replace(RUN, algorithm="fedprox", hparams={"mu": 1.0})
    assert run_model.update_schema(Run.from_json(run.to_json())) is run_model.update_schema(run)
    assert run_model.update_schema(replace(run, hparams={"mu": 1})) is run_model.update_schema(run)
    assert set(run_model.update_schema(replace(RUN, algorithm="fedper"))) < set(run_model.update_schema(run))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"spec": 3}', RUN.to_json()[:-1] + ',"extra":1}'])
def test_what_is_no_run_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Run.from_json(text)


@pytest.mark.parametrize(("field", "value"), [("rounds", 0), ("fraction", 0.0), ("algorithm", "fedavgg")])
def test_a_bad_run_names_field_and_value(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{field}|{value}"):
        replace(RUN, **{field: value})


def test_an_unknown_algorithm_is_told_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'hermes'"):
        replace(RUN, algorithm="hermees")


def test_an_unknown_option_is_told_what_exists() -> None:
    with pytest.raises(ConfigError, match="did you mean 'tune_epochs'"):
        replace(RUN, algorithm="fedavg_ft", hparams={"tune_epoch": 3})


@given(st.lists(st.text("abcdef", min_size=1, max_size=4), min_size=1, max_size=20, unique=True), st.floats(0.01, 1))
def test_a_cohort_is_a_sorted_share_and_ignores_the_order_of_names(names: list[str], fraction: float) -> None:
    run = replace(RUN, fraction=fraction)
    chosen = rounds.cohort(run, 3, names)
    assert chosen == rounds.cohort(run, 3, names[::-1])
    assert list(chosen) == sorted(chosen)
    assert set(chosen) <= set(names)
    assert len(chosen) == max(1, int(fraction * len(names) + 0.5))


def test_rounds_draw_different_cohorts() -> None:
    run = replace(RUN, fraction=0.5)
    assert len({rounds.cohort(run, r, tuple("abcdefgh")) for r in range(10)}) > 1


def test_the_same_participation_gives_the_same_bits_and_leaves_its_inputs() -> None:
    shared, _ = rounds.start(RUN)
    before = copied(shared)
    one, mine = rounds.participate(RUN, member("a"), shared, None, 1)
    two, again = rounds.participate(RUN, member("a"), shared, None, 1)
    other, _ = rounds.participate(RUN, member("a"), shared, None, 2)
    assert equal(one.tensors, two.tensors)
    assert equal(mine, again)
    assert not equal(one.tensors, other.tensors), "each round has its own draws"
    assert equal(shared, before)


def test_a_plan_makes_the_device_small_from_its_first_round() -> None:
    planned = member("a", Plan(widths={"conv1": 8, "conv3": 16}))
    shared, _ = rounds.start(RUN)
    update, private = rounds.participate(RUN, planned, shared, None, 1)
    assert update.tensors["conv1.weight"].shape[0] == 8
    assert update.tensors["conv3.weight"].shape[0] == 16
    kept = masks.from_tensors(run_model.layout_of(SPEC), private)
    assert (len(kept.kept["conv1"]), len(kept.kept["conv2"])) == (8, 64)
    later, _ = rounds.participate(RUN, planned, shared, private, 2)
    assert later.mask == update.mask
    assert rounds.personalize(RUN, planned, shared, private).conv1.weight.shape[0] == 8


def test_updates_out_of_order_are_refused() -> None:
    shared, server = rounds.start(RUN)
    updates = [rounds.participate(RUN, member(n), shared, None, 1)[0] for n in ("b", "a")]
    with pytest.raises(ConfigError, match="client order"):
        rounds.close(RUN, shared, server, updates)


def test_a_lossy_codec_sends_the_difference() -> None:
    run = replace(RUN, codec="fp16")
    shared, _ = rounds.start(run)
    value, _ = rounds.participate(RUN, member("a"), shared, None, 1)
    delta, _ = rounds.participate(run, member("a"), shared, None, 1)
    assert delta.kind == "delta"
    assert equal(delta.tensors, minus(value.tensors, shared))


def test_the_personal_model_is_in_eval_mode_and_nobodys_scratch() -> None:
    shared, _ = rounds.start(RUN)
    model = rounds.personalize(RUN, member("a"), shared, None)
    assert not model.training
    assert model is not run_model.template(SPEC)
    assert not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "wide"), [("mobilenet_v3_small", False), ("efficientnet_lite0", False), ("resnet18", True)]
)
def test_what_trains_lies_in_the_layout_that_is_fast_and_what_is_served_in_the_plain_one(name: str, wide: bool) -> None:
    run = Run(
        spec=ModelSpec(name, (3, 32, 32), 4),
        algorithm="fedavg",
        recipe=Recipe(epochs=1, batch=32, lr=0.05, momentum=0.0),
        rounds=1,
    )
    samples = Samples.of(np.zeros((2, 3, 32, 32)), np.arange(2))
    task = device_task.task_of(run, Member("anna", samples, samples), 1, None)
    large = [p for p in task.model.parameters() if p.dim() == 4 and min(p.shape[1:]) > 1]
    assert large
    assert all(p.is_contiguous() == wide for p in large)
    state = state_of(task.model)
    assert all(v.flags.c_contiguous for v in state.values())
    assert all(p.is_contiguous() for p in loop.served(task, state).parameters())
    assert all(p.is_contiguous() for p in run_model.template(run.spec).parameters()), "the template is not touched"


def test_an_algorithm_that_prunes_refuses_a_network_without_channels_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    class Line(torch.nn.Module):
        def __init__(self, shape: Sequence[int], classes: int) -> None:
            super().__init__()
            self.head = torch.nn.Linear(shape[0], classes)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(x)
            return out

    monkeypatch.setitem(zoo._ZOO, "line", zoo._Entry(make=Line))
    run = Run(spec=ModelSpec("line", (4,), 3), algorithm="hermes", rounds=1)
    with pytest.raises(ConfigError, match=r"hermes: prunes channels, but 'line' has none .* choose another model"):
        rounds.start(run)


@pytest.mark.parametrize("engine", ["torch", "onnx"])
def test_unlabelled_inputs_of_a_newcomer_calibrate_and_nothing_else(engine: str) -> None:
    """Its BatchNorm is that of all its inputs, as if all were labelled; its weights are those of the labelled ones."""
    run = replace(RUN, buffers="local")
    shared, _ = rounds.start(run)
    mine, others = samples(1), samples(2)
    few, whole = (Member("b", one, samples(99, 3), engine=engine) for one in (mine, Samples.joined([mine, others])))
    served = [rounds.personalize(run, one, shared, None) for one in (few, replace(few, unlabelled=others.x), whole)]
    alone, beside, labelled = (state_of(model) for model in served)
    assert equal(beside, labelled)
    assert not equal(beside, alone)
    assert equal(*({k: v for k, v in one.items() if "running" not in k} for one in (beside, alone)))
    assert equal(state_of(rounds.personalize(run, replace(few, unlabelled=others.x[:0]), shared, None)), alone)


@pytest.mark.parametrize("engine", ["torch", "onnx"])
@pytest.mark.parametrize("count", [256, 258, 520])
def test_statistics_are_those_of_all_samples_however_many_and_in_whatever_order(engine: str, count: int) -> None:
    """Sorted by label, in passes of 256: of 258 samples the last two counted as much as all others."""
    y = np.sort(np.arange(count) % 3)
    x = np.random.default_rng(0).standard_normal((count, 3, 16)).astype(np.float32) + 2 * y[:, None, None]
    own = Samples(x.astype(np.float32), y)
    shared, _ = rounds.start(RUN)
    served = state_of(rounds.personalize(RUN, Member("b", own, samples(99, 3), engine=engine), shared, None))
    conv = run_model.template(SPEC).get_submodule("conv1")
    with torch.no_grad():
        out = conv(torch.from_numpy(own.x)).transpose(0, 1).flatten(1)
    np.testing.assert_allclose(served["bn1.running_mean"], out.mean(1).numpy(), rtol=0.05, atol=0.02)
    np.testing.assert_allclose(served["bn1.running_var"], out.var(1).numpy(), rtol=0.05)


@pytest.mark.parametrize(
    ("hparams", "engine"),
    [({}, "torch"), *((one, "onnx") for one in ({}, {"mix": 0.5}, {"tune_on": "all"}, {"tune": "head"}))],
    ids=str,
)
def test_a_tuned_newcomer_takes_batchnorm_anew_from_unlabelled_inputs_where_tuning_moved_it(
    hparams: dict[str, object], engine: str
) -> None:
    run = replace(RUN, algorithm="fedavg_ft", hparams={"tune_epochs": 2, **hparams})
    shared, _ = rounds.start(run)
    few = Member("b", samples(1), samples(99, 3), engine=engine)
    more = replace(few, unlabelled=samples(2).x)
    alone, beside = (state_of(rounds.personalize(run, one, shared, None)) for one in (few, more))
    assert not equal(beside, alone)
    if "tune" not in hparams:
        known = [few.train, few.val] if hparams.get("tune_on") == "all" else [few.train]
        task = device_task.task_of(run, replace(few, engine="torch"), run.rounds, None)
        anew = loop.calibrate(task, alone, Samples.joined([*known, samples(2)]))
        named = {k: v for k, v in beside.items() if k in anew}
        weights = [key for key in anew if "running" not in key and "batches" not in key]
        assert equal(*({key: one[key] for key in weights} for one in (named, alone)))
        for key in (key for key in anew if "running" in key):
            np.testing.assert_allclose(named[key], anew[key], rtol=1e-4, atol=1e-5, err_msg=key)
    # A member has trained its statistics, and a run that shares them has none of the device's own.
    _, private = rounds.participate(run, few, shared, None, 1)
    public = replace(run, buffers="aggregate")
    for own, sent, kept in ((run, shared, private), (public, rounds.start(public)[0], None)):
        assert equal(*(state_of(rounds.personalize(own, one, sent, kept)) for one in (few, more)))
