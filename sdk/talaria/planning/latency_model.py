"""Latency of a pruned model on this device: fitted on a few whole-model probes, because a sum of layers misses.

Probes are the exported model at a handful of widths, timed side by side. Their CPU time is explained by what the
layers compute and move (:data:`~talaria.planning.layer_stats.FEATURES`), with coefficients that cannot be negative.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from talaria import seeds
from talaria.errors import ConfigError, ModelError
from talaria.model import zoo
from talaria.model.compaction import compact
from talaria.model.pruning import aligned
from talaria.model.spec import ModelSpec
from talaria.model.widths import first_of
from talaria.planning import cpu_timer
from talaria.planning.layer_stats import FEATURES, Anatomy, Widths, anatomy
from talaria.planning.onnx_runtime import Exporter, Graph, Resizer, caller, exporter

PROBES = 15
"""Most whole-model probes per family."""

ROUNDS = 400
"""Most bursts per probe."""
BURST = 3e-3
"""Seconds of CPU time that a burst aims at."""
SECONDS = 8.0
"""CPU time after which measuring ends."""

DRIFT = 0.03
"""How much a model's time, as a share of the unpruned one's, changes on a quiet machine from minute to minute, as seen.
Beside busy neighbours it changes more; then what was measured counts."""

MOST_SPARE = 0.25
"""The most that is kept in hand: on a machine that changes more than that, no plan is worth its prediction."""

SESSIONS = 2
"""Times that each probe is loaded: where its buffers happen to lie in memory moves its speed by some percent."""

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Cost:
    """The latency model of one family on one device.

    ``milliseconds[i]`` is the price of feature ``i``; ``error`` the root mean square, over the probes, of the relative
    error of a fit that did not see the probe; ``graph_bytes`` the size of the exported file without its weights;
    ``block`` what widths are rounded up to, as this device computes them. ``noise`` is how much the probes' times, as
    shares of the unpruned model's, changed while they were measured (:func:`changed`).
    """

    milliseconds: tuple[float, ...]
    dense_ms: float
    error: float
    block: int
    graph_bytes: int
    probes: int
    seconds: float
    noise: float = 0.0

    def __post_init__(self) -> None:
        if len(self.milliseconds) != len(FEATURES) or min(self.milliseconds) < 0 or not self.dense_ms > 0:
            raise ConfigError(f"cost: need {len(FEATURES)} prices that are not negative and dense_ms above 0")
        if not 0 <= self.noise < float("inf"):
            raise ConfigError(f"cost: noise={self.noise} must be a number from 0")

    @property
    def margin(self) -> float:
        """The share of latency to keep in hand, so that a planned model keeps its limit when it is measured."""
        return min(MOST_SPARE, self.drift + 2 * self.error)

    @property
    def drift(self) -> float:
        """How much times are expected to change until a plan is checked: twice what they changed while they were
        measured, at least :data:`DRIFT`."""
        return max(DRIFT, 2 * self.noise)

    @property
    def why_margin(self) -> str:
        """What :attr:`margin` is and what it is for, in words."""
        if self.drift + 2 * self.error > MOST_SPARE:
            held = f"{self.margin:.1%} to spare, the most that is kept"
        else:
            held = (
                f"{self.margin:.1%} to spare ({2 * self.error:.1%} for what the prediction may miss, {self.drift:.1%} "
            )
            held += "for what this machine may change)"
        if self.drift > DRIFT:
            held += f", because times changed by {self.noise:.1%} while they were measured: the machine is busy"
        return held

    def latency_ms(self, parts: Anatomy, widths: Widths) -> float:
        """CPU milliseconds for one input on one core."""
        found = zip(parts.features(widths, self.block), self.milliseconds, strict=True)
        return sum(amount * price for amount, price in found)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; :meth:`from_json` is the inverse."""
        return {**vars(self), "milliseconds": dict(zip(FEATURES, self.milliseconds, strict=True))}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Cost:
        """What :meth:`to_json` wrote. Raises :class:`~talaria.errors.ConfigError` for anything else."""
        try:
            prices = data["milliseconds"]
            return cls(**{**data, "milliseconds": tuple(float(prices[name]) for name in FEATURES)})
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"cost: not a measured cost ({error}); measure this family again") from None


