"""Layers whose weight is computed from a direction and a length, as torch.nn.utils.parametrizations.weight_norm has it
(Salimans and Kingma 2016)."""

from __future__ import annotations

from typing import Any

from torch.nn import Module
from torch.nn.utils.parametrizations import _SpectralNorm, _WeightNorm
from torch.nn.utils.parametrize import is_parametrized


def is_weight_normed(module: Module) -> bool:
    """Whether a module's weight, and nothing else of it, is computed so."""
    return _computes(module, _WeightNorm)


def is_spectral_normed(module: Module) -> bool:
    """Whether a module's weight, and nothing else of it, is divided by its largest singular value."""
    return _computes(module, _SpectralNorm)


def _computes(module: Module, kind: type[Module]) -> bool:
    held: Any = module.parametrizations if is_parametrized(module) else {}
    return list(held) == ["weight"] and [type(one) for one in held["weight"]] == [kind]
