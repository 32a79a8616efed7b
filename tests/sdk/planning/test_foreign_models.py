"""Networks that Talaria does not have, planned and pruned: what cannot be taken out is named and left whole."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from talaria.cli.main import app
from talaria.errors import BudgetError, ModelError
from talaria.model import prunability, pruning, zoo
from talaria.model.masks import ChannelMask
from talaria.model.spec import ModelSpec
from talaria.planning import latency_model, measured, microbenchmarks, planner
from talaria.planning.anatomy import FEATURES, Widths
from talaria.planning.budget import Budget
from talaria.planning.latency_model import Cost
from talaria.planning.layer_stats import anatomy
from talaria.planning.onnx_runtime import Resizer, Session, exporter
from talaria.planning.profile import Profile

SHAPE = (6, 32)
RECURRENT = ModelSpec("mypkg.nets:Recurrent", SHAPE, 3, options={"width": 64})
RESIDUAL, GATED, ATTENTIVE = (ModelSpec(f"mypkg.nets:{name}", SHAPE, 3) for name in ("Residual", "Gated", "Attentive"))
CAUSAL = ModelSpec("mypkg.nets:Causal", SHAPE, 3)


def test_what_can_be_pruned_of_each_and_what_is_left_whole() -> None:
    assert zoo.layout(RESIDUAL).sizes == {"one.first": 16, "one.second": 16, "two.first": 32, "two.second": 32}
    assert zoo.layout(GATED).sizes == {"stem": 16, "gru": 16, "between": 32}
    assert zoo.layout(ATTENTIVE).sizes == {"layer.self_attn": 2, "layer.linear1": 32}
    assert zoo.layout(CAUSAL).sizes == dict.fromkeys(("one", "two", "around"), 16)
    assert zoo.left_whole(RESIDUAL) == ""
    assert zoo.left_whole(GATED) == ""
    assert "layer.norm1 is a LayerNorm, whose channels cannot be taken out" in zoo.left_whole(ATTENTIVE)
    assert "self_attn" not in zoo.left_whole(ATTENTIVE)
    assert zoo.left_whole(ModelSpec("imu_cnn", (6, 100), 7)) == ""


@pytest.mark.parametrize(
    "spec",
    [RESIDUAL, GATED, RECURRENT, ATTENTIVE, CAUSAL, ModelSpec("mypkg.nets:Steps", SHAPE, 3)],
    ids=lambda spec: spec.name,
)
def test_pruned_to_half_it_is_exported_and_computes_as_torch_does(spec: ModelSpec) -> None:
    layout = zoo.layout(spec)
    mask = ChannelMask(layout, {group: tuple(range(0, size, 2)) for group, size in layout.sizes.items()})
    small = pruning.compact(latency_model.lively(zoo.build(spec)), mask)
    file = exporter()(small, zoo.example(spec, 2))
    x = zoo.example(spec, 5)
    with torch.no_grad():
        want = small(x).numpy()
    assert np.abs(Session(file)(x.numpy()) - want).max() <= 1e-5 * np.abs(want).max()


def test_a_graph_that_shows_no_weights_is_timed_by_exporting_each_width(profile: Profile) -> None:
    """The transformer's linear layers are exported as transposed products without names."""
    asked: list[Widths] = []
    parts, write = anatomy(ATTENTIVE), exporter()
    file = write(latency_model.lively(zoo.build(ATTENTIVE)), zoo.example(ATTENTIVE, 2))
    with pytest.raises(ModelError, match="has no weights named"):
        Resizer(file, parts)

    def again(widths: Widths) -> bytes:
        asked.append(widths)
        mask = ChannelMask(parts.layout, {group: tuple(range(width)) for group, width in widths.items()})
        return write(pruning.compact(zoo.build(ATTENTIVE).eval(), mask), zoo.example(ATTENTIVE, 2))

    widths = [{"layer.self_attn": heads, "layer.linear1": width} for heads, width in ((2, 32), (2, 16), (1, 8))]
    cost = latency_model.fit(parts, file, zoo.example(ATTENTIVE), widths, 8, 6, again=again)
    assert asked == widths
    assert (cost.probes, cost.block) == (3, 8)
    made = planner.plan(ATTENTIVE, Budget.parse([]), profile, cost)
    assert "layer.norm1 is a LayerNorm" in made.reasons["whole"]


