import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from talaria.errors import ConfigError
from talaria.model import zoo
from talaria.model.adapters import count
from talaria.model.spec import AdapterSpec, ModelSpec
from talaria.model.state import state_of
from talaria.planning import latency_model
from talaria.planning import profile as profiles
from talaria.planning.profile import Profile
from talaria.training.interface import Task
from talaria.types import Recipe, Samples
from talaria_bench import adapters, planner


def test_the_planner_bench_reports_each_family(
    profile: Profile, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(planner, "FAMILIES", (("imu_cnn", (6, 40), 3),))
    monkeypatch.setattr(planner, "HELD_OUT", 2)
    monkeypatch.setattr(planner, "BUDGETS", 2)
    monkeypatch.setattr(latency_model, "SECONDS", 0.3)
    monkeypatch.setattr(profiles, "cached", lambda: profile)
    planner.planner(as_json=True, families=None)
    found = json.loads(capsys.readouterr().out)
    (row,) = found["families"]
    assert row["probes"] <= 15
    assert row["measuring_s"] < 10
    assert 0 <= row["mean_error"] <= row["worst_error"]
    assert len(row["budgets"]["wanted"]) == len(row["budgets"]["measured"]) == 2
    assert all(ratio > 0 for ratio in (*row["pruned"].values(), *row["pruned_warm"].values()))
    assert row["channels_removed"]["0.3"] < row["channels_removed"]["0.7"]
    monkeypatch.setattr(planner, "family", lambda *_: row)  # as just measured
    planner.planner(as_json=False, families="imu_cnn")
    assert "imu_cnn" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="'imu' must be names among imu_cnn"):
        planner.planner(families="imu")


@pytest.mark.parametrize("name", [spec[0] for spec in planner.FAMILIES])
@pytest.mark.parametrize("block", [8, 16])
def test_at_least_the_named_share_of_channels_is_taken_away(name: str, block: int) -> None:
    spec = next(ModelSpec(*spec) for spec in planner.FAMILIES if spec[0] == name)
    if spec.input_shape[0] == 3:  # the channels are those of any size
        spec = replace(spec, input_shape=(3, 64, 64))
    full = dict(zoo.layout(spec).sizes)
    for share in planner.SHARES:
        widths = planner._without(share, full, block)
        removed = 1 - sum(widths.values()) / sum(full.values())
        assert share <= removed <= share + 0.06
        assert all(w % block == 0 or w == full[g] for g, w in widths.items())
        assert all(0 < w <= full[g] for g, w in widths.items())


def test_kept_features_take_less_memory_and_the_same_step() -> None:
    spec = ModelSpec("mobilenet_v3_small", (3, 32, 32), 3)
    model = zoo.build(spec)
    draws = torch.Generator().manual_seed(0)
    samples = Samples.of(torch.randn(16, *spec.input_shape, generator=draws), np.arange(16) % 3)
    task = Task(
        model=model,
        split=zoo.split(spec, model),
        train=samples,
        val=samples,
        recipe=Recipe(batch=16, epochs=1, lr=0.05, momentum=0.0),
        classes=3,
    )
    head = task.split.of("head")
    _, whole = adapters._way(task, None)
    _, plain = adapters._way(task, head)
    step, kept = adapters._way(task, head, keep=True)
    assert kept < plain < whole
    before = state_of(task.model)
    step()
    assert all(np.array_equal(v, before[k]) for k, v in state_of(task.model).items())
    with pytest.raises(TypeError, match="nothing to keep"):
        adapters._way(task, None, keep=True)


def test_shares_are_counted_whole_and_with_a_private_head() -> None:
    spec = ModelSpec("mobilenet_v3_small", (3, 32, 32), 5, adapters=AdapterSpec("lowrank", 2, head=2))
    model = zoo.build(spec)
    found = adapters.shares(spec)
    whole = sum(p.numel() for p in zoo.build(replace(spec, adapters=None)).parameters())
    head = sum(p.numel() for n, p in model.named_parameters() if n.startswith(zoo.head(spec)))
    assert found["adapters_share"] == count(model) / whole
    assert found["trained_share"] == found["upload_share"] == (count(model) + head) / whole
    assert found["head_rank"] == 2