def plain(spec: ModelSpec) -> ModelSpec:
    """The family whose latency a spec shares: adapters merge away, and neither seed nor weights matter."""
    return replace(spec, adapters=None, seed=0, pretrained=False)


def measure(spec: ModelSpec, block: int = 8, *, export: Exporter | None = None, probes: int = PROBES) -> Cost:
    """The cost of a model's family, measured here and now: one export, then ``probes`` models side by side.

    Where the exported graph does not show whose weights are whose (a linear layer along a sequence, a reshape of more
    than rows, as networks of somebody else's have them), each probe is pruned and exported by itself.

    Raises :class:`~talaria.errors.ConfigError` where no exporter or no ONNX Runtime is installed.
    """
    family = plain(spec)
    parts = anatomy(family)
    model, write = lively(zoo.build(family)), export or exporter()
    file = write(model, zoo.example(family, 2))

    @cache
    def pruned(kept: tuple[tuple[str, int], ...]) -> bytes:
        return write(compact(model, first_of(parts.layout, dict(kept))), zoo.example(family, 2))

    def again(widths: Widths) -> bytes:
        return pruned(tuple(sorted(widths.items())))

    return fit(parts, file, zoo.example(family), samples(parts, probes, block), block, again=again)


def samples(parts: Anatomy, count: int, block: int, seed: int = 0) -> list[dict[str, int]]:
    """Widths to probe: dense, the smallest, even cuts, and random ones in whole blocks. The same ones every time."""
    full = parts.full()
    chosen = [full] + [
        {g: min(n, aligned(keep * n, block)) for g, n in full.items()} for keep in (1e-6, 0.75, 0.5, 0.25)
    ]
    generator = seeds.generator(seed, "device", 0, "probes")
    while len(chosen) < count:
        share = 0.1 + 0.9 * float(torch.rand((), generator=generator))
        chosen.append(randomly(parts, block, share, generator))
    return chosen[:count]


def randomly(parts: Anatomy, block: int, share: float, generator: torch.Generator) -> dict[str, int]:
    """Widths in whole blocks around ``share`` of the channels, each group on its own."""
    widths = {}
    for group, size in parts.layout.sizes.items():
        own = share * (0.5 + float(torch.rand((), generator=generator)))
        widths[group] = min(size, aligned(min(1.0, own) * size, block))
    return widths


def fit(
    parts: Anatomy,
    file: bytes,
    example: Tensor,
    widths: Sequence[Widths],
    block: int,
    rounds: int = ROUNDS,
    *,
    again: Callable[[Widths], bytes] | None = None,
) -> Cost:
    """Time the exported ``file`` at each of ``widths`` (the first is the unpruned model) and explain the times.

    ``again`` exports the model at other widths, for a ``file`` that cannot be resized as it is.
    """
    graph = Graph(file, parts)
    try:
        at: Callable[[Widths], bytes] = Resizer(file, parts).at
    except ModelError:
        if again is None:
            raise
        at = again
    took, seconds = side_by_side({str(i): at(w) for i, w in enumerate(widths)}, example, rounds)
    return explained(graph, widths, list(milliseconds(took).values()), block, seconds, changed(took))


def explained(
    graph: Graph,
    widths: Sequence[Widths],
    measured: Sequence[float],
    block: int,
    seconds: float,
    noise: float = 0.0,
) -> Cost:
    """The latency model that explains the milliseconds ``measured`` at each of ``widths``, in ``seconds`` in all, while
    they changed by ``noise``."""
    parts = graph.anatomy
    rows = np.array([parts.features(w, block) for w in widths])
    taken = np.array(measured)
    prices = _prices(rows, taken)
    constants = sum(t.ByteSize() for t in graph.proto.graph.initializer)
    return Cost(
        milliseconds=tuple(float(p) for p in prices),
        dense_ms=float(taken[0]),
        error=_unseen_error(rows, taken),
        block=block,
        graph_bytes=graph.proto.ByteSize() - constants + 64 * len(graph.tensors),
        probes=len(widths),
        seconds=seconds,
        noise=noise,
    )


