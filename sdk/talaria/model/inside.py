"""Low-rank adapters inside layers that weigh several times: attention and recurrent layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.func import functional_call
from torch.nn import Module, ModuleDict

from talaria.model import attention, recurrent


def open_to(layer: Module) -> bool:
    """Whether each matrix of ``layer`` can have factors beside it: torch's own attention and recurrent layers."""
    return attention.prunable(layer) or recurrent.prunable(layer)


def matrices(base: Module) -> dict[str, str]:
    """The state-dict keys of a layer's matrices, by the names of their factors: ``in_proj`` and ``out_proj`` of
    attention, ``weight_ih_l0`` and so on of a recurrent layer."""
    keys = [key for key, weight in base.named_parameters() if weight.dim() == 2]
    return {key.removesuffix("weight").rstrip("._"): key for key in keys}


class Around(Module):
    """What stands around ``base``, a layer of a network: what that asks of the layer, such as ``hidden_size`` or
    ``in_features``, the base answers."""

    base: Module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "base":
                raise
            return getattr(self.base, name)


class Inside(Around):
    """``base`` with ``W + B A`` for each of its matrices ``W``; ``adapter`` holds the factors by :func:`matrices`."""

    _qkv_same_embed_dim = False  # torch's encoder layers then call it, and read no weights past it

    def __init__(self, base: Module, factors: Mapping[str, Module]) -> None:
        super().__init__()
        self.base, self.adapter = base, ModuleDict(factors)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the base gives with its weights so changed; with its own where the factors were taken away."""
        if not self.adapter:
            return self.base(*args, **kwargs)
        return functional_call(self.base, self.summed(), args, kwargs)

    def summed(self) -> dict[str, Tensor]:
        """``W + B A`` by the keys of the base."""
        own, factors = dict(self.base.named_parameters()), dict(self.adapter.named_parameters())
        out = {}
        for name, key in matrices(self.base).items():
            out[key] = own[key] + factors[f"{name}.up.weight"] @ factors[f"{name}.down.weight"]
        return out


def base_of(layer: Module) -> Module:
    """The layer itself, without the adapters inside."""
    return layer.base if isinstance(layer, Inside) else layer
