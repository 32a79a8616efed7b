"""Adaptive knowledge transfer: after averaging, the clients' models teach the mean on a proxy set, by clean and by
adversarial inputs (the server half of HEART-PFL, WACV 2026, arXiv:2603.24209, as the method intends it).

    J(a, b) = KL(p_a || p_b) + KL(p_b || p_a) = Σ_c (p_a − p_b)(log p_a − log p_b)
    L = J(z_S(x), z_T(x)) + J(z_S(x'), z_T(x')),  z_T the mean of the clients' logits

x' comes from projected gradient ascent on the present student, in pixel space, one per batch and the same for student
and teachers (reconstructed: the release makes another for each). All models stand in eval mode, so that nothing but
the trained tensors moves. The best step on samples that are not distilled on is kept, and the mean itself where no
step is better. Proxy data and model are resources of the server and never travel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import cos, pi
from typing import TYPE_CHECKING

import numpy as np

from talaria import tasks, tensors
from talaria.aggregate.adversarial import Attack, Normalization, adversarial
from talaria.aggregate.base import Aggregator
from talaria.errors import ConfigError, DataError, ModelError
from talaria.model import masks
from talaria.seeds import generator
from talaria.tensors import Array, Tensors
from talaria.types import Samples, Update

if TYPE_CHECKING:
    import torch
    from torch import Generator, Tensor
    from torch.nn import Module

ROUNDS = "akt/rounds"
INNER = "akt/inner/"


def divergence(a: Tensor, b: Tensor) -> Tensor:
    """J of two batches of logits (N, C), averaged over N; at least 0, symmetric, 0 for equal distributions."""
    from torch.nn import functional as F

    log_a, log_b = F.log_softmax(a, 1), F.log_softmax(b, 1)
    return ((log_a.exp() - log_b.exp()) * (log_a - log_b)).sum(1).mean()


@dataclass(frozen=True, kw_only=True)
class Distilled:
    """``inner``, and in the first ``rounds`` rounds ``steps`` of Adam at ``lr`` (cosine decay) on batches of
    ``proxy``, tensors of the shared state alone.

    ``model`` is the run's whole model, in any weights for the shared tensors: its frozen ones are used. ``selection``
    decides which step to keep (None: every fifth proxy sample, which is then not distilled on). ``labels`` for the
    attack: ``"proxy"`` needs labels of the run's own classes, ``"teachers"`` takes what the teachers see. BatchNorm
    statistics that did not travel are estimated on the proxy inputs, for each model. Memory: one state per client.

    Raises :class:`~talaria.errors.DataError` for proxy labels beyond the model's classes and for proxy samples among
    the selection, and :class:`~talaria.errors.ConfigError` for options out of range.
    """

    inner: Aggregator
    model: Module = field(repr=False)
    proxy: Samples = field(repr=False)
    selection: Samples | None = field(default=None, repr=False)
    normalization: Normalization = field(default_factory=Normalization)
    attack: Attack = field(default_factory=Attack)
    labels: str = "proxy"
    rounds: int = 30
    steps: int = 500
    batch: int = 2048
    lr: float = 1e-3
    every: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("rounds", "steps", "batch", "every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"distillation: {name}={getattr(self, name)} must be at least 1")
        if not self.lr > 0 or self.labels not in ("proxy", "teachers"):
            raise ConfigError(
                f"distillation: lr={self.lr} must be above 0 and labels={self.labels!r} 'proxy' or 'teachers'"
            )
        learn, judge = self._divided()
        if len(learn) == 0 or len(judge) == 0:
            raise DataError("distillation: proxy and selection need at least one sample each; give more proxy data")
        classes = _classes(self.model, learn.x[:1])
        for name, samples in (("proxy", learn if self.labels == "proxy" else None), ("selection", judge)):
            if samples is not None and not 0 <= int(samples.y.min()) <= int(samples.y.max()) < classes:
                raise DataError(
                    f"distillation: {name} labels span {int(samples.y.min())}..{int(samples.y.max())}, but the model "
                    f"has classes 0..{classes - 1}; use data of the same classes, or labels='teachers' for the proxy"
                )
        both = _rows(learn.x) & _rows(judge.x)
        if both:
            raise DataError(
                f"distillation: {len(both)} samples are in both proxy and selection; what is distilled on cannot judge"
            )

    def init(self, shared: Tensors) -> Tensors:
        """The inner rule's state and the number of rounds so far."""
        return {ROUNDS: np.array(0, np.int64), **tensors.prefixed(self.inner.init(shared), INNER)}

    def apply(self, shared: Tensors, state: Tensors, updates: Iterable[Update]) -> tuple[Tensors, Tensors]:
        """New ``(shared, state)``; see the class."""
        kept = list(updates)
        mean, own = self.inner.apply(shared, tensors.under(state, INNER), kept)
        done = int(state[ROUNDS])
        if kept and done < self.rounds:
            mean = self.distil(mean, [self._teacher(shared, u) for u in kept], done)
        return mean, {ROUNDS: np.array(done + 1, np.int64), **tensors.prefixed(own, INNER)}

    def distil(self, mean: Tensors, teachers: list[Tensors], round: int = 0) -> Tensors:
        """``mean`` after distillation from whole ``teachers`` states, or ``mean`` itself where that is not better."""
        import torch

        from talaria.model.cloning import clone
        from talaria.model.state import array_of, beside

        learn, judge = self._divided()
        module = clone(self.model).eval()
        inputs, labels = beside(module, learn.x), beside(module, learn.y)
        _loaded(module, mean, inputs)
        wise = [{k: beside(module, v) for k, v in teacher.items()} for teacher in teachers]
        trained = {k: p for k, p in module.named_parameters() if k in mean}
        module.requires_grad_(False)
        for parameter in trained.values():
            parameter.requires_grad_(True)
        best, kept = _accuracy(module, judge), mean
        optimizer = torch.optim.Adam(trained.values(), lr=self.lr)
        draws = generator(self.seed, "", round, "distillation")
        for step in range(self.steps):
            index = torch.randint(len(learn), (min(self.batch, len(learn)),), generator=draws)
            x, y = inputs[index], labels[index]
            for group in optimizer.param_groups:
                group["lr"] = self.lr * 0.5 * (1 + cos(pi * step / self.steps))
            self._step(module, optimizer, wise, x, y, draws)
            if (step + 1) % self.every == 0 or step + 1 == self.steps:
                now = _accuracy(module, judge)
                if now > best:
                    every = module.named_parameters(remove_duplicate=False)  # a weight of two layers has two names
                    moved = {k: np.array(array_of(p, k), mean[k].dtype, order="C") for k, p in every if k in mean}
                    best, kept = now, {**mean, **moved}
        return kept

    def _step(
        self,
        module: Module,
        optimizer: torch.optim.Optimizer,
        teachers: Sequence[Mapping[str, Tensor]],
        x: Tensor,
        y: Tensor,
        draws: Generator,
    ) -> None:
        target = taught(module, teachers, x)
        loss = divergence(module(x), target)
        if self.attack.steps:
            goal = y if self.labels == "proxy" else target.argmax(1)
            worse = adversarial(module, x, goal, self.attack, self.normalization, draws)
            loss = loss + divergence(module(worse), taught(module, teachers, worse))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    def _teacher(self, shared: Tensors, update: Update) -> Tensors:
        """The client's whole model as dense tensors; a pruned one as its masked twin, exactly as it computes."""
        from talaria.model.cloning import clone
        from talaria.model.state import beside, load, state_of

        learn, _ = self._divided()
        module, mask = clone(self.model).eval(), update.mask
        values = {k: v.astype(shared[k].dtype) for k, v in update.tensors.items()}
        if update.kind == "delta":
            began = masks.gathered(shared, values, mask)
            values = {k: np.asarray(began[k] + v) for k, v in values.items()}
        dense = values if mask is None else masks.scatter(values, mask, tensors.only(shared, values))
        state = state_of(module)
        state |= {k: v.astype(state[k].dtype) for k, v in {**shared, **dense}.items() if k in state}
        load(module, state if mask is None else masks.apply_dense(state, mask))
        _estimated(module, shared, beside(module, learn.x))
        state = state_of(module)
        return state if mask is None else masks.apply_dense(state, mask)

    def _divided(self) -> tuple[Samples, Samples]:
        if self.selection is not None:
            return self.proxy, self.selection
        every = np.arange(len(self.proxy))
        return self.proxy.take(every[every % 5 != 0]), self.proxy.take(every[every % 5 == 0])


