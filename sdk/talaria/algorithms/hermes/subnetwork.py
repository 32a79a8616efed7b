"""The smaller subnetwork of a device: when it shrinks, how wide it is next, and which of its channels stay.

Widths follow the form of LotteryFL (Li et al., 2021). Channels are chosen by their magnitude in a state that the device
trained, or by the first-order Taylor score (Molchanov et al., 2019) on its own samples.
"""

from dataclasses import dataclass
from typing import cast

import numpy as np

from talaria.errors import ModelError
from talaria.model import masks
from talaria.model.importance import Kind, choose, importance
from talaria.model.masks import ChannelMask
from talaria.model.split import WHOLE
from talaria.model.weights import Model, Weights
from talaria.model.widths import aligned
from talaria.planning.plan import Plan
from talaria.tensors import Array, Tensors, spread
from talaria.training.batching import slice_of
from talaria.training.engine import accuracy, gradient, train
from talaria.training.interface import Task
from talaria.types import Recipe

KINDS: tuple[Kind, ...] = ("l1", "bn", "taylor")


@dataclass(frozen=True)
class Gate:
    """Who may shrink: whoever measures ``threshold`` or more, by ``step`` of its channels until ``cap`` are gone.

    All three are shares of 1. ``block`` rounds kept widths up; ``kind`` names how channels are scored (:data:`KINDS`).
    """

    threshold: float
    step: float
    cap: float
    block: int
    kind: str

    def pruned(self, task: Task, state: Tensors, own: Tensors, measured: float) -> tuple[Task, Tensors]:
        """``(task, state)``, smaller where the ``measured`` accuracy opens the gate; the same task where it does not.

        ``own``: the state whose magnitudes choose. Empty: the device has not trained yet, and does so to choose."""
        widths = next_widths(mask_of(task), task.plan, step=self.step, cap=self.cap, block=self.block)
        if measured < self.threshold:
            return task, state
        return narrowed(task, state, own, widths, kind=self.kind, block=self.block)

    def joined(self, task: Task, state: Tensors, recipe: Recipe) -> tuple[Task, Tensors]:
        """A newcomer's ``(task, state)``: pruned and trained by ``recipe`` in turn, until the gate or the cap stops."""
        while True:
            smaller, cut = self.pruned(task, state, state, accuracy(task, state, task.val))
            if smaller is task:
                return task, state
            purpose = f"join {pruned_share(smaller.mask):.6f}"
            task, state = smaller, train(smaller, cut, recipe=recipe, purpose=purpose)


def mask_of(task: Task) -> ChannelMask:
    """The task's mask; :class:`~talaria.errors.ModelError` where it has none."""
    if task.mask is None:
        raise ModelError("hermes needs the task's channel mask (all kept at first); build the task with rounds.task_of")
    return task.mask


def pruned_share(mask: ChannelMask | None) -> float:
    """Share of all channels that the mask removed."""
    if mask is None:
        return 0.0
    return 1 - sum(map(len, mask.kept.values())) / max(1, sum(mask.layout.sizes.values()))


def next_widths(mask: ChannelMask, plan: Plan | None, *, step: float, cap: float, block: int) -> dict[str, int]:
    """The next width of each group: ``step`` fewer, in whole blocks and at least one, never below the cap."""
    planned = plan.widths if plan is not None else {}
    widths = {}
    for group, size in mask.layout.sizes.items():
        now = len(mask.kept[group])
        own = mask.layout.block(group, block)
        floor = planned.get(group, aligned(size * (1 - cap), own))
        below = min(aligned(now * (1 - step), own), max(own, now - own))
        widths[group] = min(now, max(floor, below))
    return widths


def narrowed(
    task: Task, state: Tensors, own: Tensors, widths: dict[str, int], *, kind: str, block: int
) -> tuple[Task, Tensors]:
    """``(task, state)`` with the ``widths`` most important channels of each group; the same task where all stay.

    ``own``: the state whose magnitudes choose. Empty: the device has not trained yet, and does so to choose."""
    mask = mask_of(task)
    if all(len(mask.kept[group]) <= width for group, width in widths.items()):
        return task, state
    smaller = choose(_scores(task, state, own, cast(Kind, kind)), mask, widths=widths, block=block)
    if smaller.kept == mask.kept:
        return task, state
    return task.but(model=_compact(task.model, smaller, mask), mask=smaller), masks.shrink(state, mask, smaller)


def _compact(model: Model, smaller: ChannelMask, mask: ChannelMask) -> Model:
    if isinstance(model, Weights):
        return Weights(masks.shrink(model.state, mask, smaller))
    from talaria.model.compaction import compact

    return compact(model, smaller, mask)


def _scores(task: Task, state: Tensors, own: Tensors, kind: Kind) -> dict[str, Array]:
    mask, weights = mask_of(task), task.split.parameters(*WHOLE)
    if kind == "taylor":
        return importance(state, weights, mask.layout, kind, mask, slopes_of(task, state))
    return importance(own or train(task, state, purpose="importance"), weights, mask.layout, kind, mask)


def slopes_of(task: Task, state: Tensors) -> Tensors:
    """The mean gradient over the training samples, in slices no larger than those of training, so that it takes no
    more memory."""
    count = len(task.train)
    mean: Tensors = {}
    for first, index in enumerate(spread(count, slice_of(task.recipe))):
        slopes = gradient(task, state, samples=task.train.take(index), purpose=f"importance {first}")
        mean = {k: np.asarray(mean.get(k, 0) + v * (len(index) / count)) for k, v in slopes.items()}
    return mean
