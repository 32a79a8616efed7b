"""What one choice costs on one device, figure by figure, to be held against a budget."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from torch.nn import Module

from talaria.model import pruning, zoo
from talaria.model.spec import ModelSpec
from talaria.model.split import WHOLE, Part
from talaria.model.widths import first_of
from talaria.planning import memory
from talaria.planning.anatomy import Anatomy, Widths, bundle_bytes, sent_bytes
from talaria.planning.budget import Budget
from talaria.planning.cost import Cost, predicted
from talaria.planning.layer_stats import anatomy
from talaria.planning.profile import Profile

SLICES = (1, 2, 4, 8, 16, 32)
"""Pieces that a batch may be cut into."""

PASSES = {WHOLE: 3.0, ("adapters", "head"): 2.0, ("head",): 1.0}
"""Forward passes that one training step is worth: frozen layers take no gradient of their weights, and layers below
the lowest trained one none at all."""


@dataclass(frozen=True)
class Choice:
    """What is deployed and how it trains, but for the widths."""

    spec: ModelSpec
    parts: tuple[Part, ...]
    codec: str
    batch: int
    slices: int


@dataclass(frozen=True)
class Figures:
    """Figures by their name in the budget; latencies hold ``spare``, the share of them that is kept in hand."""

    values: Mapping[str, float]
    steps: int | None
    spare: float = 0.0

    def reported(self, precision: str) -> dict[str, float]:
        """The figures as a plan tells them."""
        told = {k: v for k, v in self.values.items() if k != "bundle_fp32_mb"}
        if precision == "fp32":
            told["bundle_mb"] = self.values["bundle_fp32_mb"]
        return predicted(told, self.spare)


def figures(choice: Choice, widths: Widths, budget: Budget, profile: Profile, cost: Cost | None) -> Figures:
    """What ``choice`` costs at ``widths``, which are named by the groups of the plain model.

    Memory is worked out only where the budget limits it: it takes a run of the model without values.
    """
    bare = anatomy(zoo.plain(choice.spec))
    full = anatomy(choice.spec)
    found: dict[str, float] = {}
    spare = 0.0
    if cost is not None:
        uncut = all(widths[g] == n for g, n in bare.layout.sizes.items())
        spare = 0.0 if uncut else cost.margin
        found["latency_ms"] = cost.dense_ms if uncut else cost.latency_ms(bare, widths) * (1 + spare)
        found["latency_ratio"] = found["latency_ms"] / cost.dense_ms
    graph = 2_000 + 500 * len(bare.layers) if cost is None else cost.graph_bytes
    found["bundle_mb"], found["bundle_fp32_mb"] = (size / 1e6 for size in bundle_bytes(bare, widths, graph))
    own = _in_names_of(bare, full, widths)
    found["upload_mb"] = upload_bytes(full, own, choice.parts, choice.codec) / 1e6
    found["step_s"] = choice.batch * PASSES[choice.parts] / 3 * bare.products(widths) / profile.train_rate
    steps = None
    seconds = [s for s in (budget.train_s, _seconds(budget, profile)) if s is not None]
    if seconds:
        steps = max(1, math.floor(min(seconds) / found["step_s"]))
    found["train_s"] = found["step_s"] * (steps or 1)
    if profile.watts is not None:
        found["energy_j"] = found["train_s"] * profile.watts
    if budget.run_memory_mb is not None:
        found["run_memory_mb"] = _running(zoo.plain(choice.spec), tuple(sorted(widths.items()))) / 1e6
    if budget.train_memory_mb is not None:
        slice_ = math.ceil(choice.batch / choice.slices)
        found["train_memory_mb"] = _training(choice.spec, tuple(sorted(own.items())), choice.parts, slice_) / 1e6
    return Figures(found, steps, spare)


def upload_bytes(parts: Anatomy, widths: Widths, trained: tuple[Part, ...], codec: str) -> int:
    """Bytes of one update before compression; see :func:`talaria.planning.anatomy.sent_bytes`."""
    return sent_bytes(parts, widths, parts.split.travels(*trained), codec)


def _in_names_of(bare: Anatomy, full: Anatomy, widths: Widths) -> dict[str, int]:
    names = bare.renamed(full)
    return {names[g]: w for g, w in widths.items() if names[g] in full.layout.sizes}


def _seconds(budget: Budget, profile: Profile) -> float | None:
    return None if budget.energy_j is None or profile.watts is None else budget.energy_j / profile.watts


@lru_cache(maxsize=1024)
def _running(spec: ModelSpec, widths: tuple[tuple[str, int], ...]) -> int:
    return memory.running(_small(spec, dict(widths)), spec.input_shape)


@lru_cache(maxsize=1024)
def _training(spec: ModelSpec, widths: tuple[tuple[str, int], ...], parts: tuple[Part, ...], batch: int) -> int:
    model = _small(spec, dict(widths))
    memory.train_only(model, anatomy(spec).split.of(*parts))
    return memory.training(model, spec.input_shape, batch)


@lru_cache(maxsize=4)
def _dense(spec: ModelSpec) -> Module:
    return zoo.build(spec)


def _small(spec: ModelSpec, widths: Widths) -> Module:
    return pruning.compact(_dense(spec), first_of(zoo.layout(spec), widths))
