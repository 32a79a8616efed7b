"""Hermes: the algorithm, how it chooses channels, and what a device keeps of its own values."""

from talaria.algorithms.hermes.hermes import Hermes as Hermes
