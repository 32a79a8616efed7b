"""Thorki: the algorithm, its small personal model, and the gate that weighs both models."""

from talaria.algorithms.thorki.thorki import Thorki as Thorki
