"""Programs of the three small models, built once."""

from functools import lru_cache

import pytest
from torch import Tensor, nn

from talaria.model import zoo
from talaria.model.spec import ModelSpec
from talaria.programs.build import build

MODELS = {
    "imu_cnn": ModelSpec("imu_cnn", (6, 100), 7),
    "mlp": ModelSpec("mlp", (20,), 4),
    "fmnist_cnn": ModelSpec("fmnist_cnn", (1, 28, 28), 10),
}


class Sequence(nn.Module):
    """Attention and a GRU over a short window, for what is done to programs of many operators."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(4, 2, batch_first=True), nn.LayerNorm(4)
        self.gru, self.head = nn.GRU(4, 3, batch_first=True), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x + self.attention(x, x, x)[0])
        return self.head(self.gru(x)[1][-1])


@lru_cache
def built(name: str, trained: str = "all") -> bytes:
    return build(zoo.keep(Sequence(), (3, 4), 4) if name == "sequence" else MODELS[name], trained)


@pytest.fixture(scope="session")
def program_of():
    """``(model, trained) -> the bytes of its program``."""
    return built


@pytest.fixture(scope="session")
def spec_of():
    return MODELS.__getitem__
