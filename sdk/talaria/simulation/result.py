"""What a simulation came to: accuracy per client and per round, the personal models, the page, the folder."""

from __future__ import annotations

import hashlib
import importlib
import math
import platform
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

from torch.nn import Module

from talaria import tasks, valid
from talaria.data.federated import Federated
from talaria.errors import ConfigError
from talaria.federated import device_task, run_model
from talaria.federated.fedbuff_run import Buffering
from talaria.federated.global_model import encode_model
from talaria.federated.run import Run
from talaria.foreign import shown
from talaria.model.masks import compact_shape
from talaria.planning.plan import Plan
from talaria.privacy.rule import Privacy
from talaria.simulation import checkpoint
from talaria.simulation.private_run import figures
from talaria.simulation.reporting import mask_overlap, pair_overlap, write_html
from talaria.simulation.run import Learned, members_of
from talaria.training import evaluation
from talaria.training.evaluation import Metrics, Report, Summary

BASELINES = ("local", "fedavg", "fedavg_ft")
"""Who may stand beside a run: everybody alone, plain FedAvg, and FedAvg that each client tunes."""
SHOWN = 32
"""So many masks, the first, are shown pair by pair on a page."""
_ARRIVED = {"local": "scratch", "fedavg": "zero_shot"}
"""What the same is called for newcomers."""


@dataclass(frozen=True)
class Point:
    """One round: its number from 1, how many clients took part, bytes sent up, the clients' mean training metrics, and
    the members' mean accuracy (None where it was not measured, see ``evaluate_every``)."""

    round: int
    clients: int
    bytes_up: int
    metrics: Mapping[str, float]
    accuracy: float | None


@dataclass(frozen=True)
class Result:
    """What :func:`talaria.simulate` gives.

    ``members`` holds each one's accuracy on its own test samples, served as the algorithm serves it; ``newcomers``
    the same for those who took no part in the training, None where the data has none.
    """

    learned: Learned = field(repr=False)
    data: Federated
    members: Report = field(repr=False)
    newcomers: Report | None = field(repr=False)
    marks: Mapping[int, float] = field(repr=False)
    asked: Mapping[str, Any] = field(repr=False)
    """The experiment as plain values, as ``experiment.json`` has it."""
    plans: Mapping[str, Plan] = field(default_factory=dict, repr=False)
    buffering: Buffering | None = field(default=None, repr=False)
    privacy: Privacy | None = field(default=None, repr=False)

    @property
    def run(self) -> Run:
        """What all members agreed on."""
        return self.learned.run

    @property
    def accuracy(self) -> Summary:
        """Over the members: ``mean``, ``weighted`` by samples, ``std``, ``worst``, ``worst_tenth``; each in 0..1. Of
        another task than classification, its score (:attr:`talaria.tasks.Goal.figures`)."""
        return self.members.accuracy

    @property
    def macro_recall(self) -> Summary:
        """As :attr:`accuracy`, of the mean recall over labels."""
        return self.members.macro_recall

    @property
    def clients(self) -> Mapping[str, Metrics]:
        """Each member's ``accuracy``, ``macro_recall`` and number of test ``samples``, by name."""
        return self.members.clients

    @property
    def curve(self) -> tuple[Point, ...]:
        """One point per round; in an asynchronous run, per version."""
        return tuple(
            Point(one.round, len(one.clients), one.bytes_up, one.metrics, self.marks.get(one.round))
            for one in self.learned.history
        )

    def model(self, client: str) -> Module:
        """The personal model of a member or newcomer, physically small, in eval mode.

        Raises :class:`~talaria.errors.ConfigError` for an unknown name.
        """
        everyone = self.data.everyone
        every = members_of(everyone, self.plans, self.asked.get("engine", "torch"))
        if client not in every:
            raise ConfigError(f"client={client!r} is none of this run; choose one of {', '.join(list(every)[:8])}")
        return self.learned.personal(every[client])

    def to_frame(self) -> Any:
        """A pandas DataFrame, one row per client: accuracy, macro_recall, samples, newcomer, bytes_up.

        Raises :class:`~talaria.errors.ConfigError` where pandas is not installed.
        """
        try:
            pandas = importlib.import_module("pandas")
        except ImportError:
            raise ConfigError("to_frame() needs pandas: pip install pandas; or use result.as_dict()") from None
        rows = [(name, one, False) for name, one in self.clients.items()]
        rows += [(name, one, True) for name, one in (self.newcomers.clients if self.newcomers else {}).items()]
        sent = self.learned.bytes_up
        return pandas.DataFrame(
            [{"client": n, **vars(one), "newcomer": new, "bytes_up": sent.get(n, 0)} for n, one, new in rows]
        ).set_index("client")

    def as_dict(self) -> dict[str, Any]:
        """All figures as plain values: what ``talaria simulate --json`` prints."""
        run, learned = self.run, self.learned
        return evaluation.told(run.task) | {
            "algorithm": run.algorithm,
            "dataset": self.asked["dataset"],
            "model": run.spec.to_json(),
            "options": dict(sorted(run.hparams.items())),  # a resumed run has them so
            "recipe": asdict(run.recipe),
            "rounds": run.rounds,
            "seed": run.seed,
            "engine": self.asked.get("engine", "torch"),
            "model_digest": hashlib.sha256(encode_model(learned.shared, run.download)).hexdigest(),
            "aggregator": self.asked["aggregator"],
            "over": self.asked["over"],
            "accuracy": asdict(self.accuracy),
            "macro_recall": asdict(self.macro_recall),
            "clients": {
                name: {**asdict(one), "bytes_up": learned.bytes_up[name], "parameters": self.parameters(name)}
                for name, one in self.clients.items()
            },
            "newcomers": None if self.newcomers is None else self.newcomers.as_dict(),
            "bytes_up": sum(learned.bytes_up.values()),
            "bytes_down": learned.bytes_down,
            "bytes_whole": dict(zip(("up", "down"), learned.bytes_whole, strict=True)),
            "overlap": pair_overlap(learned.masks),
            "curve": [{"round": number, "accuracy": mark} for number, mark in sorted(self.marks.items())],
            "privacy": figures(self.privacy, learned.server),
            "asynchronous": None if self.buffering is None else self._arrivals(self.buffering),
        }

    def report(self, path: str | Path, beside: Mapping[str, Result] | None = None) -> Path:
        """Write one HTML page, without scripts or anything from elsewhere: every client, the curve, bytes, masks in
        common. ``beside`` has what baselines made of the same data, by their names (``local``, ``fedavg``,
        ``fedavg_ft``): each stands beside this run for every client and in the curve.

        Raises :class:`~talaria.errors.StateError` where ``path`` cannot be written, and
        :class:`~talaria.errors.ConfigError` for a run of other data, or of another algorithm than those.
        """
        return write_html(_page(self, beside or {}), valid.path("report", "path", path))

    def save(self, folder: str | Path) -> Path:
        """Keep the run in a new ``folder`` (:mod:`talaria.simulation.checkpoint`), for :func:`talaria.resume`.

        It holds every client's private state. Raises :class:`~talaria.errors.StateError` where the folder holds a run
        already or cannot be written.
        """
        folder = valid.path("save", "folder", folder)
        with checkpoint.begun(folder, self.asked):
            checkpoint.write(folder, self.learned, self.marks)
            checkpoint.finish(folder, self.as_dict())
        return folder

    def parameters(self, client: str) -> int:
        """How many parameters a member's model keeps of the unpruned one. What an algorithm serves beside it, as
        Thorki's small branch, is not among them: a device's ``talaria edge result`` counts all that it serves.

        Raises :class:`~talaria.errors.ConfigError` for a name that is no member's.
        """
        learned = self.learned
        if client not in learned.members:
            raise ConfigError(f"client={client!r} is no member; choose one of {', '.join(list(learned.members)[:8])}")
        mask = device_task.mask_of(learned.run, learned.members[client], learned.private.get(client))
        parameters = run_model.template(learned.run.spec).named_parameters()
        return sum(math.prod(compact_shape(name, parameter.shape, mask)) for name, parameter in parameters)

    def _arrivals(self, buffering: Buffering) -> dict[str, Any]:
        """How an asynchronous run went: how old the counted updates were, in versions, and whose they are."""
        history = self.learned.history
        ages = [age for facts in history for age in facts.staleness]
        who = Counter(client for facts in history for client, _ in facts.counted)
        return {
            **asdict(buffering),
            "versions": len(history),
            "staleness": {
                "mean": sum(ages) / len(ages),
                "largest": max(ages),
                "updates": {str(age): count for age, count in sorted(Counter(ages).items())},
            },
            "updates": {client: who[client] for client in sorted(self.learned.members)},
            "recalled": sum(facts.recalled for facts in history),
            "time": history[-1].time,
        }


