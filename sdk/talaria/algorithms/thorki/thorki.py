"""Thorki: a large model learns what is general through the fleet, a small one keeps what is personal, and a light
fusion network combines their outputs (WWW 2026; code announced as CGCL-codes/Thorki, Zenodo 18333281).

Confirmed (abstract and release notes): two whole models instead of shared and private layers; the large one is
federated, with low-rank adapters on a pretrained base; the small one and the fusion network stay on the device; the
fusion works on the two outputs at inference and is fitted on a small adaptation set. Reconstructed: everything else.
No public text gives the losses, the fusion network, ranks, rates or any accuracy, so this file claims none.

    round:  the shared tensors of the large model ← SGD on D_train, sent;  small model ← SGD on D_train, kept
    serve:  z_G = large(x) + log π_i, z_P = small(x);  α(x) from 2C + 3 numbers about both;  z = (1 − α) z_G + α z_P

where z_G = large(x) + log π_i with the device's own label frequencies π_i (``prior="local"``): the large model is
trained on everybody's labels, and a device that sees three of ten classes should not be told of the others
(``"none"`` leaves it out). No tensor of one branch is in the other's graph. The gate is fitted on D_adapt alone: the
validation samples, or where there are none a stratified tenth of the training samples, which then train neither.

``general="full"`` (default) federates the whole large model, because a small model trained from scratch has no
pretrained base to rely on. ``general="adapters"`` is the paper's: the base stays as the run's common weights, and
adapters and head are federated; of two low-rank factors the first stays as its common seed made it, because the mean
of products is not the product of means, and with a common first factor it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar

from talaria.aggregate.base import Aggregator
from talaria.aggregate.masked import MaskedMean
from talaria.algorithms.base import Card
from talaria.algorithms.hparams import Epochs, Rate, above, at_least, check, one_of, within
from talaria.algorithms.sharing import WHOLE, parted, update
from talaria.algorithms.thorki import fusion_gate, small_branch
from talaria.algorithms.thorki.fusion_gate import divided, label_shift
from talaria.algorithms.thorki.serving import fused
from talaria.errors import ModelError
from talaria.model.split import Split
from talaria.tensors import Tensors, only, prefixed, under, without
from talaria.training.engine import ready, served, state_of, train
from talaria.training.interface import Task
from talaria.types import Recipe, Samples, Update

if TYPE_CHECKING:
    from talaria.model.weights import Model

SMALL = "small/"
"""Prefix of the small model among a device's private tensors."""


@dataclass(frozen=True, kw_only=True)
class Thorki:
    """``small`` is ``"auto"`` (a narrow network for the shape of the data) or a zoo name. ``small_epochs`` and
    ``small_lr`` are its own schedule (0: the recipe's); a device that never took part trains it for ``join_epochs``.

    ``gate``: ``"sample"`` has an α per sample, ``"constant"`` one, and ``"auto"`` takes the constant where D_adapt
    holds fewer than five samples per class. ``prior`` is described above. ``adapt_share`` of the training samples is
    D_adapt where there are no validation samples.
    """

    general: Annotated[str, one_of("full", "adapters")] = "full"
    small: str = small_branch.AUTO
    small_epochs: Annotated[int, at_least(0, " (0 takes the recipe's)")] = 0
    small_lr: Rate = 0.0
    join_epochs: Epochs = 30
    gate: Annotated[str, one_of("auto", "sample", "constant")] = "auto"
    prior: Annotated[str, one_of("local", "none")] = "local"
    gate_steps: Annotated[int, at_least(1)] = 200
    gate_lr: Annotated[float, above(0)] = 1e-2
    adapt_share: Annotated[float, within("(0, 1)")] = 0.1
    aggregator: Aggregator = field(default_factory=MaskedMean, repr=False)

    card: ClassVar[Card] = Card(
        name="thorki",
        title="Thorki",
        shares="the large model (general=adapters: its adapters and head)",
        keeps="a small model and the fusion gate",
        serves="both models and the gate, as one",
        source="Thorki, WWW 2026 (abstract; Zenodo 18333281)",
        evidence="reconstructed",
        classes_alone="its gate mixes class probabilities",
        beside=(SMALL,),
    )

    def __post_init__(self) -> None:
        check(self)
        small_branch.require(self.small)

    def init(self, model: Model, split: Split) -> tuple[Tensors, Tensors]:
        if self.general == "full":
            return parted(model, split, *WHOLE)
        if not split.adapters:
            raise ModelError(
                "thorki: general='adapters' federates adapters, but this model has none; "
                "add adapters to the run's model, or use general='full'"
            )
        state, away = state_of(model), [k for k in split.travels("adapters", "head") if not _is_first(k)]
        gone = set(away)
        return only(state, away), {k: v for k, v in state.items() if k not in gone}

    def fit(self, task: Task, shared: Tensors, private: Tensors) -> tuple[Update, Tensors]:
        learn, _ = divided(task, self.adapt_share)
        general = {**shared, **without(private, SMALL)}
        if self.general == "full":
            general = train(task, general, samples=learn)
        else:
            general = train(task, ready(task, general), only=tuple(shared), samples=learn)
        recipe = task.recipe if not self.small_epochs else task.recipe.but(epochs=self.small_epochs, steps=None)
        small = self._small(task, under(private, SMALL), recipe, learn)
        kept = {k: v for k, v in general.items() if k not in shared}
        return update(task, general, shared), {**kept, **prefixed(small, SMALL)}

    def personal(self, task: Task, shared: Tensors, private: Tensors) -> Model:
        learn, adapt = divided(task, self.adapt_share)
        own = small_branch.task_of(task, self.small)
        recipe = task.recipe.but(epochs=self.join_epochs, steps=None)
        small = small_branch.fitting(own, under(private, SMALL)) or self._small(task, {}, recipe, learn)
        general = ready(task, {**shared, **without(private, SMALL)})
        shift = label_shift(task) if self.prior == "local" else None
        branches = (task, general), (own, small)
        gate = fusion_gate.fitted(*branches, adapt, shift, kind=self.gate, steps=self.gate_steps, lr=self.gate_lr)
        return fused(served(task, general), served(own, small), gate, shift)

    def _small(self, task: Task, state: Tensors, recipe: Recipe, samples: Samples) -> Tensors:
        return small_branch.trained(task, self.small, state, recipe.but(lr=self.small_lr or recipe.lr), samples)


def _is_first(key: str) -> bool:
    """Whether this is the first of two low-rank factors; recurrent layers and attention have two for each matrix."""
    *parts, owner, _ = ("", *key.split("."))
    return owner == "down" and "adapter" in parts
