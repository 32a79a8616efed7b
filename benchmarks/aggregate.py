"""How much faster is the mask-aware mean than the obvious ways to write it?

A ResNet-18-like state of about 9 million values, random private 50 % channel masks (a quarter of a kernel is kept),
16 clients. Compared with it: stack, multiply with float masks, sum and divide, in numpy and in torch, as published
code has it. Both are given dense zero-filled values and dense masks for free and sum in float32, while ours starts
from compact tensors, checks them, and sums in float64. CPU time of the calling thread, one thread, candidates
interleaved in alternating order, median of per-round ratios; all results are checked against each other first.

    python benchmarks/aggregate.py            # a table
    python benchmarks/aggregate.py --json     # the same for machines
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from talaria.aggregate.masked import MaskedMean
from talaria.model import masks
from talaria.model.masks import Axis, ChannelLayout, ChannelMask
from talaria.model.state import to_arrays, to_torch
from talaria.tensors import Array, Tensors
from talaria.types import Update

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


def cpu_ms(run: Callable[[], object]) -> float:
    start = time.thread_time()
    run()
    return (time.thread_time() - start) * 1e3


def furthest(a: Tensors, b: Tensors) -> float:
    return max(float(np.abs(a[k] - b[k]).max()) for k in a)


def measure(clients: int, tiers: int, scale: float, rounds: int, keep: float) -> dict[str, object]:
    """Milliseconds and ratios of one setting."""
    shared, layout = network(scale)
    updates = cohort(shared, layout, clients, tiers, keep)
    dense, weights = expand(shared, updates), [u.weight for u in updates]
    same, wide = to_torch(shared), [(to_torch(values), to_torch(kept)) for values, kept in dense]
    candidates: dict[str, Callable[[], Any]] = {
        "ours": lambda: MaskedMean().apply(shared, {}, updates)[0],
        "naive_numpy": lambda: naive_numpy(shared, dense, weights),
        "naive_torch": lambda: naive_torch(same, wide, weights),
    }
    results = {name: run() for name, run in candidates.items()}
    results["naive_torch"] = to_arrays(results["naive_torch"])
    gaps = {name: furthest(results["ours"], results[name]) for name in candidates}
    assert max(gaps.values()) < 1e-4, gaps
    del results
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for round in range(rounds):
        order = list(candidates) if round % 2 == 0 else list(candidates)[::-1]
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
            if name != "ours"
        },
        "largest_difference": max(gaps.values()),
    }


def round_to(value: float) -> float:
    return float(f"{value:.3g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keep", type=float, default=0.5, help="kept part of each channel group")
    parser.add_argument("--scale", type=float, default=1.0, help="width of the network; 1 is about 9 million values")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    torch.set_num_threads(1)
    settings = [(args.clients, args.clients), (args.clients, 4)]
    found = [measure(c, t, args.scale, args.rounds, args.keep) for c, t in settings]
    if args.json:
        print(
            json.dumps(
                {"numpy": np.__version__, "torch": torch.__version__, "machine": platform.machine(), "settings": found},
                indent=1,
            )
        )
        return
    for setting in found:
        kept = f"{setting['kept']} of {setting['values']} values kept"
        print(f"{setting['clients']} clients, {setting['masks']} masks, {kept}")
        print(f"  CPU ms       {setting['ms']}")
        print(f"  times faster {setting['faster_than']}")


if __name__ == "__main__":
    main()
