"""What the folds come to: each person's way chosen by the other subjects, means, worst tenths, intervals."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from talaria_bench.people.studies import METHODS

DRAWS, SHARE = 10_000, 0.95
"""Bootstrap draws of the subjects, and how much of them an interval holds."""

Row = Mapping[str, Any]


def chosen(rows: Sequence[Row]) -> list[Row]:
    """Of each method, amount and subject the rows of the way that gave the *other* subjects the best mean score (of
    equal ones the first): what a person's own test windows say decides nothing for that person."""
    means: dict[tuple[str, str], dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    grouped: dict[tuple[str, str, str, str], list[float]] = defaultdict(list)
    for row in rows:
        grouped[row["method"], row["amount"], row["way"], row["subject"]].append(row["scores"][0])
    for (method, amount, way, subject), scores in grouped.items():
        means[method, amount][way][subject] = float(np.mean(scores))
    best: dict[tuple[str, str, str], str] = {}
    for (method, amount), ways in means.items():
        for subject in next(iter(ways.values())):
            others = {w: float(np.mean([v for s, v in of.items() if s != subject] or [0])) for w, of in ways.items()}
            best[method, amount, subject] = max(others, key=others.__getitem__)
    return [row for row in rows if best[row["method"], row["amount"], row["subject"]] == row["way"]]


def told(rows: Sequence[Row]) -> dict[str, Any]:
    """By amount: ``labels`` of a person on average, and by method ``mean`` and ``interval`` over subjects, ``beside``
    (the task's second figure), ``worst_tenth`` (the lowest tenth of the persons at each seed, averaged), ``worst``
    (the lowest person over the seeds), ``parameters``, ``ways`` (how many rows had each), and by other method
    ``above`` (the personal model's gain with its interval)."""
    kept = chosen(rows)
    amounts = list(dict.fromkeys(row["amount"] for row in rows))
    return {amount: _amount([row for row in kept if row["amount"] == amount]) for amount in amounts}


def _amount(rows: Sequence[Row]) -> dict[str, Any]:
    by_method = {name: [row for row in rows if row["method"] == name] for name in METHODS}
    subjects = sorted({row["subject"] for row in rows})
    scores = {
        name: np.array([np.mean([row["scores"][0] for row in own if row["subject"] == one]) for one in subjects])
        for name, own in by_method.items()
        if own
    }
    methods = {}
    for name, values in scores.items():
        own = by_method[name]
        seeds = sorted({row["seed"] for row in own})
        methods[name] = {
            "mean": float(values.mean()),
            "interval": interval(values),
            "beside": float(np.mean([row["scores"][1] for row in own])),
            "worst_tenth": float(np.mean([_worst_tenth(own, seed) for seed in seeds])),
            "worst": min(
                float(np.mean([row["scores"][0] for row in own if row["person"] == person]))
                for person in {row["person"] for row in own}
            ),
            "parameters": float(np.mean([row["parameters"] for row in own])),
            "ways": {way: sum(row["way"] == way for row in own) for way in sorted({row["way"] for row in own})},
        }
    return {
        "labels": float(np.mean([row["labels"] for row in rows])),
        "subjects": len(subjects),
        "methods": methods,
        "above": {
            name: {
                "mean": float((scores["personal"] - values).mean()),
                "interval": interval(scores["personal"] - values),
            }
            for name, values in scores.items()
            if name != "personal" and "personal" in scores
        },
    }


def _worst_tenth(rows: Sequence[Row], seed: int) -> float:
    scores = sorted(row["scores"][0] for row in rows if row["seed"] == seed)
    return float(np.mean(scores[: math.ceil(len(scores) / 10)]))


def interval(values: np.ndarray[Any, np.dtype[Any]]) -> list[float]:
    """The percentile interval of the mean, with whole subjects drawn anew (:data:`DRAWS` times, by a fixed seed)."""
    draws = np.random.default_rng(0).integers(0, len(values), (DRAWS, len(values)))
    low, high = np.quantile(values[draws].mean(1), [(1 - SHARE) / 2, (1 + SHARE) / 2])
    return [float(low), float(high)]
