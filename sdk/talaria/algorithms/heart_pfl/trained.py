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


def sent(model: Module, split: Split, trains: str) -> tuple[str, ...]:
    """U: the keys that are trained and may travel, in the model's order; ``trains`` as in the algorithm.

    Raises:
        ModelError: where ``trains="adapters"`` and the model has none.
    """
    if trains == "full" or (trains == "auto" and not split.adapters):
        wanted = set(split.travels(*WHOLE))
    elif not split.adapters:
        raise ModelError("heart_pfl: trains='adapters', but the model has none; add adapters, or trains='full'")
    else:
        wanted = set(split.travels("adapters", "head")) | (_norms(model) & set(split.travels("body")))
    return tuple(k for k in split.keys if k in wanted)


def follow(split: Split, sent: Collection[str]) -> list[str]:
    """U and the statistics of the BatchNorms in it: what moves in training."""
    owners = {k.rpartition(".")[0] for k in sent}
    buffers = split.statistics | split.counters
    return [k for k in split.keys if k in sent or (k in buffers and k.rpartition(".")[0] in owners)]


def trainable(model: Module, split: Split) -> int:
    """Parameters that are trained and sent: 1,459,428 for ResNet-18 with the paper's adapters and 100 classes."""
    keys = set(sent(model, split, "auto"))
    return sum(prod(p.shape) for n, p in model.named_parameters() if n in keys)


def _norms(model: Module) -> set[str]:
    """Keys of the BatchNorms outside of downsampling branches, which the paper's names do not match."""
    from torch.nn.modules.batchnorm import _BatchNorm

    layers = (n for n, m in model.named_modules() if isinstance(m, _BatchNorm) and "downsample" not in n.split("."))
    return {f"{n}.{k}" for n in layers for k in model.get_submodule(n).state_dict()}
