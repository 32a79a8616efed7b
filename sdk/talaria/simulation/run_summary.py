"""What a run's page tells: the run itself, and what the baselines made of the same data beside it."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from talaria import tasks
from talaria.errors import ConfigError
from talaria.federated import rounds
from talaria.foreign import shown
from talaria.simulation.reporting import mask_overlap

if TYPE_CHECKING:
    from talaria.simulation.result import Result

BASELINES = ("local", "fedavg", "fedavg_ft")
"""Who may stand beside a run: everybody alone, plain FedAvg, and FedAvg that each client tunes."""
_ARRIVED = {"local": "scratch", "fedavg": "zero_shot"}
"""What the same is called for newcomers."""


def summary_of(result: Result, beside: Mapping[str, Result]) -> dict[str, Any]:
    """The summary for :func:`talaria.simulation.reporting.write_html`. Raises
    :class:`~talaria.errors.ConfigError` where ``beside`` has another algorithm than :data:`BASELINES`, or a run of
    other data or task."""
    run, masks = result.run, result.learned.masks
    for name, other in beside.items():
        if name not in BASELINES:
            raise ConfigError(f"report: beside={shown(name)} is no baseline; use some of {', '.join(BASELINES)}")
        if other.asked["fingerprint"] != result.asked["fingerprint"] or other.run.task != run.task:
            raise ConfigError(f"report: beside[{name!r}] learned from other data; simulate it with the same")
    everyone = {"personal": result, **beside}
    whole = sum(value.numel() for value in rounds.template(run.spec).parameters())
    users: dict[str, Any] = {
        name: {
            "accuracy": {method: one.clients[name].accuracy for method, one in everyone.items()},
            "params_ratio": result.parameters(name) / whole,
        }
        for name in result.clients
    }
    marks: dict[int, dict[str, float]] = {}
    for method, one in everyone.items():
        for number, mark in one.marks.items():
            marks.setdefault(number, {})[method] = mark
    out: dict[str, Any] = {
        "title": f"{run.algorithm} on {result.asked['dataset']}",
        "subtitle": f"{len(result.clients)} clients, {run.rounds} rounds, {run.spec.name}",
        "score": tasks.score_word(run.task),
        "users": users,
        "accuracy": {method: one.accuracy.mean for method, one in everyone.items()},
        "rounds": run.rounds,
        "seed": run.seed,
        "broker": "none, simulated",
        "versions": {name: version(name) for name in ("talaria", "torch")} | {"python": platform.python_version()},
        "curve": [{"round": number, "accuracy": marks[number]} for number in sorted(marks)],
        "overlap": mask_overlap(masks) if len(masks) > 1 else None,
    }
    up, down = result.learned.bytes_whole
    if up:
        out["upload_ratio"] = sum(result.learned.bytes_up.values()) / up
    if down and result.learned.bytes_down is not None:
        out["download_ratio"] = result.learned.bytes_down / down
    arrived = {_ARRIVED.get(method, method): one.newcomers for method, one in everyone.items()}
    known = {method: one for method, one in arrived.items() if one is not None}
    if result.newcomers is not None:
        for name in result.newcomers.clients:
            scores = {method: one.clients[name].accuracy for method, one in known.items()}
            users[name] = {"role": "newcomer", "accuracy": scores}
        out["newcomers"] = {"accuracy": {method: one.accuracy.mean for method, one in known.items()}}
    return out
