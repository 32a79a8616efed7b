"""What a round of pFedGM minimizes: cross-entropy, classes apart, samples near their class, virtual features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from talaria.aggregate.class_statistics import MEAN
from talaria.algorithms.pfedgm.head import CENTRES, HELD
from talaria.algorithms.pfedgm.navigator import (
    ANCHORS,
    SCALE,
    Projection,
    last_layer,
    scores,
    spread_apart,
)
from talaria.algorithms.pfedgm.resampling import sampled_log_prior, virtual_features
from talaria.seeds import Draws
from talaria.tensors import Array, Tensors
from talaria.training.interface import Task
from talaria.training.objectives import INTO, Slopes, cross_entropy


@dataclass(frozen=True)
class Navigation:
    """CE(navigator) + η_inter mean relu(m − ||V_c − V_c'||)² + η_intra ||z − μ^loc_y||²/k + ω CE(virtual); an
    :class:`~talaria.training.objectives.Objective` whose own tensors are the anchors and their scale.

    The options are those of :class:`~talaria.algorithms.pfedgm.PFedGM`, ``smoothing`` is the recipe's. ``offset`` (C,)
    is added to the scores of samples, ``known`` has the class means of an earlier round and which of them are held,
    ``sample`` draws virtual features and their labels.
    """

    layer: str
    project: Projection
    offset: Array
    inter: float
    intra: float
    virtual: float
    margin: float
    smoothing: float = 0.0
    known: tuple[Array, Array] | None = None
    sample: Callable[[], tuple[Array, Array]] | None = None

    @property
    def taps(self) -> Sequence[str]:
        """What enters the last layer."""
        return (INTO + self.layer,)

    @property
    def own(self) -> Sequence[str]:
        """The navigator's tensors."""
        return (ANCHORS, SCALE)

    def __call__(self, seen: Tensors, own: Tensors, x: Array, y: Array) -> Slopes:
        inputs, anchors, scale = seen[INTO + self.layer], own[ANCHORS], own[SCALE]
        matrix = self.project.matrix(inputs.shape[1], inputs.dtype)
        z = inputs @ matrix.T
        loss, along, apart, wider = _judged(z, y, anchors, scale, self.offset, self.smoothing)
        far, pushed = spread_apart(anchors, self.margin)
        loss, apart = loss + self.inter * far, apart + _scaled(self.inter, pushed)
        if self.known is not None:
            centres, held = self.known
            away = (z - centres[y]) * held[y].astype(z.dtype)[:, None]
            loss += self.intra * float(np.square(away).sum() / away.size)
            along = along + _scaled(self.intra * 2 / away.size, away)
        if self.sample is not None:
            more = _judged(*self.sample(), anchors, scale, 0.0, self.smoothing)
            loss, apart = loss + self.virtual * more[0], apart + _scaled(self.virtual, more[2])
            wider = wider + _scaled(self.virtual, more[3])
        mine = {ANCHORS: apart, SCALE: np.asarray(wider, scale.dtype)}
        return Slopes(loss, {INTO + self.layer: along @ matrix}, mine)


def _judged(
    z: Array, y: Array, anchors: Array, scale: Array, offset: Array | float, smoothing: float
) -> tuple[float, Array, Array, Array]:
    """The navigator's cross-entropy on features (N, k), and its gradients by them, the anchors and the scale."""
    found = scores(z, anchors, scale)
    loss, slope = cross_entropy(found + offset, y, smoothing)
    sharp = np.exp(-2 * scale)
    along = sharp * (slope @ anchors)
    apart = sharp * (slope.T @ z - slope.sum(0)[:, None] * anchors)
    return loss, along, apart, np.asarray(-2 * (slope * found).sum())


def _scaled(factor: float, slope: Array) -> Array:
    return np.asarray(factor * slope, slope.dtype)


def objective(
    task: Task,
    shared: Tensors,
    private: Tensors,
    draws: Draws,
    project: Projection,
    *,
    rho: float,
    inter: float,
    intra: float,
    virtual: float,
    margin: float,
) -> Navigation:
    """The objective of one training; virtual features come from ``draws``. The term of η_intra needs the class means
    of an earlier round among ``private``."""
    count = np.bincount(task.train.y, minlength=task.classes).astype(np.float32)
    known = CENTRES in private and private[CENTRES].shape == shared[MEAN].shape  # not before a run that follows
    return Navigation(
        last_layer(task.split),
        project,
        sampled_log_prior(count, rho),
        inter,
        intra,
        virtual,
        margin,
        task.recipe.smoothing,
        (private[CENTRES], private[HELD]) if known else None,
        virtual_features(count, shared, draws) if virtual else None,
    )
