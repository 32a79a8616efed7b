"""Whose data, how many labels a newcomer has, and the ways in which it may come to a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from talaria.data import glucose, presets, registry, vowels
from talaria.data.federated import Federated
from talaria.planning.plan import Plan

METHODS: Mapping[str, str] = {
    "alone": "newcomer alone",
    "fleet": "fleet model as it is",
    "dense": "FedAvg, fine-tuned (dense)",
    "personal": "personal",
}
"""What is compared, and how it is called in tables."""
SERVING = frozenset({"tune", "tune_epochs", "tune_lr", "tune_on", "newcomer_epochs", "join_epochs"})
"""Options that say what is served when the rounds are over, and change nothing in them."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to a model: after the rounds of the algorithm ``learns``, by ``serves`` with its ``options``.

    ``learns=None``: nobody else's, ``epochs`` of training on the person's own labels. ``small``: under the study's
    plan. ``amounts``: the amounts of labels that it is for; none: all. Of a method with several ways each person has
    the one that served the other subjects best.
    """

    method: str
    name: str
    learns: str | None = None
    serves: str = "local"
    options: Mapping[str, Any] = field(default_factory=dict)
    small: bool = False
    epochs: int = 0
    amounts: tuple[str, ...] = ()

    @property
    def rounds_options(self) -> dict[str, Any]:
        """The options that matter in the rounds."""
        if self.learns != self.serves:
            return {}
        return {name: value for name, value in self.options.items() if name not in SERVING}


@dataclass(frozen=True, kw_only=True)
class Study:
    """One data set: ``subjects`` who are left out in turn, and ``amounts``, by name the options of the loader that say
    how many labels a newcomer has. ``widths`` are the channels of the small model's groups."""

    data: str
    subjects: tuple[int | str, ...]
    amounts: Mapping[str, Mapping[str, Any]]
    rounds: int
    widths: Mapping[str, int]
    ways: tuple[Way, ...]
    dense_buffers: str = "local"
    """BatchNorm statistics of the dense fleet: ``"aggregate"`` needs nothing of a newcomer."""
    figure: str = "accuracy"

    @property
    def plan(self) -> Plan:
        return Plan(widths=dict(self.widths), reasons={"widths": "half the latency, or half the channels"})

    def load(self, subject: int | str, amount: str) -> Federated:
        """The others as members, ``subject`` as newcomer with so many labels."""
        return registry.load(self.data, newcomers=(subject,), **self.amounts[amount])

    def rounds_facts(self, way: Way, rounds: int) -> dict[str, Any]:
        """All that decides what the fleet of a ``way`` learns, as plain values."""
        return {
            "data": self.data,
            "default": asdict(presets.default_of(self.data)),
            "rounds": rounds,
            "learns": way.learns,
            "options": way.rounds_options,
            "widths": dict(self.widths) if way.small else None,
            "dense_buffers": self.dense_buffers,
        }

    def facts(self, way: Way, rounds: int) -> dict[str, Any]:
        """All that decides the figures of a ``way``, as plain values."""
        return self.rounds_facts(way, rounds) | {
            "amounts": {name: dict(options) for name, options in self.amounts.items()},
            "serves": way.serves,
            "serving": dict(way.options),
            "epochs": way.epochs,
            "for": way.amounts,
        }


def _by_itself(*epochs: int) -> tuple[Way, ...]:
    """Alone for so many epochs, and the fleet's model as it is."""
    alone = (Way(method="alone", name=f"{n} epochs", epochs=n) for n in epochs)
    return *alone, Way(method="fleet", name="as it is", learns="fedavg", serves="fedavg")


def _tuned(
    method: str, epochs: Sequence[int], tune: Mapping[str, Any], name: str = "{} epochs", amounts: tuple[str, ...] = ()
) -> tuple[Way, ...]:
    """FedAvg's model, fine-tuned for so many epochs; the personal one is small."""
    return tuple(
        Way(
            method=method,
            name=name.format(n),
            learns="fedavg",
            serves="fedavg_ft",
            options={**tune, "tune_epochs": n},
            small=method == "personal",
            amounts=amounts,
        )
        for n in epochs
    )


def _smartwatch() -> Study:
    tune = {"tune_lr": 0.005, "tune_on": "all"}
    hermes = (
        Way(
            method="personal",
            name=f"hermes, {n} epochs",
            learns="hermes",
            serves="hermes",
            options=tune | {"choose_by": "download", "newcomer_epochs": n},
            small=True,
        )
        for n in (20, 80)
    )
    return Study(
        data="smartwatch",
        subjects=tuple(range(1, 11)),
        amounts={f"{n} windows": {"newcomer_windows": n} for n in (4, 8, 16)} | {"all": {"newcomer_windows": None}},
        rounds=30,
        # What `talaria plan --model imu_cnn --shape 6,100 --classes 7 -b latency_ratio=0.5` gave on an AMD EPYC.
        widths={"conv1": 40, "conv2": 32, "conv3": 72, "conv4": 64},
        dense_buffers="aggregate",
        ways=(*_by_itself(40, 80), *_tuned("dense", (20, 80), tune), *hermes),
    )


def _vowels() -> Study:
    tune, epochs = {"tune_lr": 0.02, "tune_on": "all"}, (20, 60, 150)
    return Study(
        data="vowels",
        subjects=tuple(range(vowels.SPEAKERS)),
        amounts={
            "1 frame": {"newcomer_frames": 1, "newcomer_holdout": 0},
            "2 frames": {"newcomer_frames": 2},
            "all (3)": {"newcomer_frames": 3},
        },
        rounds=30,
        widths={"fc1": 64, "fc2": 32},
        ways=(*_by_itself(60, 150), *_tuned("dense", epochs, tune), *_tuned("personal", epochs, tune)),
    )


def _glucose() -> Study:
    tune = {"tune_lr": 0.005, "tune_on": "all"}
    # How far, by the fleets' seeds 0 to 2, at readings that neither train nor test: further with more labels.
    few = _tuned("personal", (20,), tune | {"mix": 0.25}, "{} epochs, 0.25 of the way", ("12 hours", "24 hours"))
    many = _tuned("personal", (20,), tune | {"mix": 0.5}, "{} epochs, 0.5 of the way", ("48 hours", "all"))
    return Study(
        data="glucose",
        subjects=tuple(glucose.people()),
        amounts={f"{n} hours": {"newcomer_hours": n} for n in (12, 24, 48)} | {"all": {"newcomer_hours": None}},
        rounds=20,
        widths={"fc1": 64, "fc2": 32},
        figure="R²",
        ways=(*_by_itself(10, 40), *_tuned("dense", (5, 20), tune), *few, *many),
    )


STUDIES = {"smartwatch": _smartwatch, "vowels": _vowels, "glucose": _glucose}
"""By the name of the data."""
