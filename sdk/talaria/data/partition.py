"""Cuts one pool of labelled samples into clients. Same arguments, same cut.

Each function returns one int64 index array per client; no sample goes to two clients.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from talaria.errors import ConfigError
from talaria.tensors import Array

Indices = np.ndarray[Any, np.dtype[np.int64]]

_DRAWS = 100


def dirichlet(labels: Array, clients: int, alpha: float, seed: int = 0, min_samples: int = 1) -> list[Indices]:
    """Each label's samples dealt over the clients in shares drawn from Dirichlet(alpha); sizes differ freely.

    After Hsu, Qi and Brown 2019, arXiv:1909.06335, label by label as Yurochkin et al. 2019 do. A draw that
    leaves a client with fewer than ``min_samples`` is drawn again, up to 100 times; after that the largest
    clients give theirs away, at random.
    """
    most = len(labels) // max(1, min_samples)
    if not 1 <= clients <= most:
        raise ConfigError(f"partition: clients={clients} must be in 1..{most} for these samples")
    if not 0 < alpha < float("inf"):
        raise ConfigError(f"partition: alpha={alpha} must be finite and above 0 (0.1 is skewed, 100 nearly even)")
    if min_samples < 1:
        raise ConfigError(f"dirichlet: min_samples={min_samples} must be at least 1")
    rng = np.random.default_rng(seed)
    for _ in range(_DRAWS):
        parts = _dealt(labels, rng.dirichlet(np.full(clients, alpha), size=len(np.unique(labels))), rng)
        if min(map(len, parts)) >= min_samples:
            break
    while min(map(len, parts)) < min_samples:
        poor, rich = int(np.argmin([len(p) for p in parts])), int(np.argmax([len(p) for p in parts]))
        taken = rng.choice(len(parts[rich]), size=min_samples - len(parts[poor]), replace=False)
        taken = taken[: len(parts[rich]) - min_samples]
        parts[poor] = np.append(parts[poor], parts[rich][taken])
        parts[rich] = np.delete(parts[rich], taken)
    return [np.sort(part) for part in parts]


def even(count: int, clients: int, seed: int = 0) -> list[Indices]:
    """``count`` samples dealt at random, to each client as many as to any other or one more."""
    if not 1 <= clients <= count:
        raise ConfigError(f"partition: clients={clients} must be in 1..{count} for these samples")
    return [np.sort(part) for part in np.array_split(np.random.default_rng(seed).permutation(count), clients)]


def mixed(labels: Array, mixes: Array, size: int, seed: int = 0) -> list[Indices]:
    """``size`` samples for each client, drawn without replacement so that labels follow its row of ``mixes``.

    ``labels`` are 0..C-1 and ``mixes`` is float (clients, C), each row a distribution. Where a label runs out, the
    row's other labels fill in, then any. Each index is in the order of drawing: a prefix has the same mix.
    """
    clients, classes = mixes.shape
    if clients * size > len(labels):
        raise ConfigError(f"mixed: {clients} clients x {size} samples exceed the {len(labels)} there are; ask for less")
    rng = np.random.default_rng(seed)
    pools = [list(rng.permutation(np.flatnonzero(labels == c))) for c in range(classes)]
    out = []
    for mix in mixes:
        taken: list[int] = []
        while len(taken) < size:
            left = np.array([len(pool) for pool in pools], dtype=np.float64)
            weight = np.where(left > 0, mix, 0.0)
            weight = weight if weight.sum() > 0 else left
            for label in rng.choice(classes, size=size - len(taken), p=weight / weight.sum()):
                if pools[label]:
                    taken.append(int(pools[label].pop()))
        out.append(np.array(taken, dtype=np.int64))
    return out


def mixes_of(labels: Array, parts: Sequence[Indices], classes: int) -> Array:
    """The label distribution of each part: float64 (clients, classes), each row sums to 1."""
    counts = np.stack([np.bincount(labels[part], minlength=classes) for part in parts]).astype(np.float64)
    return np.asarray(counts / counts.sum(1, keepdims=True))


def spread(count: int, picked: int) -> Indices:
    """``picked`` positions spread evenly over ``0..count-1``: on a list sorted by label, a stratified choice."""
    return (2 * np.arange(picked, dtype=np.int64) + 1) * count // (2 * max(picked, 1))


def stratified(labels: Array, val: float, test: float, rng: np.random.Generator) -> tuple[Indices, Indices, Indices]:
    """``(train, val, test)`` positions of one client's samples, ascending, about the same share of each label.

    At least one sample tests and one trains, so two are needed; a client too small for its share of validation
    has none.
    """
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    tested = spread(len(order), min(max(1, round(test * len(order))), len(order) - 1) if test else 0)
    rest = np.delete(order, tested)
    checked = spread(len(rest), min(round(val * len(order)), len(rest) - 1))
    return np.sort(np.delete(rest, checked)), np.sort(rest[checked]), np.sort(order[tested])


def _dealt(labels: Array, shares: Array, rng: np.random.Generator) -> list[Indices]:
    parts: list[list[Indices]] = [[] for _ in range(shares.shape[1])]
    for name, share in zip(np.unique(labels), shares, strict=True):
        own = rng.permutation(np.flatnonzero(labels == name))
        ends = np.rint(np.cumsum(share)[:-1] * len(own)).astype(np.int64)
        for part, piece in zip(parts, np.split(own, ends), strict=True):
            part.append(piece)
    return [np.concatenate(pieces) for pieces in parts]
