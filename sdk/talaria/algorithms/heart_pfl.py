"""HEART-PFL: features of the personal model follow the global model's class prototypes on the device; the server
distils the clients' models into their mean (WACV 2026, arXiv:2603.24209; code danny0628/HEART-PFL @d90e395).

Confirmed from the released code: what is trained and sent, both local phases, the proximal term, the four stages,
the form of both alignment terms and of the distillation, all constants but λ (:class:`HeartPFL` says why).
Reconstructed: which tensor carries the alignment gradient (the release computes both sides without one, so that the
term does nothing) and one adversarial input per batch for students and teachers (:mod:`talaria.aggregate.distill`).
Written from the described method.

    v ← SGD on v of CE + λ Σ_k ||v_k − u_k||² + 0.1 L_HDA     personal, stays          (u: as received)
    u ← SGD on u of CE                                        global copy, sent
    server: θ ← unweighted mean of u; in the first 30 rounds, where it has a proxy set, distillation with keep-best

``variant="A"`` (default) pulls v's features to the fixed class means of u's; ``"B"`` compares u's fixed features with
the class means of v's within the batch, differentiably. Without a proxy set the server is the plain mean;
the aggregator ``akt:proxy=FILE.npz`` gives it one (``talaria simulate --aggregator``, ``[rounds] aggregator``).

``trains="auto"``: with adapters in the model, adapters, head and the BatchNorm affines outside of downsampling
branches are trained and sent, all else is frozen (ResNet-18 with the paper's adapters and 100 classes: 1,459,428
parameters); a model without adapters has no pretrained backbone to freeze, and is trained and sent whole.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from talaria.aggregate.adversarial import Normalization
from talaria.aggregate.base import Aggregator
from talaria.aggregate.distill import Distilled
from talaria.aggregate.masked import MaskedMean
from talaria.algorithms.card import Card
from talaria.algorithms.parts import WHOLE, refuse_neutral, require, update
from talaria.algorithms.prototypes import Tap, alignment, class_means, features, prototypes, stages
from talaria.errors import ConfigError, ModelError
from talaria.tensors import only, prefixed, under, without
from talaria.training.loop import Objective, Pull, load, ready, served, state_of, train
from talaria.types import Samples, Split, Task, Tensors, Update

OWN = "own/"
"""Prefix of the personal model among a device's private tensors."""


def _uniform_mean() -> Aggregator:
    return MaskedMean(weighting="uniform")


