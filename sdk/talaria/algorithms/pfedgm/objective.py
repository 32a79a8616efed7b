"""What a round of pFedGM minimizes: cross-entropy, classes apart, samples near their class, virtual features."""

from typing import cast

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn import functional as F

from talaria.algorithms.pfedgm.navigator import Navigated, spread_apart
from talaria.algorithms.pfedgm.resampling import sampled_log_prior, virtual_features
from talaria.model.state import tensor_of
from talaria.seeds import Draws
from talaria.tensors import Tensors
from talaria.training.engine import Objective
from talaria.types import Task

CENTRES, HELD = "own/centres", "own/held"
"""Among a device's private tensors: its class means (C, k), and which classes it holds (C,)."""


def objective(
    task: Task,
    shared: Tensors,
    private: Tensors,
    draws: Draws,
    *,
    rho: float,
    inter: float,
    intra: float,
    virtual: float,
    margin: float,
) -> Objective:
    """CE(navigator) + η_inter Σ relu(m − ||V_c − V_c'||)² + η_intra ||z − μ^loc_y||²/k + ω CE(navigator, virtual).

    The options are those of :class:`~talaria.algorithms.pfedgm.PFedGM`; virtual features come from ``draws``. The term
    of η_intra needs the class means of an earlier round among ``private``.
    """
    count = torch.bincount(tensor_of(task.train.y), minlength=task.classes).float()
    offset = sampled_log_prior(count, rho)
    sample = virtual_features(count, shared, draws) if virtual else None
    centres, held = (tensor_of(private[k]) if k in private else None for k in (CENTRES, HELD))

    def of_batch(module: Module, x: Tensor, y: Tensor) -> Tensor:
        model = cast(Navigated, module)
        z = model(x)
        loss = F.cross_entropy(model.scores(z) + offset, y)
        loss = loss + inter * spread_apart(model.anchors, margin)
        if centres is not None and held is not None:
            known = held[y].float()
            loss = loss + intra * ((z - centres[y]).square().mean(1) * known).mean()
        if sample is not None:
            features, labels = sample()
            loss = loss + virtual * F.cross_entropy(model.scores(features), labels)
        return loss

    return of_batch
