"""What a model is worth to each client, and what that says about all of them.

Figures are taken on test samples after a fixed number of rounds, over all clients. There is no "best round" here:
the maximum over rounds of a test accuracy is a number that no deployed system can reach.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

from talaria import tasks
from talaria.errors import DataError
from talaria.model.weights import Model
from talaria.tensors import Array
from talaria.training.batching import AT_ONCE
from talaria.training.engine import predict
from talaria.types import Samples


@dataclass(frozen=True)
class Metrics:
    """One client's result on ``samples`` labelled samples.

    ``accuracy``: share labelled right. ``macro_recall``: the mean over the labels that occur of the share of each
    that was found, so that a rare label counts as much as a frequent one. Both in 0..1. Of another task than
    classification they are its score and the figure beside it (:attr:`talaria.tasks.Goal.figures` names them); of
    both, more is better.
    """

    accuracy: float
    macro_recall: float
    samples: int


@dataclass(frozen=True)
class Summary:
    """A figure over all clients, in the units of the figure itself.

    ``weighted``: mean over samples. ``mean``: over clients. ``std``: over clients, of the population (ddof 0).
    ``worst``: the lowest. ``worst_tenth``: the mean of the lowest tenth of the clients, rounded up to whole ones.
    """

    weighted: float
    mean: float
    std: float
    worst: float
    worst_tenth: float


@dataclass(frozen=True)
class Report:
    """Every client's metrics, ordered by name, and their summaries."""

    clients: Mapping[str, Metrics]
    accuracy: Summary
    macro_recall: Summary
    task: str = tasks.CLASSIFICATION

    def to_json(self) -> str:
        """Canonical JSON: equal reports, equal text."""
        return json.dumps(self.as_dict(), sort_keys=True, separators=(",", ":"))

    def as_dict(self) -> dict[str, object]:
        """Plain dicts and numbers, as :meth:`to_json` writes them; of another task than classification also what
        ``accuracy`` and ``macro_recall`` stand for."""
        return told(self.task) | {
            "clients": {name: vars(metrics).copy() for name, metrics in self.clients.items()},
            "accuracy": vars(self.accuracy).copy(),
            "macro_recall": vars(self.macro_recall).copy(),
        }


def told(task: str) -> dict[str, object]:
    """What a file of figures says of their task: nothing of classification, else its name, and what ``accuracy`` and
    ``macro_recall`` stand for."""
    if tasks.of(task).name == tasks.CLASSIFICATION:
        return {}
    names = zip(("accuracy", "macro_recall"), tasks.of(task).figures, strict=True)
    return {"task": task, "figures": dict(names)}


def evaluate(model: Model, samples: Samples, batch: int = AT_ONCE, task: str = tasks.CLASSIFICATION) -> Metrics:
    """``model``'s metrics on ``samples`` in ``task``: in eval mode, without gradients; the model's modes are restored.

    Raises :class:`DataError` where there is no sample.
    """
    if not len(samples):
        raise DataError("evaluate: no sample to measure on; give at least one")
    return metrics_of(predict(model, samples.x, batch), samples.y, task)


def metrics_of(logits: Array, y: Array, task: str = tasks.CLASSIFICATION) -> Metrics:
    """The metrics of what a model gives, ``logits`` (N, classes) in classification, against targets ``y``."""
    return Metrics(*tasks.of(task).measured(logits, y), len(y))


def report(clients: Mapping[str, Metrics], task: str = tasks.CLASSIFICATION) -> Report:
    """The report over ``clients``. Raises :class:`DataError` where there is none."""
    if not clients:
        raise DataError("report: no client was measured; give at least one")
    ordered = dict(sorted(clients.items()))
    weights = [m.samples for m in ordered.values()]
    return Report(
        clients=ordered,
        accuracy=summarize([m.accuracy for m in ordered.values()], weights),
        macro_recall=summarize([m.macro_recall for m in ordered.values()], weights),
        task=task,
    )


def summarize(values: list[float], weights: list[int] | None = None) -> Summary:
    """The summary of ``values``, one per client, weighted by ``weights`` samples (default: equally)."""
    if not values:
        raise DataError("summarize: no value; give at least one")
    counts = [1] * len(values) if weights is None else weights
    mean = math.fsum(values) / len(values)
    tenth = sorted(values)[: math.ceil(len(values) / 10)]
    return Summary(
        weighted=math.fsum(v * n for v, n in zip(values, counts, strict=True)) / sum(counts),
        mean=mean,
        std=math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values)),
        worst=min(values),
        worst_tenth=math.fsum(tenth) / len(tenth),
    )
