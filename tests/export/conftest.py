"""Small models and bundles, exported once for all tests of this folder."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import Module

from talaria.model import zoo
from talaria.model.spec import ModelSpec
from talaria_export import make_bundle
from talaria_export.bundle.report import Report

IMU = ModelSpec("imu_cnn", (6, 100), 7)
LABELS = tuple("abcdefg")


@dataclass(frozen=True)
class Case:
    """A model in eval mode with plausible statistics, inputs, and the classes that it gives them itself."""

    model: Module
    x: Tensor
    y: Tensor


def settled(model: Module, x: Tensor) -> Module:
    """``model`` with BatchNorm statistics of ``x``, in eval mode."""
    model.train()
    with torch.no_grad():
        for _ in range(5):
            model(x)
    return model.eval()


@pytest.fixture(scope="session")
def imu() -> Case:
    x = torch.randn(64, 6, 100, generator=torch.Generator().manual_seed(5))
    model = settled(zoo.build(IMU), x)
    with torch.no_grad():
        return Case(model, x, model(x).argmax(1))


@pytest.fixture(scope="session")
def made(imu: Case, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Report]:
    """A bundle with fp32 and half precision, and the report of its making."""
    path = tmp_path_factory.mktemp("bundle") / "me.talaria"
    report = make_bundle(
        path,
        imu.model,
        example=imu.x,
        samples=(imu.x, imu.y),
        labels=LABELS,
        meta={"algorithm": "hermes", "round": 3},
        dense=imu.model,
        variants=("fp32", "fp16"),
        seconds=0,
    )
    return path, report


@pytest.fixture(scope="session")
def bundle(made: tuple[Path, Report]) -> Path:
    return made[0]


@pytest.fixture(scope="session")
def raw(imu: Case, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Report]:
    """A bundle for raw recordings (mean 0..5, deviation 1..6), a window every 50 steps; every variant was tried."""
    path = tmp_path_factory.mktemp("raw") / "raw.talaria"
    report = make_bundle(
        path,
        imu.model,
        example=imu.x,
        samples=(imu.x, imu.y),
        calibration=imu.x,
        labels=LABELS,
        dense=imu.model,
        normalize=(range(6), range(1, 7)),
        stride=50,
        optimize=True,
        seconds=0.05,
    )
    return path, report
