"""Programs of the three small models, built once."""

from functools import lru_cache

import pytest

from talaria.model.spec import ModelSpec
from talaria.programs.build import build

MODELS = {
    "imu_cnn": ModelSpec("imu_cnn", (6, 100), 7),
    "mlp": ModelSpec("mlp", (20,), 4),
    "fmnist_cnn": ModelSpec("fmnist_cnn", (1, 28, 28), 10),
}


@lru_cache
def built(name: str, trained: str = "all") -> bytes:
    return build(MODELS[name], trained)


@pytest.fixture(scope="session")
def program_of():
    """``(model, trained) -> the bytes of its program``."""
    return built


@pytest.fixture(scope="session")
def spec_of():
    return MODELS.__getitem__
