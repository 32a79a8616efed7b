"""What a run is where nothing else is asked for: one place for Python, ``talaria simulate`` and fleet.toml.

A field of the recipe that nobody names is as :class:`talaria.types.Recipe` has it. Where the dataset is known by name,
its model, recipe and options per algorithm are the ones that were chosen for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from talaria.errors import ConfigError
from talaria.foreign import shown
from talaria.types import Recipe


@dataclass(frozen=True, kw_only=True)
class Default:
    """A model (None: chosen from the data's shape) with its input and classes, a recipe, and per-algorithm options."""

    model: str | None = None
    input_shape: tuple[int, ...] | None = None
    classes: int | None = None
    recipe: Recipe = field(default_factory=Recipe)
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    task: str | None = None


# On the smartwatch three algorithms tune for 20 epochs on training and validation samples before they serve; the others
# keep their own defaults. Whoever compares algorithms sets the same for all (-o tune_epochs=5 -o tune_on=train).
TUNE: dict[str, Any] = {"tune_epochs": 20, "tune_lr": 0.005, "tune_on": "all"}
SMARTWATCH = Default(
    model="imu_cnn",
    input_shape=(6, 100),
    classes=7,
    recipe=Recipe(epochs=2, batch=32, lr=0.05, momentum=0.9, weight_decay=1e-4, smoothing=0.1, augment="imu"),
    options={
        # A newcomer's 80 epochs are what a member learns in 30 rounds and 20 epochs of fine-tuning.
        "hermes": {**TUNE, "choose_by": "download", "newcomer_epochs": 80},
        "fedavg_ft": dict(TUNE),
        "pfedgm": dict(TUNE),
        "thorki": {"small": "imu_cnn"},
    },
)
FASHION_MNIST = Default(
    model="fmnist_cnn",
    input_shape=(1, 28, 28),
    classes=10,
    recipe=Recipe(epochs=1, batch=10, lr=0.01, momentum=0.0),
    options={
        "fedrep": {"head_epochs": 1, "body_epochs": 1},
        "fedbabu": {"tune_rate": 1.0},
        # Half the parameters, and own values beside the average: chosen by training images that train nobody.
        "hermes": {"cap": 0.36, "mode": "intersection"},
    },
)
# Chosen by leaving pairs of members out as newcomers; the seven of the official test decided nothing.
TUNE_VOWELS: dict[str, Any] = {"tune_epochs": 60, "tune_lr": 0.02, "tune_on": "all"}
VOWELS = Default(
    model="mlp",
    input_shape=(10,),
    classes=11,
    recipe=Recipe(epochs=5, batch=8, lr=0.02, momentum=0.9, smoothing=0.1),
    options={name: dict(TUNE_VOWELS) for name in ("hermes", "fedavg_ft", "pfedgm")},
)
# Chosen by leaving eight of the 19 members out as newcomers in turn; the five newcomers decided nothing.
GLUCOSE = Default(
    model="mlp",
    input_shape=(24,),
    classes=1,
    recipe=Recipe(epochs=2, batch=32, lr=0.02, momentum=0.9),
    options={"ditto": {"lam": 1.0, "join_epochs": 2}, "fedavg_ft": {"tune_epochs": 5, "tune_lr": 0.005}},
    task="regression:center=zero,spread=15",
)
ANY = Default()
NAMED: Mapping[str, Default] = {
    "smartwatch": SMARTWATCH,
    "vowels": VOWELS,
    "glucose": GLUCOSE,
    "fashion-mnist": FASHION_MNIST,
}
"""The datasets that have defaults of their own."""


def default_of(dataset: str | None) -> Default:
    """The default for a dataset name as ``talaria simulate -d`` takes it."""
    return ANY if dataset is None else NAMED.get(dataset, ANY)


def completed(values: Mapping[str, Any], dataset: str | None = None) -> dict[str, Any]:
    """``values``, fields of :class:`talaria.federated.run.Run` as plain JSON values, with what they leave out.

    ``recipe`` and ``hparams`` may name some of their fields; the others are the dataset's, as is a model that is not
    given. The model's initial weights follow the run's seed unless its own ``seed`` says otherwise. Values of a wrong
    kind are left for the run to refuse.

    >>> completed({"algorithm": "fedavg", "recipe": {"lr": 0.1}, "seed": 3}, "smartwatch")["spec"]
    {'seed': 3, 'name': 'imu_cnn', 'input_shape': [6, 100], 'classes': 7}
    """
    default, out = default_of(dataset), dict(values)
    if default.model is not None:
        spec = {"name": default.model, "input_shape": list(default.input_shape or ()), "classes": default.classes}
        out["spec"] = {**spec, **out["spec"]} if isinstance(out.get("spec"), Mapping) else out.get("spec", spec)
    if default.task is not None:
        out.setdefault("task", default.task)
    if isinstance(out.get("spec"), Mapping):
        out["spec"] = {"seed": out.get("seed", 0), **out["spec"]}
    if isinstance(out.setdefault("recipe", {}), Mapping):
        out["recipe"] = {**asdict(default.recipe), **out["recipe"]}
    name = out.get("algorithm")
    if isinstance(name, str) and isinstance(out.setdefault("hparams", {}), Mapping):
        out["hparams"] = {**default.options.get(name, {}), **out["hparams"]}
    return out


def require(dataset: object) -> str:
    """``dataset`` itself where it has defaults of its own; else :class:`ConfigError`."""
    if not isinstance(dataset, str) or dataset not in NAMED:
        raise ConfigError(f"defaults={shown(dataset)} is unknown; use {' or '.join(map(repr, NAMED))}")
    return dataset
