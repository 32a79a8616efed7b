"""Federated datasets by name: :func:`load`."""

from talaria.data.federated import Client, Federated
from talaria.data.registry import NAMES, load, options_of

__all__ = ["NAMES", "Client", "Federated", "load", "options_of"]
