"""Hardware-aware on-device personalization. The public names are loaded when they are first used, so that a device
that only predicts never imports torch."""

from typing import TYPE_CHECKING

from talaria import lazy

if TYPE_CHECKING:
    from talaria.federated.rounds import Member, Run
    from talaria.model.zoo import ModelSpec
    from talaria.personalizer import Personalizer
    from talaria.planning.budget import Budget
    from talaria.types import Plan, Recipe, Samples

__all__ = ["Budget", "Member", "ModelSpec", "Personalizer", "Plan", "Recipe", "Run", "Samples"]

_HOMES = {
    "Budget": "talaria.planning.budget",
    "Member": "talaria.federated.rounds",
    "ModelSpec": "talaria.model.zoo",
    "Personalizer": "talaria.personalizer",
    "Plan": "talaria.types",
    "Recipe": "talaria.types",
    "Run": "talaria.federated.rounds",
    "Samples": "talaria.types",
}

__getattr__, __dir__ = lazy.attach(__name__, _HOMES)
