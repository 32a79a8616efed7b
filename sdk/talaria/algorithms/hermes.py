"""Hermes: each device finds a structured subnetwork of the shared model; only kept coordinates travel up and are
averaged over those who kept them (Li, Sun, Li, Pu, Li, Chen, MobiCom 2021, doi 10.1145/3447993.3483278).

Confirmed (abstract): structured pruning per device, only the subnetwork's update travels, the server averages
overlapping parameters, the result is personal and structured-sparse. Reconstructed: the gate, step and cap of the
schedule (the form of LotteryFL, Li et al., 2021), the score of a channel, BatchNorm treatment, weights by sample
count. Two aggregation modes: ``holders`` averages each coordinate over the devices that kept it; ``intersection``
(the abstract's strict reading) averages only what all participants kept, and each device keeps its own values
elsewhere. One device that shares no channel with the others then ends the averaging, not the learning.

In each round the device measures its subnetwork as it trained it last on its own validation data (at first, the
download: later that would keep the gate shut where labels differ and everybody's average fits nobody); if that is at
least ``threshold`` and less than ``cap`` of the channels are gone, it removes ``step`` of what remains, least important
first, then trains. Masks only shrink. Where the device's plan names widths, those are the cap of each channel group.
Importance is the magnitude (``l1``, ``bn``) of the device's own weights as it trained them last, because the
download's are the same for all whose gates open in one round: by those they would all choose the same channels.
``taylor`` takes the download, and the device's own samples (first order, Molchanov et al. 2019).
``choose_by="download"`` takes the magnitudes of the download after all: where all devices see the same labels, masks in
common make a shared model that serves newcomers better. A device serves its subnetwork as it trained it itself, not
the average of everybody cut to its mask, after ``tune_epochs`` more on its own samples; without them where they cost
accuracy on its labelled samples (a rate that is too high for the last steps).

Where the server's rule leaves coordinates alone (``intersection``, ``min_holders``, a fleet's robust rule) it says so
by bitmaps ``mask/<group>`` beside its values. The device then goes on from its own value of every coordinate that
has not changed since it took part last, so that what few hold is learned by each of them, and an average of any round
since is taken. The abstract lets only subnetworks travel in both directions: here the download is the whole shared
state, the same bytes for all, of which each device cuts out its part.
"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch.nn import Module

from talaria.aggregate.base import Aggregator
from talaria.aggregate.masked import MaskedMean
from talaria.algorithms.base import Card
from talaria.algorithms.finetune import Tune, TuneOn, labelled, tuned
from talaria.algorithms.hparams import Epochs, Rate, at_least, check, one_of, within
from talaria.algorithms.sharing import WHOLE, update
from talaria.errors import ModelError
from talaria.model import masks, pruning
from talaria.model.masks import ChannelMask
from talaria.model.split import Part, Split
from talaria.planning.plan import Plan
from talaria.tensors import Tensors, only, prefixed, under, without
from talaria.training.loop import accuracy, calibrate, gradient, load, ready, served, state_of, train
from talaria.types import Task, Update

OWN, SEEN = "own/", "seen/"
"""Prefixes of what a device keeps of the shared tensors: as it trained them last, and as they had come down."""
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

    ``private`` names the parts that never leave the device beside mask and BatchNorm statistics. ``tune_epochs`` of
    local fine-tuning of the parts ``tune`` come before a model is served (0: as it came out of the device's last
    round). With ``tune_on="all"`` they learn from the validation samples too. A newcomer, who trained in no round,
    takes ``newcomer_epochs`` of it instead (0: as many as members), and then BatchNorm statistics of its own samples as
    they are, where statistics are private: the running ones of so few steps are mostly those of augmented samples.
    """

    threshold: Annotated[float, within("[0, 1]")] = 0.5
    step: Annotated[float, within("(0, 1)", ": the share of remaining channels pruned at once")] = 0.2
    cap: Annotated[float, within("(0, 1)", ": the share of channels that may go")] = 0.5
    block: Annotated[int, at_least(1)] = 8
    mode: Annotated[Literal["holders", "intersection"], one_of("holders", "intersection")] = "holders"
    private: Annotated[str, one_of(*PARTS)] = "adapters"
    importance: Annotated[str, one_of(*KINDS)] = "l1"
    choose_by: Annotated[str, one_of("own", "download")] = "own"
    tune: Tune = "full"
    tune_epochs: Epochs = 20
    tune_lr: Rate = 0.0
    tune_on: TuneOn = "train"
    newcomer_epochs: Annotated[int, at_least(0, " (0: as tune_epochs)")] = 0
    min_holders: Annotated[int, at_least(1)] = 1

    card: ClassVar[Card] = Card(
        name="hermes",
        title="Hermes",
        shares="the kept coordinates of body and head, and the mask",
        keeps="mask, adapters, BatchNorm statistics, its subnetwork as it trained it",
        serves="its own subnetwork after local fine-tuning, physically small",
        source="Li et al., MobiCom 2021, doi:10.1145/3447993.3483278",
        evidence="partly reconstructed",
        prunes=True,
    )

    def __post_init__(self) -> None:
        check(self)

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
        values, mask = without(shared, masks.PREFIX), _mask_of(task)
        state, own = assembled(shared, private), under(private, OWN)
        serving = {**state, **own} if own else None
        task, state, measured = self._pruned(task, state, state if self.choose_by == "download" else serving, serving)
        state = train(task, state)
        stays = {k: v for k, v in state.items() if k not in values}
        trained = prefixed(only(state, values), OWN)
        # Before the first fold nobody can know whether the rule leaves coordinates alone; later its bitmaps say so.
        watched = task.round == 1 or len(values) < len(shared)
        seen = prefixed(masks.shrink(values, mask, _mask_of(task)), SEEN) if watched else {}
        pruned = pruned_share(task.mask)
        return update(task, state, values, val_accuracy=measured, pruned=pruned), {**stays, **trained, **seen}

    def personal(self, task: Task, shared: Tensors, private: Tensors) -> Module:
        if task.newcomer:
            task, state = self._joined(task, ready(task, {**without(shared, masks.PREFIX), **private}))
        else:
            state = {**under(private, OWN), **_stayed(private)}
        epochs = (self.newcomer_epochs or self.tune_epochs) if task.newcomer else self.tune_epochs
        better = tuned(task, state, self.tune, epochs, self.tune_lr, self.tune_on)
        known = labelled(task, "all")  # validation samples alone can be too few to tell a broken model from a good one
        if task.newcomer and task.split.buffers == "local":
            better = calibrate(task, better, known)
        return served(task, state if accuracy(task, better, known) < accuracy(task, state, known) else better)

    def _joined(self, task: Task, state: Tensors) -> tuple[Task, Tensors]:
        """The same gate on a newcomer, prune by prune, training after each, until the cap or the gate says stop."""
        recipe = task.recipe.but(lr=self.tune_lr or task.recipe.lr)
        while True:
            smaller, cut, _ = self._pruned(task, state, state, state)
            if smaller is task:
                return task, state
            purpose = f"join {pruned_share(smaller.mask):.6f}"
            task, state = smaller, train(smaller, cut, recipe=recipe, purpose=purpose)

    def _pruned(
        self, task: Task, state: Tensors, own: Tensors | None, serving: Tensors | None
    ) -> tuple[Task, Tensors, float]:
        """``(task, state, validation accuracy)``, smaller where the gate lets it; the same task where it does not.

        ``own``: the state whose magnitudes choose. None: the device has not trained yet, and does so to choose.
        ``serving``: what the device would serve now, which the gate measures; None: the download."""
        measured = accuracy(task, serving if serving is not None else state, task.val)
        mask = _mask_of(task)
        target = self.target(mask, task.plan)
        if measured < self.threshold or all(len(mask.kept[g]) <= n for g, n in target.items()):
            return task, state, measured
        slopes = slopes_of(task, state) if self.importance == "taylor" else None
        if slopes is not None:
            own = state
        elif own is None:
            own = train(task, state, purpose="importance")
        scores = pruning.importance(load(task.model, own), mask.layout, KINDS[self.importance], mask, slopes)
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


