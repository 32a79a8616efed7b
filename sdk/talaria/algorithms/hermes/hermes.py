"""Hermes: each device finds a structured subnetwork of the shared model; only kept coordinates travel up and are
averaged over those who kept them (Li, Sun, Li, Pu, Li, Chen, MobiCom 2021, doi 10.1145/3447993.3483278).

Confirmed (abstract): structured pruning per device, only the subnetwork's update travels, the server averages
overlapping parameters, the result is personal and structured-sparse. Reconstructed: the gate, step and cap of the
schedule (the form of LotteryFL, Li et al., 2021), the score of a channel, BatchNorm treatment, weights by sample count.

    round:  a ← accuracy on D_val of the subnetwork as the device trained it last (at first, of the download)
            where a ≥ threshold and less than cap of the channels are gone: remove step of those left, least important
            first; then SGD on D_train, and the kept coordinates are sent.  Masks only shrink.
    server: each coordinate ← mean over those who kept it (``holders``), or only where all did (``intersection``)
    serve:  the subnetwork as the device trained it, not the average cut to its mask, after tune_epochs more; without
            them where they cost accuracy on its labelled samples

The gate does not measure the download: it would stay shut where labels differ and everybody's average fits nobody. Nor
is importance (``l1``, ``bn``) that of the download, by which all whose gates open in one round would choose the same
channels, but of the device's own weights as it trained them last; ``taylor`` takes the download and the device's own
samples. ``choose_by="download"`` does take the download's magnitudes: where all devices see the same labels, masks in
common make a shared model that serves newcomers better. Where the device's plan names widths, those are the cap of each
channel group.

``intersection`` is the abstract's strict reading; one device that shares no channel with the others then ends the
averaging, not the learning. A rule that leaves coordinates alone (also ``min_holders``, or a fleet's robust rule) says
so by bitmaps ``mask/<group>`` beside its values, and the device goes on from its own value of every coordinate that has
not changed since it took part last: what few hold is learned by each of them, and an average of any round since is
taken. Only subnetworks travel in both directions, as the abstract has it: a device that has a mask downloads what that
keeps of the shared state (all of it in the end where it compares its plan with the dense twin).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from talaria.aggregate.base import Aggregator
from talaria.aggregate.masked import MaskedMean
from talaria.algorithms.base import Card
from talaria.algorithms.finetune import Tune, TuneOn, labelled, tuned
from talaria.algorithms.hermes.own_values import OWN, PRIVATE, SEEN, as_trained, assembled, kept
from talaria.algorithms.hermes.subnetwork import KINDS, Gate, mask_of, pruned_share
from talaria.algorithms.hparams import Epochs, Rate, at_least, check, one_of, within
from talaria.algorithms.sharing import WHOLE, parted, update
from talaria.model import masks
from talaria.model.split import Split
from talaria.tensors import Tensors, without
from talaria.training.engine import accuracy, calibrate, ready, served, train
from talaria.training.interface import Task
from talaria.types import Update

if TYPE_CHECKING:
    from talaria.model.weights import Model


@dataclass(frozen=True, kw_only=True)
class Hermes:
    """``threshold``, ``step`` and ``cap`` are in shares of 1; ``block`` rounds kept widths up to what runs fast.

    ``private`` names the parts that never leave the device, nor do BatchNorm statistics under ``buffers="local"``; the
    mask travels with each update. ``tune_epochs`` of local fine-tuning of the parts ``tune`` come before a model is
    served (0: as it came out of the device's last round). With ``tune_on="all"`` they learn from the validation samples
    too. A newcomer, who trained in no round, takes ``newcomer_epochs`` of it instead (0: as many as members), and then
    BatchNorm statistics of its own samples as they are, where statistics are private: the running ones of so few steps
    are mostly those of augmented samples.
    """

    threshold: Annotated[float, within("[0, 1]")] = 0.5
    step: Annotated[float, within("(0, 1)", ": the share of remaining channels pruned at once")] = 0.2
    cap: Annotated[float, within("(0, 1)", ": the share of channels that may go")] = 0.5
    block: Annotated[int, at_least(1)] = 8
    mode: Annotated[Literal["holders", "intersection"], one_of("holders", "intersection")] = "holders"
    private: Annotated[str, one_of(*PRIVATE)] = "adapters"
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
        beside=(OWN, SEEN),
    )

    def __post_init__(self) -> None:
        check(self)

    @property
    def aggregator(self) -> Aggregator:
        return MaskedMean(mode=self.mode, min_holders=self.min_holders)

    @property
    def gate(self) -> Gate:
        return Gate(self.threshold, self.step, self.cap, self.block, self.importance)

    def init(self, model: Model, split: Split) -> tuple[Tensors, Tensors]:
        return parted(model, split, *(part for part in WHOLE if part not in PRIVATE[self.private]))

    def fit(self, task: Task, shared: Tensors, private: Tensors) -> tuple[Update, Tensors]:
        values, state, own = without(shared, masks.PREFIX), assembled(shared, private), as_trained(shared, private)
        measured = accuracy(task, own or state, task.val)
        inner, state = self.gate.pruned(task, state, state if self.choose_by == "download" else own, measured)
        state = train(inner, state)
        # Before the first fold nobody can know whether the rule leaves coordinates alone; later its bitmaps say so.
        watched = task.round == 1 or len(values) < len(shared)
        seen = masks.shrink(values, mask_of(task), mask_of(inner)) if watched else {}
        metrics = {"val_accuracy": measured, "pruned": pruned_share(inner.mask)}
        return update(inner, state, values, **metrics), kept(state, values, seen)

    def personal(self, task: Task, shared: Tensors, private: Tensors) -> Model:
        # Who sat out a run that follows another may have trained no such model.
        state, epochs = as_trained(shared, private) or assembled(shared, private), self.tune_epochs
        if task.newcomer:
            state = ready(task, {**without(shared, masks.PREFIX), **private})
            task, state = self.gate.joined(task, state, task.recipe.but(lr=self.tune_lr or task.recipe.lr))
            epochs = self.newcomer_epochs or epochs
        better = tuned(task, state, self.tune, epochs, self.tune_lr, self.tune_on)
        known = labelled(task, "all")  # validation samples alone can be too few to tell a broken model from a good one
        if task.newcomer and task.split.buffers == "local":
            better = calibrate(task, better, known)
        return served(task, state if accuracy(task, better, known) < accuracy(task, state, known) else better)
