"""Hermes: each device finds a structured subnetwork of the shared model; only kept coordinates travel and are
averaged over those who kept them (Li, Sun, Li, Pu, Li, Chen, MobiCom 2021, doi 10.1145/3447993.3483278).

Confirmed (abstract): structured pruning per device, only the subnetwork's update travels, the server averages
overlapping parameters, the result is personal and structured-sparse. Reconstructed: the gate, step and cap of the
schedule (the form of LotteryFL, Li et al., 2021), BatchNorm treatment, weights by sample count. Two aggregation
modes: ``holders`` averages each coordinate over the devices that kept it; ``intersection`` (the abstract's strict
reading) averages only what all participants kept, and each device keeps its own values elsewhere.

In each round the device measures the masked model on its own validation data; if that is at least ``threshold`` and
less than ``cap`` of the channels are gone, it removes ``step`` of what remains, least important first, then trains.
Masks only shrink. Where the device's plan names widths, those are the cap of each channel group.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch.nn import Module

from talaria.aggregate.base import Aggregator
from talaria.aggregate.masked import MaskedMean
from talaria.algorithms.card import Card
from talaria.algorithms.parts import WHOLE, require, update
from talaria.algorithms.tuning import SAMPLES, TUNES, tuned
from talaria.errors import ModelError
from talaria.local import accuracy, gradient, load, ready, served, state_of, train
from talaria.model import masks, pruning
from talaria.tree import only, prefixed, under, without
from talaria.types import ChannelMask, Part, Plan, Split, Task, Tensors, Update

OWN = "own/"
PARTS: dict[str, tuple[Part, ...]] = {
    "none": (),
    "adapters": ("adapters",),
    "head": ("head",),
    "adapters,head": ("adapters", "head"),
}

KINDS: dict[str, pruning.Kind] = {"l1": "l1", "bn": "bn", "taylor": "taylor"}


@dataclass(frozen=True, kw_only=True)
class Hermes:
    """``threshold``, ``step`` and ``cap`` are in shares of 1; ``block`` rounds kept widths up to what runs fast.

    ``private`` names the parts that never leave the device beside mask and BatchNorm statistics. ``tune`` and
    ``tune_epochs`` fine-tune the served model locally (0: the card's plain M_k ⊙ θ_k).
    """

    threshold: float = 0.5
    step: float = 0.2
    cap: float = 0.5
    block: int = 8
    mode: Literal["holders", "intersection"] = "holders"
    private: str = "adapters"
    importance: str = "l1"
    tune: str = "full"
    tune_epochs: int = 0
    tune_lr: float = 0.0
    tune_on: str = "train"
    min_holders: int = 1

    card: ClassVar[Card] = Card(
        name="hermes",
        title="Hermes",
        shares="the kept coordinates of body and head, and the mask",
        keeps="mask, adapters, BatchNorm statistics (intersection: all coordinates that not all kept)",
        serves="its own subnetwork, physically small",
        source="Li et al., MobiCom 2021, doi:10.1145/3447993.3483278",
        evidence="partly reconstructed",
        prunes=True,
    )

    def __post_init__(self) -> None:
        require(
            "hermes",
            threshold=(0 <= self.threshold <= 1, self.threshold, "must be in [0, 1]"),
            step=(0 < self.step < 1, self.step, "must be in (0, 1): the share of remaining channels pruned at once"),
            cap=(0 < self.cap < 1, self.cap, "must be in (0, 1): the share of channels that may go"),
            block=(self.block >= 1, self.block, "must be at least 1"),
            min_holders=(self.min_holders >= 1, self.min_holders, "must be at least 1"),
            mode=(self.mode in ("holders", "intersection"), self.mode, "must be 'holders' or 'intersection'"),
            private=(self.private in PARTS, self.private, f"must be one of {sorted(PARTS)}"),
            importance=(self.importance in KINDS, self.importance, f"must be one of {sorted(KINDS)}"),
            tune=(self.tune in TUNES, self.tune, f"must be one of {sorted(TUNES)}"),
            tune_epochs=(self.tune_epochs >= 0, self.tune_epochs, "must be at least 0"),
            tune_lr=(self.tune_lr >= 0, self.tune_lr, "must be at least 0 (0 takes the recipe's)"),
            tune_on=(self.tune_on in SAMPLES, self.tune_on, f"must be one of {SAMPLES}"),
        )

    @property
    def aggregator(self) -> Aggregator:
        return MaskedMean(mode=self.mode, min_holders=self.min_holders)

    def init(self, model: Module, split: Split) -> tuple[Tensors, Tensors]:
        state = state_of(model)
        away = split.travels(*self._shared_parts)
        gone = set(away)
        return only(state, away), {k: v for k, v in state.items() if k not in gone}

    @property
    def _shared_parts(self) -> tuple[Part, ...]:
        return tuple(part for part in WHOLE if part not in PARTS[self.private])

    def fit(self, task: Task, shared: Tensors, private: Tensors) -> tuple[Update, Tensors]:
        state = self._assembled(task, shared, private)
        task, state, measured = self._pruned(task, state)
        state = train(task, state)
        away = [k for k in shared if not k.startswith(masks.PREFIX)]
        stays = {k: v for k, v in state.items() if k not in set(away)}
        own = prefixed(only(state, away), OWN) if self.mode == "intersection" else {}
        return update(task, state, away, val_accuracy=measured, pruned=pruned_share(task.mask)), {**stays, **own}

    def personal(self, task: Task, shared: Tensors, private: Tensors) -> Module:
        state = ready(task, self._assembled(task, shared, private))
        if task.newcomer:
            task, state = self._joined(task, state)
        return served(task, tuned(task, state, self.tune, self.tune_epochs, self.tune_lr, self.tune_on))

    def _joined(self, task: Task, state: Tensors) -> tuple[Task, Tensors]:
        """The same gate on a newcomer, prune by prune, training after each, until the cap or the gate says stop."""
        recipe = task.recipe.but(lr=self.tune_lr or task.recipe.lr)
        while True:
            smaller, cut, _ = self._pruned(task, state)
            if smaller is task:
                return task, state
            purpose = f"join {pruned_share(smaller.mask):.6f}"
            task, state = smaller, train(smaller, cut, recipe=recipe, purpose=purpose)

    def _assembled(self, task: Task, shared: Tensors, private: Tensors) -> Tensors:
        """Shared and private as one state; under intersection, own values wherever not all kept the coordinate."""
        values, own = without(shared, masks.PREFIX), under(private, OWN)
        if own and len(values) < len(shared):
            values = overlaid(own, values, _mask_of(task), masks.from_tensors(_mask_of(task).layout, shared))
        elif own:
            values = own
        return {**values, **without(private, OWN)}

    def _pruned(self, task: Task, state: Tensors) -> tuple[Task, Tensors, float]:
        """``(task, state, validation accuracy)``, smaller where the gate lets it; the same task where it does not."""
        measured = accuracy(task, state, task.val)
        mask = _mask_of(task)
        target = self.target(mask, task.plan)
        if measured < self.threshold or all(len(mask.kept[g]) <= n for g, n in target.items()):
            return task, state, measured
        slopes = gradient(task, state) if self.importance == "taylor" else None
        scores = pruning.importance(load(task.model, state), mask.layout, KINDS[self.importance], mask, slopes)
        smaller = pruning.choose(scores, mask, widths=target, block=self.block)
        if smaller.kept == mask.kept:
            return task, state, measured
        model = pruning.compact(task.model, smaller, mask)
        return task.but(model=model, mask=smaller), masks.shrink(state, mask, smaller), measured

    def target(self, mask: ChannelMask, plan: Plan | None) -> dict[str, int]:
        """The next width of each group: ``step`` fewer, in whole blocks and at least one, never below the cap."""
        planned = plan.widths if plan is not None else {}
        target = {}
        for group, size in mask.layout.sizes.items():
            now = len(mask.kept[group])
            floor = planned.get(group, pruning.aligned(size * (1 - self.cap), self.block))
            below = min(pruning.aligned(now * (1 - self.step), self.block), max(self.block, now - self.block))
            target[group] = min(now, max(floor, below))
        return target


def overlaid(own: Tensors, values: Tensors, mask: ChannelMask, everyone: ChannelMask) -> Tensors:
    """``own`` with ``values`` at the coordinates that ``everyone`` keeps; all compact under ``mask``."""
    out = dict(values)
    for key, mine in own.items():
        inside = torch.ones_like(mine, dtype=torch.bool)
        dims = zip(mask.indices.get(key, ()), everyone.indices.get(key, ()), strict=True)
        for dim, (here, common) in enumerate(dims):
            if common is not None:
                at = torch.arange(mine.shape[dim]) if here is None else here
                inside &= torch.isin(at, common).view(-1, *[1] * (mine.dim() - dim - 1))
        out[key] = torch.where(inside, values[key], mine)
    return out


def _mask_of(task: Task) -> ChannelMask:
    if task.mask is None:
        raise ModelError("hermes needs the task's channel mask (all kept at first); build the task with rounds.task_of")
    return task.mask


def pruned_share(mask: ChannelMask | None) -> float:
    """Share of all channels that the mask removed."""
    if mask is None:
        return 0.0
    return 1 - sum(map(len, mask.kept.values())) / max(1, sum(mask.layout.sizes.values()))
