"""The server half of an algorithm: rules that fold updates, and wrappers around them, by name."""

from talaria.aggregate.base import Aggregator as Aggregator
from talaria.aggregate.registry import AGGREGATORS as AGGREGATORS
from talaria.aggregate.registry import load as load
