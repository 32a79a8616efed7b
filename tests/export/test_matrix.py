"""Models, pruned and not, with and without adapters: a part of ``benchmarks/export_matrix.py``, which runs it all.

Each algorithm's own form of personal model is exported by the laws that every algorithm keeps.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

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
    assert found.difference <= 1e-4
    assert found.same_top1
