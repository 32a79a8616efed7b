"""Latency of a pruned model on this device: fitted on a few whole-model probes, because a sum of layers misses.

Probes are the exported model at a handful of widths, timed side by side. Their CPU time is explained by what the
layers compute and move (:data:`~talaria.planning.anatomy.FEATURES`), with coefficients that cannot be negative.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from statistics import mean

import torch
from torch import Tensor
from torch.nn import Module

from talaria import seeds
from talaria.errors import ConfigError, ModelError
from talaria.model import zoo
from talaria.model.compaction import compact
from talaria.model.spec import ModelSpec
from talaria.model.widths import first_of, whole
from talaria.planning import cpu_timer
from talaria.planning.anatomy import Anatomy, Widths
from talaria.planning.cost import DRIFT, Cost, changed, milliseconds
from talaria.planning.layer_stats import anatomy
from talaria.planning.onnx_runtime import Exporter, Graph, Resizer, caller, exporter

__all__ = [
    "BURST",
    "DRIFT",
    "PROBES",
    "ROUNDS",
    "SECONDS",
    "SESSIONS",
    "Cost",
    "changed",
    "explained",
    "fit",
    "lively",
    "measure",
    "milliseconds",
    "randomly",
    "samples",
    "side_by_side",
]

PROBES = 15
"""Most whole-model probes per family."""

ROUNDS = 400
"""Most bursts per probe."""
BURST = 3e-3
"""Seconds of CPU time that a burst aims at."""
SECONDS = 8.0
"""CPU time after which measuring ends."""

SESSIONS = 2
"""Times that each probe is loaded: where its buffers happen to lie in memory moves its speed by some percent."""


def measure(spec: ModelSpec, block: int = 8, *, export: Exporter | None = None, probes: int = PROBES) -> Cost:
    """The cost of a model's family, measured here and now: one export, then ``probes`` models side by side.

    Where the exported graph does not show whose weights are whose (a linear layer along a sequence, a reshape of more
    than rows, as networks of somebody else's have them), each probe is pruned and exported by itself.

    Raises :class:`~talaria.errors.ConfigError` where no exporter or no ONNX Runtime is installed.
    """
    family = zoo.plain(spec)
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
        {g: whole(parts.layout, g, keep * n, block) for g, n in full.items()} for keep in (1e-6, 0.75, 0.5, 0.25)
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
        widths[group] = whole(parts.layout, group, min(1.0, own) * size, block)
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
    constants = sum(t.ByteSize() for t in graph.proto.graph.initializer)
    size = graph.proto.ByteSize() - constants + 64 * len(graph.tensors)
    return Cost.of(graph.anatomy, widths, measured, block, size, seconds, noise)


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


def lively(model: Module) -> Module:
    """``model`` in eval mode with BatchNorm statistics as after training, so that no bias is folded away as zero."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    return model.eval()