def test_a_recurrent_network_is_planned_by_its_hidden_units(profile: Profile) -> None:
    """Both products of each moment shrink, those of the state by the square."""
    parts = anatomy(RECURRENT)
    assert parts.products({"gru": 32}) == pytest.approx(3 * 32 * (6 + 32) * 32 + 32 * 3)
    priced = dict.fromkeys(FEATURES, 0.0) | {"vector": 1.0}
    prices = tuple(priced[name] for name in FEATURES)
    cost = Cost(prices, parts.products(parts.full()) / 1e6, 0.0, 8, 1000, 15, 1.0)
    made = planner.plan(RECURRENT, Budget.parse(["latency_ratio=0.6"]), profile, cost)
    assert made.widths == {"gru": 48}
    assert made.predicted["latency_ratio"] <= 0.6


def test_a_transformer_is_planned_by_its_heads_in_blocks_of_what_they_are_wide(profile: Profile) -> None:
    """The products of a layer's projections shrink by head; a head of eight channels is a block of eight."""
    parts = anatomy(ATTENTIVE)
    projections = {heads: 4 * 8 * 16 * 8 * heads for heads in (1, 2)}  # q, k, v and out of 8 moments, 8 wide each
    saved = parts.products(parts.full()) - parts.products({"layer.self_attn": 1})
    assert saved == pytest.approx(projections[2] - projections[1])
    priced = dict.fromkeys(FEATURES, 0.0) | {"vector": 1.0}
    cost = Cost(tuple(priced[name] for name in FEATURES), parts.products(parts.full()) / 1e6, 0.0, 8, 1000, 15, 1.0)
    made = planner.plan(ATTENTIVE, Budget.parse(["latency_ratio=0.6"]), profile, cost)
    assert made.widths == {"layer.self_attn": 1, "layer.linear1": 24}
    assert made.predicted["latency_ratio"] <= 0.6


def test_a_budget_that_pruning_cannot_reach_names_what_is_left_whole(profile: Profile) -> None:
    priced = dict.fromkeys(FEATURES, 0.0) | {"fixed": 1.0}
    cost = Cost(tuple(priced[name] for name in FEATURES), 1.0, 0.0, 8, 1000, 15, 1.0)
    with pytest.raises(BudgetError, match=r"left whole: layer\.norm1 is a LayerNorm"):
        planner.plan(ATTENTIVE, Budget.parse(["latency_ratio=0.6"]), profile, cost)
    bare = zoo.keep(nn.Sequential(nn.Flatten(), nn.LayerNorm(192), nn.Linear(192, 3)), SHAPE, 3)
    with pytest.raises(BudgetError, match=r"nothing of .* can be pruned: "):
        planner.plan(bare, Budget.parse(["latency_ratio=0.6"]), profile, cost)


def test_a_network_whose_layers_changed_is_measured_anew(
    profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times: list[int] = []

    def measure(spec: ModelSpec, block: int, **_: Callable[..., bytes]) -> Cost:
        times.append(1)
        return Cost(tuple(1.0 for _ in FEATURES), 1.0, 0.0, block, 1000, 15, 1.0)

    monkeypatch.setattr(latency_model, "measure", measure)
    for spec in (GATED, GATED, RESIDUAL):
        measured.costed(spec, profile, folder=tmp_path)
    assert len(times) == 2
    parts = anatomy(zoo.plain(GATED))
    wider = type(parts)(parts.layout, parts.layers, {**parts.shapes, "extra": (3,)}, parts.split)
    monkeypatch.setattr(measured, "anatomy", lambda _: wider)
    measured.costed(GATED, profile, folder=tmp_path)
    assert len(times) == 3


def test_simulate_takes_them_by_name_with_data_of_ones_own(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    y = np.tile([0, 1, 2], 20)
    np.savez(
        tmp_path / "mine.npz",
        x=(draw.normal(size=(60, *SHAPE)) + y[:, None, None]).astype(np.float32), y=y, client=np.repeat([0, 1], 30),
    )  # fmt: skip
    words = ["simulate", "-a", "fedper", "-d", f"npz:{tmp_path}/mine.npz", "--rounds", "1", "--json"]
    for spec in (RESIDUAL, GATED, ATTENTIVE):
        ran = CliRunner().invoke(app(words[:1]), [*words, "--model", f"{spec.name}:width=8"])
        assert ran.exit_code == 0, ran.output
        told = json.loads(ran.stdout)
        assert (told["model"]["name"], told["model"]["options"]) == (spec.name, {"width": 8})
        assert len(told["clients"]) == 2


def test_planning_draws_nothing_from_torchs_own_generator() -> None:
    model, before = zoo.build(GATED), torch.get_rng_state()
    prunability.survey(model, torch.zeros(2, *SHAPE))
    microbenchmarks.train_rate()
    assert torch.equal(torch.get_rng_state(), before)