def side_by_side(
    files: Mapping[str, bytes],
    example: Tensor,
    rounds: int = ROUNDS,
    limit: float | None = None,
    *,
    burst: float = BURST,
    warm: int = cpu_timer.WARM_CALLS,
) -> tuple[dict[str, list[float]], float]:
    """CPU seconds per input of each file in each round of bursts, and the CPU seconds that finding out took.

    No round of bursts begins after ``limit`` seconds (:data:`SECONDS` where it is None); loading comes on top.
    ``burst`` and ``warm`` are those of :func:`~talaria.planning.cpu_timer.interleaved`.
    """
    if len(files) < 1:
        raise ConfigError("nothing to time; give at least one exported model")
    begin = time.thread_time()
    x = example.numpy()
    calls = {(n, i): caller(f, x) for n, f in files.items() for i in range(SESSIONS)}
    took = cpu_timer.interleaved(
        {f"{i} {name}": call for (name, i), call in calls.items()},
        max(3, rounds // SESSIONS),
        burst,
        SECONDS if limit is None else limit,
        warm,
    )
    each = {n: [mean(t) for t in zip(*(took[f"{i} {n}"] for i in range(SESSIONS)), strict=True)] for n in files}
    return each, time.thread_time() - begin


def milliseconds(took: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Milliseconds of each file, from the seconds that it ``took`` in each round.

    Times are ratios to the first file within each round, times its median: drift of the machine cancels out.
    """
    base = took[next(iter(took))]
    return {name: 1e3 * median(base) * _share(own, base) for name, own in took.items()}


def changed(took: Mapping[str, Sequence[float]]) -> float:
    """How much the files' times, as shares of the first one's, changed from the first half of the rounds to the second:
    the root mean square over the files of the relative change. 0 where there is nothing to compare."""
    first, *others = took
    base = took[first]
    half = len(base) // 2
    if not others or not half:
        return 0.0
    moved = [_share(took[n][half:], base[half:]) / _share(took[n][:half], base[:half]) - 1 for n in others]
    return float(np.sqrt(np.mean(np.square(moved))))


def _share(own: Sequence[float], base: Sequence[float]) -> float:
    """The median, over the rounds, of one file's time to the first one's."""
    return median(a / b for a, b in zip(own, base, strict=True))


def lively(model: Module) -> Module:
    """``model`` in eval mode with BatchNorm statistics as after training, so that no bias is folded away as zero."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    return model.eval()


def _prices(rows: Array, taken: Array) -> Array:
    """Coefficients, none negative, with the least squared relative error (Lawson and Hanson 1974, chapter 23)."""
    A = rows / taken[:, None]
    scale = np.maximum(np.abs(A).max(0), 1e-12)
    A = A / scale
    goal = np.ones(len(A))
    x = np.zeros(A.shape[1])
    used: list[int] = []
    for _ in range(3 * A.shape[1]):
        slope = A.T @ (goal - A @ x)
        free = [j for j in range(len(x)) if j not in used and slope[j] > 1e-10]
        if not free:
            break
        used.append(max(free, key=lambda j: slope[j]))
        while True:
            best = np.linalg.lstsq(A[:, used], goal, rcond=None)[0]
            if best.min() > 0:
                break
            # Go towards the free solution until the first coefficient reaches zero, and leave that one out.
            now = x[used]
            short = [i for i in range(len(used)) if best[i] <= 0]
            reach = min(now[i] / (now[i] - best[i]) if now[i] > best[i] else 0.0 for i in short)
            x[used] = now + reach * (best - now)
            gone = [j for i, j in enumerate(used) if x[j] <= 1e-12]
            x[gone] = 0.0
            used = [j for j in used if j not in gone]
        x[:] = 0.0
        x[used] = best
    return np.asarray(x / scale)


def _unseen_error(rows: Array, taken: Array) -> float:
    """Root mean square of the relative error at each probe, from the fit to all others."""
    if len(rows) < 3:
        raise ModelError(f"cost: {len(rows)} probes cannot tell a price from noise; give at least 3")
    missed = []
    for i in range(len(rows)):
        others = np.arange(len(rows)) != i
        missed.append(float(rows[i] @ _prices(rows[others], taken[others]) / taken[i] - 1))
    return float(np.sqrt(np.mean(np.square(missed))))
