"""Federated datasets by name: :func:`load`."""

from talaria.simulate.data.catalog import NAMES, load, options_of
from talaria.simulate.data.federated import Client, Federated

__all__ = ["NAMES", "Client", "Federated", "load", "options_of"]
