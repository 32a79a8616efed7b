"""The server half of an algorithm: rules that fold updates, and wrappers around them, by name."""

from typing import TYPE_CHECKING

from talaria.aggregate.base import Aggregator as Aggregator
from talaria.lazy import attach

if TYPE_CHECKING:
    from talaria.aggregate.registry import AGGREGATORS as AGGREGATORS
    from talaria.aggregate.registry import load as load

__getattr__, __dir__ = attach(__name__, dict.fromkeys(("AGGREGATORS", "load"), "talaria.aggregate.registry"))
