"""Hardware-aware on-device personalization. The public names are loaded when they are first used, so that a device
that only predicts never imports torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from talaria.device.budget import Budget
    from talaria.model.zoo import ModelSpec
    from talaria.personalizer import Personalizer
    from talaria.rounds import Member, Run
    from talaria.types import Plan, Recipe, Samples

__all__ = ["Budget", "Member", "ModelSpec", "Personalizer", "Plan", "Recipe", "Run", "Samples"]

_HOMES = {
    "Budget": "talaria.device.budget",
    "Member": "talaria.rounds",
    "ModelSpec": "talaria.model.zoo",
    "Personalizer": "talaria.personalizer",
    "Plan": "talaria.types",
    "Recipe": "talaria.types",
    "Run": "talaria.rounds",
    "Samples": "talaria.types",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'talaria' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """The public names alone: what else stands here is nobody's to use."""
    return sorted(__all__)