@dataclass(frozen=True, kw_only=True)
class HeartPFL:
    """``lam`` is λ (no factor ½); ``align`` the weight of L_HDA. A device that never took part takes the personal
    phase for ``join_epochs`` from the global model.

    The paper's scripts take λ = 1 at a learning rate of 1e-3 without momentum, where the pull acts slowly; at the
    rates that train small models from scratch it holds the personal model to the global one, hence 0.1."""

    lam: float = 0.1
    align: float = 0.1
    variant: str = "A"
    trains: str = "auto"
    join_epochs: int = 10
    allow_degenerate: bool = False
    aggregator: Aggregator = field(default_factory=_uniform_mean, repr=False)

    card: ClassVar[Card] = Card(
        name="heart_pfl",
        title="HEART-PFL",
        shares="adapters, head, BatchNorm affines (without adapters: the whole model)",
        keeps="a personal copy of the same, BatchNorm statistics",
        serves="the personal model",
        source="HEART-PFL, WACV 2026, arXiv:2603.24209",
        evidence="partly reconstructed",
    )

    def __post_init__(self) -> None:
        require(
            "heart_pfl",
            lam=(self.lam >= 0, self.lam, "must be at least 0"),
            align=(self.align >= 0, self.align, "must be at least 0"),
            variant=(self.variant in ("A", "B"), self.variant, "must be 'A' or 'B'"),
            trains=(self.trains in ("auto", "adapters", "full"), self.trains, "must be 'auto', 'adapters' or 'full'"),
            join_epochs=(self.join_epochs >= 0, self.join_epochs, "must be at least 0"),
        )
        if self.align == 0:
            effect = "switches the alignment off, which leaves local training tied to the mean"
            refuse_neutral("heart_pfl", "align", self.align, effect, self.allow_degenerate)

    def init(self, model: Module, split: Split) -> tuple[Tensors, Tensors]:
        state, away = state_of(model), self.sent(model, split)
        gone = set(away)
        frozen = {k: v for k, v in state.items() if k not in gone}
        own = only(state, [k for k in state if k in gone or k in split.statistics or k in split.counters])
        return only(state, away), {**frozen, **prefixed(own, OWN)}

    def sent(self, model: Module, split: Split) -> tuple[str, ...]:
        """U: the keys that are trained and may travel, in the model's order."""
        if self.trains == "full" or (self.trains == "auto" and not split.adapters):
            wanted = set(split.travels(*WHOLE))
        elif not split.adapters:
            raise ModelError("heart_pfl: trains='adapters', but the model has none; add adapters, or trains='full'")
        else:
            wanted = set(split.travels("adapters", "head")) | (_norms(model) & set(split.travels("body")))
        return tuple(k for k in split.keys if k in wanted)

    def fit(self, task: Task, shared: Tensors, private: Tensors) -> tuple[Update, Tensors]:
        state = ready(task, {**shared, **without(private, OWN)})
        own = self._personal_phase(task, state, under(private, OWN), shared)
        state = train(task, state, only=self._follow(task, shared))
        kept = only(state, [k for k in state if k not in shared])
        return update(task, state, shared), {**kept, **prefixed(own, OWN)}

    def personal(self, task: Task, shared: Tensors, private: Tensors) -> Module:
        state, own = {**shared, **without(private, OWN)}, under(private, OWN)
        if task.newcomer:
            state = ready(task, state)
            recipe = task.recipe.but(epochs=self.join_epochs, steps=None)
            start = {k: state[k] for k in own}
            own = self._personal_phase(task.but(recipe=recipe), state, start, shared)
        return served(task, {**state, **own})

    def server(
        self,
        model: Module,
        proxy: Samples,
        *,
        selection: Samples | None = None,
        normalization: Normalization | None = None,
        **options: object,
    ) -> Aggregator:
        """The server with a proxy set: this algorithm's mean, then distillation (see
        :class:`talaria.aggregate.distill.Distilled` for the options). Give it to the run in place of the default."""
        scale = normalization or Normalization()
        settings = {"selection": selection, "normalization": scale, **options}
        return Distilled(inner=self.aggregator, model=model, proxy=proxy, **settings)  # type: ignore[arg-type]

    def _follow(self, task: Task, shared: Tensors) -> list[str]:
        """U and the statistics of the BatchNorms in it: what moves in training."""
        owners = {k.rpartition(".")[0] for k in shared}
        buffers = task.split.statistics | task.split.counters
        return [k for k in task.split.keys if k in shared or (k in buffers and k.rpartition(".")[0] in owners)]

    def _personal_phase(self, task: Task, state: Tensors, own: Tensors, shared: Tensors) -> Tensors:
        if 2 * self.lam * task.recipe.lr > 1:
            raise ConfigError(
                f"heart_pfl: lam={self.lam} at a learning rate of {task.recipe.lr} overshoots the global model in "
                f"every step; keep 2 * lam * lr at most 1"
            )
        names = [k for k in shared if k not in task.split.statistics]
        pull = Pull(only(shared, names), 2 * self.lam) if self.lam > 0 else None
        at = stages(task.model, task.split)
        objective, tap = self._objective(task, state, at)
        with tap:
            start = ready(task, {**state, **own})
            own_state = train(
                task, start, only=self._follow(task, shared), pull=pull, objective=objective, purpose="personal"
            )
        return only(own_state, own)

    def _objective(self, task: Task, state: Tensors, at: Sequence[str]) -> tuple[Objective, Tap]:
        module = load(task.model, state).eval()
        tap, weight, smoothing = Tap(task.model, at), self.align, task.recipe.smoothing
        fixed = prototypes(module, at, task.train, task.classes) if self.variant == "A" and weight > 0 else []
        other = deepcopy(module).requires_grad_(False) if self.variant == "B" and weight > 0 else None

        def objective(module: Module, x: Tensor, y: Tensor) -> Tensor:
            loss = F.cross_entropy(module(x), y, label_smoothing=smoothing)
            if weight == 0:
                return loss
            if other is None:
                return loss + weight * alignment(tap.features, [p[y] for p in fixed])
            means = [class_means(f, y, task.classes)[y] for f in tap.features]
            return loss + weight * alignment(features(other, at, x), means)

        return objective, tap


def _norms(model: Module) -> set[str]:
    """Keys of the BatchNorms outside of downsampling branches, which the paper's names do not match."""
    layers = (n for n, m in model.named_modules() if isinstance(m, _BatchNorm) and "downsample" not in n.split("."))
    return {f"{n}.{k}" for n in layers for k in model.get_submodule(n).state_dict()}


def trainable(model: Module, split: Split) -> int:
    """Parameters that are trained and sent: 1,459,428 for ResNet-18 with the paper's adapters and 100 classes."""
    sent = set(HeartPFL().sent(model, split))
    return sum(int(torch.tensor(p.shape).prod()) for n, p in model.named_parameters() if n in sent)