def _page(result: Result, beside: Mapping[str, Result]) -> dict[str, Any]:
    """The summary for :func:`talaria.simulation.reporting.write_html`. Raises
    :class:`~talaria.errors.ConfigError` where ``beside`` has another algorithm than :data:`BASELINES`, or a run of
    other data or task."""
    run, masks = result.run, result.learned.masks
    if not isinstance(beside, Mapping):
        raise ConfigError(f"report: beside={shown(beside)} must hold results by the names of their algorithms")
    for name, other in beside.items():
        if name not in BASELINES:
            raise ConfigError(f"report: beside={shown(name)} is no baseline; use some of {', '.join(BASELINES)}")
        if not isinstance(other, Result) or other.run.algorithm != name:
            found = f"a run of {other.run.algorithm!r}" if isinstance(other, Result) else shown(other)
            raise ConfigError(f"report: beside[{name!r}] is {found}; give what simulate({name!r}, ...) came to")
        if other.asked["fingerprint"] != result.asked["fingerprint"] or other.run.task != run.task:
            raise ConfigError(f"report: beside[{name!r}] learned from other data; simulate it with the same")
    everyone = {"personal": result, **beside}
    whole = sum(value.numel() for value in run_model.template(run.spec).parameters())
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
        "overlap": mask_overlap(dict(islice(masks.items(), SHOWN))) if len(masks) > 1 else None,
    }
    up, down = result.learned.bytes_whole
    if up:  # beside all that FedAvg sends of this model, of which an algorithm may share a part alone
        share = run_model.dense_bytes(run) / run_model.dense_bytes(replace(run, algorithm="fedavg", hparams={}))
        out["upload_ratio"] = share * sum(result.learned.bytes_up.values()) / up
        if result.learned.bytes_down is not None:
            out["download_ratio"] = share * result.learned.bytes_down / down
    arrived = {_ARRIVED.get(method, method): one.newcomers for method, one in everyone.items()}
    known = {method: one for method, one in arrived.items() if one is not None}
    if result.newcomers is not None:
        for name in result.newcomers.clients:
            scores = {method: one.clients[name].accuracy for method, one in known.items()}
            users[name] = {"role": "newcomer", "accuracy": scores}
        out["newcomers"] = {"accuracy": {method: one.accuracy.mean for method, one in known.items()}}
    return out
