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

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar

from talaria.aggregate.base import Aggregator
from talaria.aggregate.masked import MaskedMean
from talaria.algorithms.base import Card
from talaria.algorithms.heart_pfl.prototypes import aligned
from talaria.algorithms.heart_pfl.trained import follow, sent
from talaria.algorithms.hparams import Epochs, at_least, check, off, one_of
from talaria.algorithms.sharing import update
from talaria.errors import ConfigError
from talaria.model.split import Split
from talaria.tensors import Tensors, only, prefixed, under, without
from talaria.training.engine import ready, served, state_of, train
from talaria.training.interface import Task
from talaria.training.objectives import Pull
from talaria.types import Update

if TYPE_CHECKING:
    from talaria.model.weights import Model

OWN = "own/"
"""Prefix of the personal model among a device's private tensors."""
ALIGNED = "switches the alignment off, which leaves local training tied to the mean"


@dataclass(frozen=True, kw_only=True)
class HeartPFL:
    """``lam`` is λ (no factor ½); ``align`` the weight of L_HDA. A device that never took part takes the personal
    phase for ``join_epochs`` from the global model.

    The paper's scripts take λ = 1 at a learning rate of 1e-3 without momentum, where the pull acts slowly; at the
    rates that train small models from scratch it holds the personal model to the global one, hence 0.1."""

    lam: Annotated[float, at_least(0)] = 0.1
    align: Annotated[float, at_least(0), off(0, ALIGNED)] = 0.1
    variant: Annotated[str, one_of("A", "B")] = "A"
    trains: Annotated[str, one_of("auto", "adapters", "full")] = "auto"
    join_epochs: Epochs = 10
    allow_degenerate: bool = False
    aggregator: Aggregator = field(default_factory=partial(MaskedMean, weighting="uniform"), repr=False)

    card: ClassVar[Card] = Card(
        name="heart_pfl",
        title="HEART-PFL",
        shares="adapters, head, BatchNorm affines (without adapters: the whole model)",
        keeps="a personal copy of the same, BatchNorm statistics",
        serves="the personal model",
        source="HEART-PFL, WACV 2026, arXiv:2603.24209",
        evidence="partly reconstructed",
        classes_alone="its prototypes are means of each class",
    )

    def __post_init__(self) -> None:
        check(self)

    def init(self, model: Model, split: Split) -> tuple[Tensors, Tensors]:
        state, away = state_of(model), sent(split, self.trains)
        gone = set(away)
        frozen = {k: v for k, v in state.items() if k not in gone}
        own = only(state, [k for k in state if k in gone or k in split.statistics or k in split.counters])
        return only(state, away), {**frozen, **prefixed(own, OWN)}

    def fit(self, task: Task, shared: Tensors, private: Tensors) -> tuple[Update, Tensors]:
        u, v = ready(task, {**shared, **without(private, OWN)}), under(private, OWN)
        v = self._personal_phase(task, u, v, shared)
        u = train(task, u, only=follow(task.split, shared))
        kept = {k: t for k, t in u.items() if k not in shared}
        return update(task, u, shared), {**kept, **prefixed(v, OWN)}

    def personal(self, task: Task, shared: Tensors, private: Tensors) -> Model:
        u, v = {**shared, **without(private, OWN)}, under(private, OWN)
        if task.newcomer:
            u = ready(task, u)
            recipe = task.recipe.but(epochs=self.join_epochs, steps=None)
            v = self._personal_phase(task.but(recipe=recipe), u, {k: u[k] for k in v}, shared)
        return served(task, {**u, **v})

    def _personal_phase(self, task: Task, u: Tensors, v: Tensors, shared: Tensors) -> Tensors:
        """v ← SGD on v of CE + λ Σ_k ||v_k − u_k||² + 0.1 L_HDA."""
        if 2 * self.lam * task.recipe.lr > 1:
            raise ConfigError(
                f"heart_pfl: lam={self.lam} at a learning rate of {task.recipe.lr} overshoots the global model in "
                f"every step; keep 2 * lam * lr at most 1"
            )
        anchor = {k: t for k, t in shared.items() if k not in task.split.statistics}
        pull = Pull(anchor, 2 * self.lam) if self.lam > 0 else None
        objective = aligned(task, u, self.align, self.variant)
        start, moving = ready(task, {**u, **v}), follow(task.split, shared)
        state = train(task, start, only=moving, pull=pull, objective=objective, purpose="personal")
        return only(state, v)
