"""Models, pruned and not, with and without adapters: a part of ``benchmarks/export_matrix.py``, which runs it all.

Each algorithm's own form of personal model is exported by the laws that every algorithm keeps.
"""

import importlib.util
import json
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "export_matrix.py"


@pytest.fixture(scope="module")
def matrix() -> ModuleType:
    spec = importlib.util.spec_from_file_location("talaria_export_matrix", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("algorithm", "model", "pruned", "adapter"),
    [
        ("fedavg", "imu_cnn", True, "lowrank"),
        ("fedavg", "imu_cnn", False, "residual"),
        ("fedavg", "fmnist_cnn", True, "residual"),
        ("fedavg", "fmnist_cnn", False, "lowrank"),
        ("fedavg", "resnet18", True, "none"),
        ("fedavg", "resnet18", False, "lowrank"),
        ("fedavg", "mobilenet_v3_small", True, "lowrank"),
        ("fedavg", "efficientnet_lite0", True, "residual"),
        ("thorki", "imu_cnn", True, "lowrank"),
        ("thorki", "resnet18", False, "none"),
    ],
)
def test_personal_model_agrees_with_torch(matrix, algorithm, model, pruned, adapter):
    found = matrix.outcome(algorithm, model, pruned, adapter, {})
    assert found.refused == ""
    assert found.difference is not None
    assert found.ok, found.words


class Doubled(torch.nn.Sequential):
    """Looks like the plain module, holds the same weights, and answers otherwise."""

    def forward(self, x):
        return 2 * super().forward(x)


def test_equal_structure_counts_only_where_the_answers_are_equal(matrix, monkeypatch):
    plain = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(600, 40)).eval()
    x = torch.randn(4, 6, 100)
    monkeypatch.setattr(matrix, "personal_model", lambda *_: (plain, x))
    seen = {}
    assert matrix.outcome("a", "imu_cnn", False, "none", seen).difference is not None
    assert matrix.outcome("b", "imu_cnn", False, "none", seen).same_as == "a"
    ((structure, _),) = seen.items()
    seen[structure] = ("a", Doubled(*plain).eval())
    again = matrix.outcome("b", "imu_cnn", False, "none", seen)
    assert again.same_as == ""
    assert again.ok


def test_results_go_on_where_they_were_cut_off(matrix, tmp_path):
    path = tmp_path / "results.jsonl"
    good = matrix.Outcome("a", "imu_cnn", False, "none", refused="not here")
    path.write_text(json.dumps(asdict(good)) + "\n" + json.dumps(asdict(good))[:40])
    assert matrix.read(path) == [good]
    assert matrix.read(tmp_path / "none") == []
    assert "not here" in matrix.summary([good])


@pytest.mark.parametrize("figure", ["difference", "relative", "size_ratio"])
def test_a_file_beyond_a_bound_is_not_ok(matrix, figure):
    found = {"difference": 1e-6, "relative": 1e-6, "size_ratio": 1.0, "same_top1": True}
    assert matrix.Outcome("a", "imu_cnn", False, "none", **found).ok
    assert not matrix.Outcome("a", "imu_cnn", False, "none", **(found | {figure: 2.0})).ok
    assert not matrix.Outcome("a", "imu_cnn", False, "none", **(found | {"same_top1": False})).ok
    assert not matrix.Outcome("a", "imu_cnn", False, "none", failed="torn").ok