def slopes_of(task: Task, state: Tensors) -> Tensors:
    """The mean gradient over the training samples, in slices no larger than those of training, so that it takes no
    more memory. A slice is spread over all samples, as these may be sorted by label."""
    count = len(task.train)
    pieces = math.ceil(count / math.ceil(task.recipe.batch / task.recipe.accumulate))
    mean: Tensors = {}
    for first in range(pieces):
        index = torch.arange(first, count, pieces)
        slopes = gradient(task, state, samples=task.train.take(index), purpose=f"importance {first}")
        mean = {k: mean.get(k, 0) + v * (len(index) / count) for k, v in slopes.items()}
    return mean


def assembled(shared: Tensors, private: Tensors) -> Tensors:
    """What was downloaded and what stayed, as one state, all compact under the device's mask.

    Where the rule says by its bitmaps that it leaves coordinates alone, each that still has the value of the last
    download has its own value here: nobody averaged it since, however many rounds went by without this device."""
    values, own = without(shared, masks.PREFIX), under(private, OWN)
    seen = under(private, SEEN) if len(values) < len(shared) else {}
    kept = {key: torch.where(values[key] == before, own[key], values[key]) for key, before in seen.items()}
    return {**values, **kept, **_stayed(private)}


def _stayed(private: Tensors) -> Tensors:
    """What never travels: BatchNorm statistics and private parts."""
    return without(without(private, OWN), SEEN)


def _mask_of(task: Task) -> ChannelMask:
    if task.mask is None:
        raise ModelError("hermes needs the task's channel mask (all kept at first); build the task with rounds.task_of")
    return task.mask


def pruned_share(mask: ChannelMask | None) -> float:
    """Share of all channels that the mask removed."""
    if mask is None:
        return 0.0
    return 1 - sum(map(len, mask.kept.values())) / max(1, sum(mask.layout.sizes.values()))
