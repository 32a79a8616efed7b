"""Hardware-aware on-device personalization. The public names are loaded when they are first used, so that a device
that only predicts never imports torch."""

import os
from typing import TYPE_CHECKING

from talaria import lazy

# ONNX Runtime's own builds tell Microsoft what they run, under a lasting name of the machine. They read this once, when
# they are first imported; who wants it sets the variable to 0.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

if TYPE_CHECKING:
    from talaria import data
    from talaria.aggregate.base import Aggregator
    from talaria.algorithms.base import Algorithm, Card
    from talaria.data.federated import Federated
    from talaria.errors import (
        AggregationError,
        BudgetError,
        ConfigError,
        DataError,
        ModelError,
        StateError,
        TalariaError,
        TransportError,
        WireError,
    )
    from talaria.federated.run import Member, Run
    from talaria.model.masks import ChannelMask
    from talaria.model.spec import AdapterSpec, ModelSpec
    from talaria.model.split import Split
    from talaria.personalizer import Personalizer
    from talaria.planning.budget import Budget
    from talaria.planning.plan import Plan
    from talaria.simulation.experiment import simulate
    from talaria.simulation.result import Result
    from talaria.simulation.resume import resume
    from talaria.training.interface import Task
    from talaria.types import Recipe, Samples, Update

__all__ = [
    "AdapterSpec",
    "AggregationError",
    "Aggregator",
    "Algorithm",
    "Budget",
    "BudgetError",
    "Card",
    "ChannelMask",
    "ConfigError",
    "DataError",
    "Federated",
    "Member",
    "ModelError",
    "ModelSpec",
    "Personalizer",
    "Plan",
    "Recipe",
    "Result",
    "Run",
    "Samples",
    "Split",
    "StateError",
    "TalariaError",
    "Task",
    "TransportError",
    "Update",
    "WireError",
    "__version__",
    "data",
    "resume",
    "simulate",
]
__version__ = "0.3.0"

_HOMES = {
    "AdapterSpec": "talaria.model.spec",
    "Aggregator": "talaria.aggregate.base",
    "Algorithm": "talaria.algorithms.base",
    "Budget": "talaria.planning.budget",
    "Card": "talaria.algorithms.base",
    "ChannelMask": "talaria.model.masks",
    "Federated": "talaria.data.federated",
    "Member": "talaria.federated.run",
    "ModelSpec": "talaria.model.spec",
    "Personalizer": "talaria.personalizer",
    "Plan": "talaria.planning.plan",
    "Recipe": "talaria.types",
    "Result": "talaria.simulation.result",
    "Run": "talaria.federated.run",
    "Samples": "talaria.types",
    "Split": "talaria.model.split",
    "Task": "talaria.training.interface",
    "Update": "talaria.types",
    "data": "talaria.data",
    "resume": "talaria.simulation.resume",
    "simulate": "talaria.simulation.experiment",
    **dict.fromkeys(
        (
            "AggregationError",
            "BudgetError",
            "ConfigError",
            "DataError",
            "ModelError",
            "StateError",
            "TalariaError",
            "TransportError",
            "WireError",
        ),
        "talaria.errors",
    ),
}

__getattr__, _ = lazy.attach(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted(__all__)
