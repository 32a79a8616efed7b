"""``talaria bench aggregation``: the mask-aware mean beside the obvious ways to write it, in one run.

A ResNet-18-like state of about 9 million values, random private 50 % channel masks (a quarter of a kernel is kept),
16 clients. Compared with it: stack, multiply with float masks, sum and divide, in numpy and in torch, as published
code has it. Both are given dense zero-filled values and dense masks for free and sum in float32, while ours starts
from compact tensors, checks them, and sums in float64. The limit is the memory's: what the clients sent, read once, and
the new model, written once, with nothing computed. CPU time of the calling thread, one thread, candidates
interleaved in alternating order, median of per-round ratios; all results are held to a dense float64 reference first.
"""

from __future__ import annotations

import json
import math
import platform
import statistics
import time
import tracemalloc
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from talaria.aggregate.loops import loops_for
from talaria.aggregate.masked import MaskedMean
from talaria.model import masks
from talaria.model.masks import Axis, ChannelLayout, ChannelMask
from talaria.model.state import to_arrays, to_torch
from talaria.tensors import Array, Tensors
from talaria.types import Update
from talaria_bench import bars

WIDTHS = (64, 128, 256, 512)


def network(scale: float) -> tuple[Tensors, ChannelLayout]:
    """Two kernels per residual stage and a linear head, with their channel groups."""
    widths = [max(8, round(w * scale)) for w in WIDTHS]
    rng = np.random.default_rng(0)
    shared: Tensors = {}
    axes: dict[str, tuple[Axis, ...]] = {}
    sizes: dict[str, int] = {}
    before, group_before = 3, ""
    for stage, width in enumerate(widths):
        for layer in range(4 if stage < 3 else 3):
            name, group = f"s{stage}.{layer}", f"g{stage}.{layer}"
            sizes[group] = width
            shared[f"{name}.weight"] = normal(rng, width, before, 3, 3)
            axes[f"{name}.weight"] = (((group, 1),), ((group_before, 1),) if group_before else (), (), ())
            for part in ("bn.weight", "bn.bias"):
                shared[f"{name}.{part}"] = normal(rng, width)
                axes[f"{name}.{part}"] = (((group, 1),),)
            before, group_before = width, group
    shared["fc.weight"], shared["fc.bias"] = normal(rng, 100, before), normal(rng, 100)
    axes["fc.weight"] = ((), ((group_before, 1),))
    return shared, ChannelLayout(sizes, axes)


def normal(rng: np.random.Generator, *shape: int) -> Array:
    """Standard normal float32 values."""
    return rng.standard_normal(shape, np.float32)


def cohort(shared: Tensors, layout: ChannelLayout, clients: int, tiers: int, keep: float) -> list[Update]:
    """Updates under random channel masks, one mask per tier."""
    rng = np.random.default_rng(1)
    drawn = []
    for _ in range(tiers):
        kept = {
            g: np.sort(rng.choice(n, max(1, int(n * keep)), replace=False)).tolist() for g, n in layout.sizes.items()
        }
        drawn.append(ChannelMask(layout, {g: tuple(k) for g, k in kept.items()}))
    out = []
    for i in range(clients):
        mask = drawn[i % tiers]
        compact = {k: normal(rng, *v.shape) for k, v in masks.gather(shared, mask).items()}
        out.append(Update(compact, weight=float(100 + i), client=f"c{i:02d}", mask=mask))
    return out


def expand(shared: Tensors, updates: list[Update]) -> list[tuple[Tensors, Tensors]]:
    """What the other two are given for free: each client's dense zero-filled values and dense float mask."""
    out = []
    for update in updates:
        assert update.mask is not None
        zero = {k: np.zeros_like(v) for k, v in shared.items()}
        ones = {k: np.ones_like(v) for k, v in update.tensors.items()}
        out.append((masks.scatter(update.tensors, update.mask, zero), masks.scatter(ones, update.mask, zero)))
    return out


Dense = dict[str, torch.Tensor]


def naive_torch(shared: Dense, dense: list[tuple[Dense, Dense]], weights: list[float]) -> Dense:
    """Layer by layer: stack values and full masks, multiply, sum, divide."""
    out = {}
    for name, old in shared.items():
        weight = torch.tensor(weights).view(-1, *[1] * old.dim())
        mask = torch.stack([m[name] for _, m in dense]) * weight
        total = (torch.stack([v[name] for v, _ in dense]) * mask).sum(0)
        count = mask.sum(0)
        out[name] = torch.where(count > 0, total / count.clamp(min=1e-12), old)
    return out


def naive_numpy(shared: Tensors, dense: list[tuple[Tensors, Tensors]], weights: list[float]) -> Tensors:
    """The same in numpy."""
    out = {}
    for name, old in shared.items():
        weight = np.array(weights, np.float32).reshape(-1, *[1] * old.ndim)
        mask = np.stack([m[name] for _, m in dense]) * weight
        total = (np.stack([v[name] for v, _ in dense]) * mask).sum(0)
        count = mask.sum(0)
        out[name] = np.where(count > 0, total / np.maximum(count, 1e-12), old)
    return out


def reference(shared: Tensors, dense: list[tuple[Tensors, Tensors]], weights: list[float]) -> Tensors:
    """The dense sums in float64, client after client."""
    out = {}
    for name, old in shared.items():
        total, count = np.zeros(old.shape), np.zeros(old.shape)
        for (values, kept), weight in zip(dense, weights, strict=True):
            total += values[name] * np.float64(weight)
            count += kept[name] * np.float64(weight)
        out[name] = np.where(count > 0, total / np.maximum(count, 1e-12), old)
    return out


