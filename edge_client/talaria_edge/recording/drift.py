"""How far a device's samples have moved since its first day, as two numbers that hold no sample and no label."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from talaria import durable
from talaria.tensors import Array

DAY_S = 86400.0
FILE = ".first_day.json"
LARGEST = 1 << 20
FURTHEST = 1e6


@dataclass(frozen=True)
class Shape:
    """What is remembered of a day: the share of each label, and each feature's mean and spread.

    A feature is a place along a sample's first axis (a channel of a window, a column of a table).
    """

    labels: Mapping[str, float]
    mean: tuple[float, ...]
    spread: tuple[float, ...]


def shape_of(samples: Iterable[Array], y: Array) -> Shape:
    """Of ``samples``, arrays float32 (N, ...) of equal shape but for N, with one sample at least in all, and the labels
    ``y`` (M,) of some of them; labels that are no classes are left out."""
    names, counts = np.unique(y, return_counts=True) if y.ndim == 1 and y.dtype.kind == "i" else (y[:0], y[:0])
    shares = {str(name): float(count / len(y)) for name, count in zip(names, counts, strict=True)}
    count, sums, squares = 0, np.zeros(()), np.zeros(())
    for x in samples:
        axes = tuple(axis for axis in range(x.ndim) if axis != 1)
        count += x.size // x.shape[1]
        sums = sums + x.sum(axes, dtype=np.float64)
        squares = squares + np.square(x, dtype=np.float64).sum(axes)
    mean = sums / count
    spread = np.sqrt(np.maximum(squares / count - mean**2, 0))
    return Shape(shares, tuple(np.atleast_1d(mean).tolist()), tuple(np.atleast_1d(spread).tolist()))


def between(first: Shape, now: Shape) -> dict[str, float]:
    """``drift.labels``: half the sum of what the shares of labels differ by, from 0 to 1. ``drift.features``: by how
    many of its first day's spreads a feature's mean has moved, averaged over features."""
    told = {}
    if first.labels and now.labels:
        names = {*first.labels, *now.labels}
        told["drift.labels"] = sum(abs(first.labels.get(n, 0.0) - now.labels.get(n, 0.0)) for n in names) / 2
    if len(first.mean) == len(now.mean):
        steps = [
            abs(new - old) / max(spread, 1e-6)
            for old, new, spread in zip(first.mean, now.mean, first.spread, strict=True)
        ]
        told["drift.features"] = min(sum(steps) / max(len(steps), 1), FURTHEST)
    return told


def read(folder: Path) -> Shape | None:
    """The first day that ``folder`` remembers; None where there is none yet, or it cannot be read."""
    try:
        with (folder / FILE).open("rb") as file:
            found = json.loads(file.read(LARGEST))
        labels = {str(name): float(share) for name, share in found["labels"].items()}
        made = Shape(labels, *(tuple(float(v) for v in found[name]) for name in ("mean", "spread")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    numbers = [*made.labels.values(), *made.mean, *made.spread]
    return made if len(made.mean) == len(made.spread) and all(map(math.isfinite, numbers)) else None


def remember(folder: Path, first: Shape) -> None:
    """Keep the first day. Raises OSError."""
    data = json.dumps(asdict(first)).encode()
    if len(data) <= LARGEST:
        durable.write(folder / FILE, data)
