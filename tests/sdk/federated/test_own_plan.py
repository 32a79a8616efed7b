"""A device without torch plans from its kit: with the figures of torch, within the budget, or it says why not."""

import json
import subprocess
import sys
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torchless import TORCHLESS

from talaria.errors import BudgetError, ConfigError, StateError
from talaria.federated import device_task, own_plan, plan_compat, rounds, run_model
from talaria.federated import kit as kits
from talaria.federated.make_kit import kit_of
from talaria.federated.run import Member, Run
from talaria.model import zoo
from talaria.model.spec import ModelSpec
from talaria.planning import estimates, layer_stats
from talaria.planning.anatomy import FEATURES
from talaria.planning.budget import Budget
from talaria.planning.cost import Cost
from talaria.types import Recipe, Samples
from talaria.wire import strict_safetensors

RUN = Run(spec=ModelSpec("imu_cnn", (6, 32), 3), algorithm="fedavg", rounds=2, recipe=Recipe(batch=8), codec="fp16")
PRICES = {"convolution": 0.02, "moved": 0.5, "fixed": 0.01}
COST = Cost(tuple(PRICES.get(name, 0.0) for name in FEATURES), 1.0, 0.01, own_plan.BLOCK, 3000, 12, 1.0)


@pytest.fixture(scope="module")
def kit():
    return kits.decode(kits.encode(kit_of(RUN)))


@pytest.fixture(scope="module")
def cost(kit):
    """A device whose latency is known."""
    return replace(COST, dense_ms=COST.latency_ms(kit.anatomy, kit.anatomy.full()))


def whole(kit, made):
    return {**kit.layout.sizes, **made.widths}


