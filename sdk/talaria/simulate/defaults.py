"""What ``talaria simulate`` trains with where nothing else is asked for: one model and one recipe per dataset."""

from dataclasses import dataclass, field
from typing import Any

from talaria.types import Recipe


@dataclass(frozen=True, kw_only=True)
class Default:
    """A model name (None: chosen from the shape), a recipe, and per-algorithm options."""

    model: str | None
    recipe: Recipe
    options: dict[str, dict[str, Any]] = field(default_factory=dict)


# On the smartwatch three algorithms tune for 20 epochs on training and validation samples before they serve; the others
# keep their own defaults. Whoever compares algorithms sets the same for all (-o tune_epochs=5 -o tune_on=train).
TUNE: dict[str, Any] = {"tune_epochs": 20, "tune_lr": 0.005, "tune_on": "all"}
SMARTWATCH = Default(
    model="imu_cnn",
    recipe=Recipe(epochs=2, batch=32, lr=0.05, momentum=0.9, weight_decay=1e-4, smoothing=0.1, augment="imu"),
    options={name: dict(TUNE) for name in ("hermes", "fedavg_ft", "pfedgm")} | {"thorki": {"small": "imu_cnn"}},
)
FASHION_MNIST = Default(
    model="fmnist_cnn",
    recipe=Recipe(epochs=1, batch=10, lr=0.01),
    options={"fedrep": {"head_epochs": 1, "body_epochs": 1}, "fedbabu": {"tune_rate": 1.0}},
)
ANY = Default(model=None, recipe=Recipe(epochs=2, batch=16, lr=0.02, momentum=0.9))


def default_of(dataset: str) -> Default:
    """The default for a dataset name as ``talaria simulate -d`` takes it."""
    return {"smartwatch": SMARTWATCH, "fashion-mnist": FASHION_MNIST}.get(dataset, ANY)
