"""LG-FedAvg, and the ensemble of its members' models."""

from talaria.algorithms.lg_fedavg.lg_fedavg import LGFedAvg as LGFedAvg