def test_the_kit_says_what_torch_says_of_the_model(kit):
    theirs = layer_stats.anatomy(RUN.spec)
    narrow = {group: max(8, size // 2) for group, size in kit.layout.sizes.items()}
    for widths in (theirs.full(), narrow):
        assert kit.anatomy.features(widths, 8) == theirs.features(widths, 8)
        sent = estimates.upload_bytes(theirs, widths, ("body", "adapters", "head"), "fp16") / 1e6
        own = own_plan._Search(RUN, kit, kit.anatomy, Budget(upload_mb=1), None).figures(widths, "fp16")
        assert own.values["upload_mb"] == pytest.approx(sent, rel=0.02)  # counters of BatchNorm do not travel there


class Joined(nn.Module):
    """Holds most at its end, where all weights were read once."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(6, 32, 3, padding=1), nn.Conv1d(32, 32, 3, padding=1)
        self.head = nn.Linear(64, 3)

    def forward(self, x):
        first = self.first(x)
        return self.head(torch.cat((first, self.second(first).relu()), 1).mean(2))


def test_the_memory_of_a_pass_has_all_weights():
    run = replace(RUN, spec=zoo.keep(Joined(), (6, 32), 3))
    kit = kit_of(run)
    search = own_plan._Search(run, kit, kit.anatomy, Budget(run_memory_mb=1), None)
    weights = kit.anatomy.values([*kit.anatomy.shapes], kit.anatomy.full())
    assert search._running(kit.anatomy.full()) >= 4 * (weights + 6 * 32 + 2 * 64 * 32)


@pytest.mark.parametrize(
    "limits", [{"latency_ratio": 0.5}, {"bundle_mb": 0.2}, {"upload_mb": 0.1}, {"run_memory_mb": 0.3}], ids=str
)
def test_the_widest_model_that_keeps_the_budget_is_planned(kit, cost, limits):
    made = own_plan.plan(RUN, kit, Budget(**limits, accuracy_drop=0.02), cost)
    ((name, limit),) = limits.items()
    assert made.widths or name in ("bundle_mb", "upload_mb")
    assert made.predicted[name] <= limit * 1.0001
    assert made.accuracy_drop == 0.02
    device_task.require_plan(RUN, made)
    search = own_plan._Search(RUN, kit, kit.anatomy, Budget(**limits), cost)
    wider = {g: min(n, whole(kit, made)[g] + 8) for g, n in kit.layout.sizes.items()}
    assert wider == whole(kit, made) or not search.keeps(wider, codec=made.codec)


def test_a_device_that_can_spare_all_keeps_all(kit, cost):
    made = own_plan.plan(RUN, kit, Budget(latency_ratio=1.0, bundle_mb=50), cost)
    assert not made.widths
    assert "all channels" in made.reasons["widths"]


def test_a_budget_that_nothing_keeps_is_refused_with_the_nearest(kit, cost):
    with pytest.raises(BudgetError, match=r"latency_ratio=0\.01 is impossible, nearest possible") as refused:
        own_plan.plan(RUN, kit, Budget(latency_ratio=0.01, upload_mb=0.0001), cost)
    made = own_plan.plan(RUN, kit, refused.value.nearest, cost)
    assert set(whole(kit, made).values()) == {own_plan.BLOCK}


class Grouped(nn.Module):
    """Its middle convolution has several groups, which no program narrows, nor what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Conv1d(6, 32, 3, padding=1), nn.Conv1d(32, 32, 3, padding=1, groups=2)
        self.last, self.head = nn.Conv1d(32, 32, 3), nn.Linear(32, 3)

    def forward(self, x):
        return self.head(self.last(self.middle(self.first(x).relu()).relu()).relu().mean(2))


def test_a_device_learns_under_the_plan_that_it_made_of_a_model_with_groups():
    run = replace(RUN, spec=zoo.keep(Grouped(), (6, 32), 3))
    kit = kits.decode(kits.encode(kit_of(run)))
    made = own_plan.plan(run, kit, Budget(upload_mb=0.0066))
    assert [*made.widths] == ["last"]
    draws = np.random.default_rng(0)
    samples = Samples(draws.standard_normal((24, 6, 32), np.float32), draws.integers(0, 3, 24))
    shared, _ = rounds.start(run)
    run_model.equip(run, kit)
    member = Member("anna", samples, samples, plan=made, engine="onnx")
    update, _ = rounds.participate(run, member, shared, None, 1)
    assert update.tensors["last.weight"].shape == (made.widths["last"], 32, 3)


def test_a_limit_that_only_torch_can_work_out_is_refused_by_name(kit):
    with pytest.raises(ConfigError, match=r"train_s=5 cannot be worked out.*talaria plan --json"):
        own_plan.plan(RUN, kit, Budget(train_s=5))


def test_a_plan_is_made_once_for_a_budget_and_again_for_another(kit, tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    made = own_plan.kept(path, RUN, kit, Budget(bundle_mb=0.1))
    assert plan_compat.read(path) == made
    counted = []
    real = own_plan.plan
    monkeypatch.setattr(own_plan, "plan", lambda *given: counted.append(given) or real(*given))
    assert own_plan.kept(path, RUN, kit, Budget(bundle_mb=0.1)) == made
    assert not counted
    assert own_plan.kept(path, RUN, kit, Budget(bundle_mb=0.08)) != made
    path.write_bytes(path.read_bytes()[:-20])
    assert own_plan.kept(path, RUN, kit, Budget(bundle_mb=0.1)) == made
    assert len(counted) == 2


MEASURED = """
import sys
from pathlib import Path
from talaria.federated import kit as kits
from talaria.federated import own_plan
from talaria.federated.run import Run
from talaria.planning.budget import Budget
run, kit = Run.from_json(sys.argv[1]), kits.open_kit(sys.argv[2])
own_plan.ROUNDS = 5
cost = own_plan.measured(run, kit)
assert cost.dense_ms > 0 and cost.probes == own_plan.PROBES, cost
own_plan.kept(Path(sys.argv[3]), run, kit, Budget(latency_ms=1000))
"""


def test_it_measures_and_plans_where_torch_cannot_be_imported(kit, tmp_path):
    file, plan = tmp_path / "run.kit", tmp_path / "plan.json"
    file.write_bytes(kits.encode(kit))
    command = [sys.executable, "-c", TORCHLESS + MEASURED, RUN.to_json(), str(file), str(plan)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not plan_compat.read(plan).widths


def changed(file, change):
    """The file with what its ``about`` says changed."""
    entries, meta = strict_safetensors.unpack(file, most=kits.MOST)
    about = json.loads(zlib.decompress(entries["about"].raw))
    change(about)
    arrays = {name: entry.array() for name, entry in entries.items()}
    arrays["about"] = np.frombuffer(zlib.compress(json.dumps(about).encode()), np.uint8)
    return strict_safetensors.pack(arrays, meta)


def test_a_kit_without_layers_is_not_planned_from(kit):
    bare = kits.decode(changed(kits.encode(kit), lambda about: about.update(layers=[])))
    assert bare.layers == ()
    with pytest.raises(ConfigError, match="give the device a plan"):
        own_plan.plan(RUN, bare, Budget(bundle_mb=0.1))


@pytest.mark.parametrize(
    ("field", "value"),
    [("kernel", 0), ("kernel", 1 << 40), ("dense", [0, 4]), ("kind", "odd"), ("out", [["nowhere", 1]]), ("into", 7)],
)
def test_layers_that_are_no_layers_are_refused(kit, field, value):
    def change(about):
        about["layers"][0][field] = value

    with pytest.raises(StateError, match="damaged"):
        kits.decode(changed(kits.encode(kit), change))