def taught(module: Module, teachers: Sequence[Mapping[str, Tensor]], x: Tensor) -> Tensor:
    """The mean of the teachers' logits (N, C), each in eval mode; their tensors stay as they are."""
    import torch
    from torch.func import functional_call

    with torch.no_grad():
        total: Tensor = functional_call(module, dict(teachers[0]), (x,), tie_weights=False)  # each name has its value
        for state in teachers[1:]:
            total = total + functional_call(module, dict(state), (x,), tie_weights=False)
        return total / len(teachers)


def _classes(model: Module, x: Array) -> int:
    import torch

    from talaria.model.cloning import clone
    from talaria.model.state import beside

    with torch.no_grad():
        return int(clone(model).eval()(beside(model, x)).shape[1])


def _loaded(module: Module, mean: Tensors, x: Tensor) -> None:
    from talaria.model.state import load, state_of

    own = state_of(module)
    missing = [k for k, v in mean.items() if k not in own or own[k].shape != v.shape]
    if missing:
        raise ModelError(f"distillation: the model does not hold {missing[:4]}; give the run's own model")
    load(module, {**own, **{k: v.astype(own[k].dtype) for k, v in mean.items()}})
    _estimated(module, mean, x)


def _estimated(module: Module, shared: Tensors, x: Tensor, batch: int = 512) -> None:
    """BatchNorm statistics that did not travel, from one pass over unlabelled inputs."""
    from talaria.model.batch_norm import estimated_anew, tracked

    layers = tracked(module, shared).values()
    if not layers or len(x) < 2:
        return
    with estimated_anew(layers):
        for index in tensors.spread(len(x), batch):
            module(x[index])


def _accuracy(module: Module, samples: Samples, batch: int = 512) -> float:
    import torch

    from talaria.model.state import array_of, beside

    with torch.no_grad():
        logits = torch.cat([module(x) for x in torch.split(beside(module, samples.x), batch)])
    return tasks.of(tasks.CLASSIFICATION).measured(array_of(logits), samples.y)[0]


def _rows(x: Array) -> set[bytes]:
    return {row.tobytes() for row in x}
