"""Networks that read tokens: whole numbers as float32, which are cast where they are looked up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Embedding, EmbeddingBag, Module

from talaria.errors import DataError
from talaria.model.called import by_place
from talaria.tensors import Array


def vocabulary(module: Module) -> int:
    """How many kinds every embedding of ``module`` knows, from 0 up; 0 where it has none, and reads numbers."""
    known = [one.num_embeddings for one in module.modules() if isinstance(one, Embedding | EmbeddingBag)]
    return min(known, default=0)


def as_numbers(module: Module) -> Module:
    """``module``, whose embeddings take float32 for the whole numbers that it holds: samples travel as float32."""
    for one in module.modules():
        if isinstance(one, Embedding | EmbeddingBag) and _cast not in one._forward_pre_hooks.values():
            one.register_forward_pre_hook(_cast, with_kwargs=True)
    return module


def _cast(module: Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    (places, *rest), named = by_place(module, given, named)
    return (places.long() if places.is_floating_point() else places, *rest), named


def example(module: Module, shape: tuple[int, ...], batch: int) -> Tensor:
    """float32 input (batch, \\*shape) that ``module`` can read, always the same one: standard normal, or tokens."""
    draws = torch.Generator().manual_seed(0)
    kinds = vocabulary(module)
    if kinds:
        return torch.randint(kinds, (batch, *shape), generator=draws).float()
    return torch.randn(batch, *shape, generator=draws)


def require_known(module: Module, samples: Mapping[str, Array]) -> None:
    """Raise :class:`DataError` where ``module`` has no entry for a token in ``samples``: by whose they are, such as
    ``"anna's samples"``, float32 (N, ...)."""
    if vocabulary(module):
        for who, x in samples.items():
            if len(x):
                _require_known(module.eval(), x, who)


@torch.no_grad()
def _require_known(module: Module, x: Array, who: str) -> None:
    flat = x.reshape(len(x), -1)
    outer = np.unique([flat.min(1).argmin(), flat.max(1).argmax()])  # the samples with the least and the largest value
    try:
        module(torch.from_numpy(x[outer]))
    except IndexError:
        raise DataError(
            f"data: {who} span {x.min():g}..{x.max():g}, and the model has no entry for all of these in its "
            "embeddings; give whole numbers from 0 up and a table as long, and standardize=false (--data-option) so "
            "that they stay as they are"
        ) from None
