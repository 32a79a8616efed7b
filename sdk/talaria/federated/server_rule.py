"""A fleet's server rule by name, for simulation and coordinator alike: ``median``, ``trimmed_mean:f=2``, or ``akt``,
which teaches the mean of the run's own model on samples that the server holds (:mod:`talaria.aggregate.distill`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from talaria import npz, recorded, tasks
from talaria.aggregate import registry
from talaria.aggregate.adversarial import Attack, Normalization
from talaria.aggregate.base import Aggregator
from talaria.aggregate.class_statistics import PooledStatistics
from talaria.aggregate.distill import Distilled
from talaria.aggregate.fedbuff import least
from talaria.aggregate.masked import MaskedMean
from talaria.errors import ConfigError, DataError
from talaria.federated import rounds, run_model
from talaria.federated.fedbuff_run import Buffering, buffered
from talaria.federated.run import Run
from talaria.options import taken_apart
from talaria.types import Samples
from talaria.valid import Option, Options

AKT = "akt"
_FILES = ("proxy", "selection")
_PLAIN: Mapping[str, type] = {
    "labels": str, "rounds": int, "steps": int, "batch": int, "every": int, "seed": int, "lr": float
}  # fmt: skip
_OTHER: Mapping[str, type] = {"proxy": str, "selection": str, "attack_steps": int, "mean": float, "std": float}
_AKT = Options({name: Option(kind, None) for name, kind in {**_PLAIN, **_OTHER}.items()})


def rule_named(run: Run, text: str) -> Aggregator:
    """The aggregator of ``NAME`` or ``NAME:OPTION=VALUE,OPTION=VALUE`` for ``run``; NAME may read ``module:Name``.

    ``akt`` takes ``proxy=FILE.npz`` (x as the devices' inputs, or uint8 for pixels, and y), perhaps ``selection``
    likewise, the pixels' ``mean`` and ``std``, ``attack_steps`` (0: no adversarial half), and ``labels``, ``rounds``,
    ``steps``, ``batch``, ``lr``, ``every`` and ``seed`` of :class:`~talaria.aggregate.distill.Distilled`. Raises
    :class:`~talaria.errors.ConfigError` and :class:`~talaria.errors.DataError`.
    """
    name, options = taken_apart(text, "aggregator")
    if name != AKT:
        return registry.load({"name": name, **options})
    return _akt(run, options)


def aggregator_of(run: Run, rule: str | None, buffering: Buffering | None) -> Aggregator | None:
    """The rule that a fleet folds with, where it is not the algorithm's own. Raises
    :class:`~talaria.errors.ConfigError` where it does not suit the run."""
    named = None if rule is None else rule_named(run, rule)
    if buffering is not None:
        return buffered(run, buffering, named)
    rounds.rule_of(run, named)
    return named


def least_of(run: Run, aggregator: Aggregator | None) -> int:
    """The fewest updates that the run's rule folds, and of which a coordinate can move."""
    return max(1, least(rounds.rule_of(run, aggregator)))


def require_enough(run: Run, aggregator: Aggregator | None, members: int) -> None:
    """Raise :class:`ConfigError` where the run's rule folds more updates at least than a round in step counts of its
    ``members``: none could ever be committed."""
    counted = rounds.needed(run, members)
    if not run.asynchronous and (fewest := least_of(run, aggregator)) > counted:
        raise ConfigError(
            f"aggregator: the rule folds no fewer than {fewest} updates, and a round counts {counted} of {members} "
            "members; lower its f, min_holders or m, or let more take part"
        )


def located(text: str, folder: Path) -> str:
    """``text`` with the files that it names below ``folder``, where they are not absolute."""
    name, options = taken_apart(text, "aggregator")
    if name != AKT:
        return text
    paths = {k: str((folder / str(options[k])).resolve()) for k in _FILES if k in options}
    return f"{name}:" + ",".join(f"{k}={v}" for k, v in {**options, **paths}.items())


def _akt(run: Run, options: Mapping[str, Any]) -> Aggregator:
    if "proxy" not in options:
        raise ConfigError("aggregator 'akt' learns from samples of the server's own; name them: akt:proxy=FILE.npz")
    options = _AKT.read("aggregator 'akt'", options)
    if tasks.of(run.task).name != tasks.CLASSIFICATION:
        raise ConfigError(f"aggregator 'akt' compares class probabilities; task={run.task!r} has none: leave it out")
    own = run_model.algorithm_of(run).aggregator
    if isinstance(own, MaskedMean) and (own.mode, own.min_holders) != ("holders", 1):
        raise ConfigError(
            f"aggregator 'akt' moves all of the model, but {run.algorithm} with mode={own.mode!r} and min_holders="
            f"{own.min_holders} leaves alone what few devices keep; set mode='holders' and min_holders=1, or leave the "
            "rule out"
        )
    model = run_model.template(run.spec)
    foreign = sorted(set(run_model.first_shared(run)) - set(model.state_dict()))
    if isinstance(own, PooledStatistics) or foreign:
        raise ConfigError(
            f"aggregator 'akt' teaches the weights of one model, but {run.algorithm} shares more than that "
            f"({', '.join(foreign[:3])}); choose another algorithm, or leave the rule out"
        )
    scale = Normalization((float(options.get("mean", 0.0)),), (float(options.get("std", 1.0)),))
    return Distilled(
        inner=own,
        model=model,
        proxy=_samples(run, options["proxy"]),
        selection=_samples(run, options["selection"]) if "selection" in options else None,
        normalization=scale,
        attack=Attack(steps=int(options.get("attack_steps", Attack.steps))),
        **{k: options[k] for k in _PLAIN if k in options},
    )


def _samples(run: Run, file: str) -> Samples:
    raw = npz.read(Path(file), ("x", "y"))
    x, y = raw["x"], raw["y"]
    if x.shape[1:] != tuple(run.spec.input_shape):
        raise DataError(f"{file}: x has shape {x.shape}, need (N, {', '.join(map(str, run.spec.input_shape))})")
    if x.dtype.kind not in "fiu" or y.dtype.kind not in "iu":
        raise DataError(f"{file}: x is {x.dtype} and y {y.dtype}; need numbers and whole-number labels")
    return Samples(recorded.scaled(x), y.astype(np.int64))
