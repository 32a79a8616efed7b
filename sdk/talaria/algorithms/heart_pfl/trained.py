"""U: the part of a model that HEART-PFL trains and sends."""

from __future__ import annotations

from collections.abc import Collection
from math import prod
from typing import TYPE_CHECKING

from talaria.algorithms.sharing import WHOLE
from talaria.errors import ModelError
from talaria.model.split import Split

if TYPE_CHECKING:
    from torch.nn import Module


def sent(split: Split, trains: str) -> tuple[str, ...]:
    """U: the keys that are trained and may travel, in the model's order; ``trains`` as in the algorithm.

    Raises:
        ModelError: where ``trains="adapters"`` and the model has none.
    """
    if trains == "full" or (trains == "auto" and not split.adapters):
        wanted = set(split.travels(*WHOLE))
    elif not split.adapters:
        raise ModelError("heart_pfl: trains='adapters', but the model has none; add adapters, or trains='full'")
    else:
        wanted = set(split.travels("adapters", "head")) | (_norms(split) & set(split.travels("body")))
    return tuple(k for k in split.keys if k in wanted)


def follow(split: Split, sent: Collection[str]) -> list[str]:
    """U and the statistics of the BatchNorms in it: what moves in training."""
    owners = {k.rpartition(".")[0] for k in sent}
    buffers = split.statistics | split.counters
    return [k for k in split.keys if k in sent or (k in buffers and k.rpartition(".")[0] in owners)]


def trainable(model: Module, split: Split) -> int:
    """Parameters that are trained and sent: 1,459,428 for ResNet-18 with the paper's adapters and 100 classes."""
    keys = set(sent(split, "auto"))
    return sum(prod(p.shape) for n, p in model.named_parameters() if n in keys)


def _norms(split: Split) -> set[str]:
    """Keys of the BatchNorms outside of downsampling branches, which the paper's names do not match."""
    norms = {k.rpartition(".")[0] for k in split.statistics if k.endswith(".running_mean")}
    owners = {k: k.rpartition(".")[0] for k in split.keys}
    return {k for k, owner in owners.items() if owner in norms and "downsample" not in owner.split(".")}
