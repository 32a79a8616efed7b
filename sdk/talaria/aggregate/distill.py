"""Adaptive knowledge transfer: after averaging, the clients' models teach the mean on a proxy set, by clean and by
adversarial inputs (the server half of HEART-PFL, WACV 2026, arXiv:2603.24209, as the method intends it).

    J(a, b) = KL(p_a || p_b) + KL(p_b || p_a) = Σ_c (p_a − p_b)(log p_a − log p_b)
    L = J(z_S(x), z_T(x)) + J(z_S(x'), z_T(x')),  z_T the mean of the clients' logits

x' comes from projected gradient ascent on the present student, in pixel space, one per batch and the same for student
and teachers (reconstructed: the release makes another for each). All models stand in eval mode, so that nothing but
the trained tensors moves. The best step on samples that are not distilled on is kept, and the mean itself where no
step is better. Proxy data and model are resources of the server and never travel.
"""

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from math import cos, pi

import torch
from torch import Generator, Tensor
from torch.func import functional_call
from torch.nn import Module
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from talaria import tensors
from talaria.aggregate.adversarial import Attack, Normalization, adversarial
from talaria.aggregate.base import Aggregator
from talaria.errors import ConfigError, DataError, ModelError
from talaria.model import masks
from talaria.seeds import seed_of
from talaria.tensors import Tensors
from talaria.types import Samples, Update

ROUNDS = "akt/rounds"
INNER = "akt/inner/"


def divergence(a: Tensor, b: Tensor) -> Tensor:
    """J of two batches of logits (N, C), averaged over N; at least 0, symmetric, 0 for equal distributions."""
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
        with torch.no_grad():
            classes = deepcopy(self.model).eval()(learn.x[:1]).shape[1]
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
        return {ROUNDS: torch.zeros((), dtype=torch.int64), **tensors.prefixed(self.inner.init(shared), INNER)}

    def apply(self, shared: Tensors, state: Tensors, updates: Iterable[Update]) -> tuple[Tensors, Tensors]:
        """New ``(shared, state)``; see the class."""
        kept = list(updates)
        mean, own = self.inner.apply(shared, tensors.under(state, INNER), kept)
        done = int(state[ROUNDS])
        if kept and done < self.rounds:
            mean = self.distil(mean, [self._teacher(shared, u) for u in kept], done)
        return mean, {ROUNDS: torch.tensor(done + 1), **tensors.prefixed(own, INNER)}

    def distil(self, mean: Tensors, teachers: list[Tensors], round: int = 0) -> Tensors:
        """``mean`` after distillation from whole ``teachers`` states, or ``mean`` itself where that is not better."""
        learn, judge = self._divided()
        module = deepcopy(self.model).eval()
        _loaded(module, mean, learn.x)
        trained = {k: p for k, p in module.named_parameters() if k in mean}
        module.requires_grad_(False)
        for parameter in trained.values():
            parameter.requires_grad_(True)
        best, kept = _accuracy(module, judge), mean
        optimizer = torch.optim.Adam(trained.values(), lr=self.lr)
        draws = Generator().manual_seed(seed_of(self.seed, "", round, "distillation"))
        for step in range(self.steps):
            index = torch.randint(len(learn), (min(self.batch, len(learn)),), generator=draws)
            x, y = learn.x[index], learn.y[index]
            for group in optimizer.param_groups:
                group["lr"] = self.lr * 0.5 * (1 + cos(pi * step / self.steps))
            self._step(module, optimizer, teachers, x, y, draws)
            if (step + 1) % self.every == 0 or step + 1 == self.steps:
                now = _accuracy(module, judge)
                if now > best:
                    moved = {k: p.detach().to(mean[k]).clone() for k, p in trained.items()}
                    best, kept = now, {**mean, **moved}
        return kept

    def _step(
        self,
        module: Module,
        optimizer: torch.optim.Optimizer,
        teachers: list[Tensors],
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
        learn, _ = self._divided()
        module, mask = deepcopy(self.model).eval(), update.mask
        values = {k: v.to(shared[k]) for k, v in update.tensors.items()}
        if update.kind == "delta":
            began = masks.gathered(shared, values, mask)
            values = {k: began[k] + v for k, v in values.items()}
        dense = values if mask is None else masks.scatter(values, mask, tensors.only(shared, values))
        state = module.state_dict()
        state |= {k: v.to(state[k]) for k, v in {**shared, **dense}.items() if k in state}
        module.load_state_dict(state if mask is None else masks.apply_dense(state, mask))
        _estimated(module, shared, learn.x)
        state = module.state_dict()
        return tensors.copied(state) if mask is None else masks.apply_dense(state, mask)

    def _divided(self) -> tuple[Samples, Samples]:
        if self.selection is not None:
            return self.proxy, self.selection
        every = torch.arange(len(self.proxy))
        return self.proxy.take(every[every % 5 != 0]), self.proxy.take(every[every % 5 == 0])


@torch.no_grad()
def taught(module: Module, teachers: list[Tensors], x: Tensor) -> Tensor:
    """The mean of the teachers' logits (N, C), each in eval mode; their tensors stay as they are."""
    total = functional_call(module, teachers[0], (x,))
    for state in teachers[1:]:
        total = total + functional_call(module, state, (x,))
    mean: Tensor = total / len(teachers)
    return mean


def _loaded(module: Module, mean: Tensors, x: Tensor) -> None:
    own = module.state_dict()
    missing = [k for k, v in mean.items() if k not in own or own[k].shape != v.shape]
    if missing:
        raise ModelError(f"distillation: the model does not hold {missing[:4]}; give the run's own model")
    module.load_state_dict({**own, **{k: v.to(own[k]) for k, v in mean.items()}})
    _estimated(module, mean, x)


@torch.no_grad()
def _estimated(module: Module, shared: Tensors, x: Tensor, batch: int = 512) -> None:
    """BatchNorm statistics that did not travel, from one pass over unlabelled inputs."""
    layers = [
        m
        for n, m in module.named_modules()
        if isinstance(m, _BatchNorm) and m.track_running_stats and f"{n}.running_mean" not in shared
    ]
    if not layers or len(x) < 2:
        return
    momenta = [layer.momentum for layer in layers]
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None
        layer.train()
    for piece in torch.split(x, batch):
        if len(piece) > 1:
            module(piece)
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum
        layer.eval()


@torch.no_grad()
def _accuracy(module: Module, samples: Samples, batch: int = 512) -> float:
    right = 0
    for index in torch.split(torch.arange(len(samples)), batch):
        right += int((module(samples.x[index]).argmax(1) == samples.y[index]).sum())
    return right / len(samples)


def _rows(x: Tensor) -> set[bytes]:
    return {row.numpy().tobytes() for row in x.detach().cpu()}