def memory_pass(shared: Tensors, updates: list[Update]) -> list[Array]:
    """Every value that was sent is copied once into a cache's worth of memory; a new model is written."""
    cache = np.empty(1 << 16, np.float32)
    for update in updates:
        for value in update.tensors.values():
            flat = value.reshape(-1)
            for start in range(0, len(flat), len(cache)):
                part = flat[start : start + len(cache)]
                cache[: len(part)] = part
    return [np.full(v.shape, 1, v.dtype) for v in shared.values()]


def cpu_ms(run: Callable[[], object]) -> float:
    """Milliseconds of the calling thread's CPU time."""
    start = time.thread_time()
    run()
    return (time.thread_time() - start) * 1e3


def furthest(a: Tensors, b: Tensors) -> float:
    """The largest difference of two states; infinite where one has other tensors, or what is no number."""
    if a.keys() != b.keys():
        return math.inf
    return float(np.nan_to_num(np.max([np.abs(a[k] - b[k]).max() for k in a]), nan=math.inf))


def peak_mib(run: Callable[[], object]) -> float:
    """The most memory that ``run`` held at once, its result included and its inputs not, in MiB."""
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1] / 2**20
    finally:
        tracemalloc.stop()


def measure(clients: int, tiers: int, scale: float, rounds: int, keep: float) -> dict[str, Any]:
    """Milliseconds, ratios, differences and memory of one setting."""
    typer.echo(f"{clients} clients, {tiers} masks, rounds: {rounds}", err=True)
    shared, layout = network(scale)
    updates = cohort(shared, layout, clients, tiers, keep)
    dense, weights = expand(shared, updates), [u.weight for u in updates]
    same, wide = to_torch(shared), [(to_torch(values), to_torch(kept)) for values, kept in dense]
    candidates: dict[str, Callable[[], Any]] = {
        "ours": lambda: MaskedMean().apply(shared, {}, updates)[0],
        "naive_numpy": lambda: naive_numpy(shared, dense, weights),
        "naive_torch": lambda: naive_torch(same, wide, weights),
    }
    exact = reference(shared, dense, weights)
    gaps = {
        name: furthest(to_arrays(run()) if name == "naive_torch" else run(), exact) for name, run in candidates.items()
    }
    # Ours rounds once, to float32; the others round in each of their sums.
    unit = float(np.finfo(np.float32).eps) * max(float(np.abs(v).max()) for v in exact.values())
    if gaps["ours"] > unit or max(gaps.values()) > 4 * clients * unit:
        raise AssertionError(f"results differ from the dense float64 reference by {gaps}")
    del exact
    peaks = {name: peak_mib(run) for name, run in candidates.items() if name != "naive_torch"}
    candidates["memory_pass"] = lambda: memory_pass(shared, updates)
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(rounds):
        order = list(candidates) if number % 2 == 0 else list(candidates)[::-1]
        for name in order:
            times[name].append(cpu_ms(candidates[name]))
    return {
        "clients": clients,
        "masks": tiers,
        "values": sum(v.size for v in shared.values()),
        "kept": sum(v.size for v in updates[0].tensors.values()),
        "ms": {name: round_to(statistics.median(t)) for name, t in times.items()},
        "faster_than": {
            name: round_to(statistics.median(n / o for n, o in zip(times[name], times["ours"], strict=True)))
            for name in candidates
            if name.startswith("naive")
        },
        "memory_passes": round_to(
            statistics.median(o / n for n, o in zip(times["memory_pass"], times["ours"], strict=True))
        ),
        "largest_difference": {name: round_to(gap) for name, gap in gaps.items()},
        "peak_mib": {name: round_to(peak) for name, peak in peaks.items()},
    }


def round_to(value: float) -> float:
    """Three digits."""
    return float(f"{value:.3g}")


def aggregation(
    clients: Annotated[int, typer.Option(help="Clients of a fold.", min=1)] = 16,
    rounds: Annotated[int, typer.Option(help="Rounds in which all candidates run side by side.", min=1)] = 7,
    keep: Annotated[float, typer.Option(help="Kept part of each channel group.", min=0.01, max=1)] = 0.5,
    scale: Annotated[float, typer.Option(help="Width of the network; 1 is about 9 million values.", min=0.01)] = 1.0,
    plot: Annotated[Path | None, typer.Option(help="Draw CPU times here, as SVG.", callback=bars.place)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all figures as JSON.")] = False,
) -> None:
    """Measure the mean under masks beside naive numpy and naive torch: thread CPU time, one thread, interleaved.

    Once with a mask of its own for each client, and, of more than four, once with four masks for all. The inner loops
    are compiled where numba is installed (`talaria[fast]`), and numpy's otherwise; the output says which.
    """
    torch.set_num_threads(1)
    found = [measure(clients, tiers, scale, rounds, keep) for tiers in sorted({clients, min(clients, 4)}, reverse=True)]
    if plot is not None:
        bars.draw({f"{one['masks']} masks": one["ms"] for one in found}, "CPU ms of a fold", plot)
    which = type(loops_for(found[0]["values"])).__name__.lower()
    versions = {"numpy": np.__version__, "torch": torch.__version__, "machine": platform.machine(), "loops": which}
    if find_spec("numba") is not None:
        versions["numba"] = version("numba")
    if as_json:
        typer.echo(json.dumps({**versions, "settings": found}, indent=1))
        return
    typer.echo(f"loops: {which}")
    for setting in found:
        kept = f"{setting['kept']} of {setting['values']} values kept"
        typer.echo(f"{setting['clients']} clients, {setting['masks']} masks, {kept}")
        typer.echo(f"  CPU ms       {setting['ms']}")
        typer.echo(f"  times faster {setting['faster_than']}; {setting['memory_passes']} passes over the memory")
        typer.echo(f"  peak MiB     {setting['peak_mib']}")
