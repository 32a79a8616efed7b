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

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import Module

from talaria import seeds
from talaria.aggregate.base import Aggregator
from talaria.aggregate.masked import MaskedMean
from talaria.algorithms import fusion_gate, small_branch
from talaria.algorithms.card import Card
from talaria.algorithms.fusion_gate import Fused
from talaria.algorithms.parts import WHOLE, parted, require, update
from talaria.errors import ModelError
from talaria.model import zoo
from talaria.tensors import only, prefixed, under, without
from talaria.training.loop import predict, ready, served, state_of, train
from talaria.types import Samples, Split, Task, Tensors, Update

SMALL = "small/"
"""Prefix of the small model among a device's private tensors."""
FACTOR = ".adapter.down."
"""The first of two low-rank factors."""
GATES = ("auto", "sample", "constant")


@dataclass(frozen=True, kw_only=True)
class Thorki:
    """``small`` is ``"auto"`` (a narrow network for the shape of the data) or a zoo name. ``small_epochs`` and
    ``small_lr`` are its own schedule (0: the recipe's); a device that never took part trains it for ``join_epochs``.

    ``gate``: ``"sample"`` has an α per sample, ``"constant"`` one, and ``"auto"`` takes the constant where D_adapt
    holds fewer than five samples per class. ``prior`` is described above. ``adapt_share`` of the training samples is
    D_adapt where there are no validation samples.
    """

    general: str = "full"
    small: str = small_branch.AUTO
    small_epochs: int = 0
    small_lr: float = 0.0
    join_epochs: int = 30
    gate: str = "auto"
    prior: str = "local"
    gate_steps: int = 200
    gate_lr: float = 1e-2
    adapt_share: float = 0.1
    aggregator: Aggregator = field(default_factory=MaskedMean, repr=False)

    card: ClassVar[Card] = Card(
        name="thorki",
        title="Thorki",
        shares="the large model (general=adapters: its adapters and head)",
        keeps="a small model and the fusion gate",
        serves="both models and the gate, as one",
        source="Thorki, WWW 2026 (abstract; Zenodo 18333281)",
        evidence="reconstructed",
    )

    def __post_init__(self) -> None:
        known = [small_branch.AUTO, *zoo.names()]
        require(
            "thorki",
            general=(self.general in ("full", "adapters"), self.general, "must be 'full' or 'adapters'"),
            small=(self.small in known, self.small, f"must be one of {known}"),
            small_epochs=(self.small_epochs >= 0, self.small_epochs, "must be at least 0 (0 takes the recipe's)"),
            small_lr=(self.small_lr >= 0, self.small_lr, "must be at least 0 (0 takes the recipe's)"),
            join_epochs=(self.join_epochs >= 0, self.join_epochs, "must be at least 0"),
            gate=(self.gate in GATES, self.gate, f"must be one of {sorted(GATES)}"),
            prior=(self.prior in ("local", "none"), self.prior, "must be 'local' or 'none'"),
            gate_steps=(self.gate_steps >= 1, self.gate_steps, "must be at least 1"),
            gate_lr=(self.gate_lr > 0, self.gate_lr, "must be above 0"),
            adapt_share=(0 < self.adapt_share < 1, self.adapt_share, "must be in (0, 1)"),
        )

    def init(self, model: Module, split: Split) -> tuple[Tensors, Tensors]:
        if self.general == "full":
            return parted(model, split, *WHOLE)
        if not split.adapters:
            raise ModelError(
                "thorki: general='adapters' federates adapters, but this model has none; "
                "add adapters to the run's model, or use general='full'"
            )
        state, away = state_of(model), [k for k in split.travels("adapters", "head") if FACTOR not in k]
        gone = set(away)
        return only(state, away), {k: v for k, v in state.items() if k not in gone}

    def fit(self, task: Task, shared: Tensors, private: Tensors) -> tuple[Update, Tensors]:
        samples, _ = self.divided(task)
        state = {**shared, **without(private, SMALL)}
        if self.general == "full":
            state = train(task, state, samples=samples)
        else:
            state = train(task, ready(task, state), only=tuple(shared), samples=samples)
        small = self._small(task, under(private, SMALL), self.small_epochs, samples)
        kept = [k for k in state if k not in shared]
        return update(task, state, shared), {**only(state, kept), **prefixed(small, SMALL)}

    def personal(self, task: Task, shared: Tensors, private: Tensors) -> Module:
        samples, adapt = self.divided(task)
        small = under(private, SMALL) or self._small(task, {}, self.join_epochs, samples)
        general = served(task, ready(task, {**shared, **without(private, SMALL)}))
        own = served(self._own_task(task), small)
        shift = label_shift(task) if self.prior == "local" else None
        gate = self.gate_for(task, general, own, adapt, shift)
        return Fused(general, own, gate, shift).requires_grad_(False).eval()

    def gate_for(
        self, task: Task, general: Module, small: Module, adapt: Samples, shift: Tensor | None = None
    ) -> Module:
        """The gate fitted on ``adapt``; the same seeds give the same gate."""
        per_sample = self.gate == "sample" or (self.gate == "auto" and len(adapt) >= 5 * task.classes)
        if not len(adapt):
            return fusion_gate.ConstantGate(0.5)
        known = predict(general, adapt.x)
        return fusion_gate.fit(
            known if shift is None else known + shift,
            predict(small, adapt.x),
            adapt.y,
            task.generator("gate"),
            per_sample=per_sample,
            steps=self.gate_steps,
            lr=self.gate_lr,
        )

    def divided(self, task: Task) -> tuple[Samples, Samples]:
        """``(D_train, D_adapt)``, disjoint and the same in every round."""
        if len(task.val):
            return task.train, task.val
        draws = seeds.generator(task.run, task.client, 0, "thorki adapt")
        held = torch.zeros(len(task.train), dtype=torch.bool)
        for label in sorted(set(task.train.y.tolist())):
            own = (task.train.y == label).nonzero().flatten()
            if len(own) > 1:
                count = max(1, round(self.adapt_share * len(own)))
                held[own[torch.randperm(len(own), generator=draws)[:count]]] = True
        return task.train.take((~held).nonzero().flatten()), task.train.take(held.nonzero().flatten())

    def _small(self, task: Task, state: Tensors, epochs: int, samples: Samples) -> Tensors:
        own = self._own_task(task)
        recipe = task.recipe.but(lr=self.small_lr or task.recipe.lr)
        if epochs:
            recipe = recipe.but(epochs=epochs, steps=None)
        return train(own, state or state_of(own.model), recipe=recipe, samples=samples, purpose="small")

    def _own_task(self, task: Task) -> Task:
        shape = tuple(task.train.x.shape[1:])
        return task.but(model=small_branch.build(self.small, shape, task.classes, task.run), mask=None)


def label_shift(task: Task) -> Tensor:
    """log π_i (C,): the device's label frequencies, with one sample's weight spread over all classes."""
    count = torch.bincount(task.train.y, minlength=task.classes).float()
    return torch.log((count + 1 / task.classes) / (count.sum() + 1))
