"""Per-FedAvg, and the three disjoint batches that each of its steps reads."""

from talaria.algorithms.perfedavg.perfedavg import PerFedAvg as PerFedAvg
