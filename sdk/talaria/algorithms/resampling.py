"""Weighted re-sampling of classes: which samples a round trains on, and the class frequencies that this makes."""

import torch
from torch import Generator, Tensor


def resampled(y: Tensor, rho: float, draws: Generator) -> Tensor:
    """``len(y)`` indices with P(b) ∝ n_{y_b}^−ρ: 0 keeps the data as it is, 1 makes the classes equally frequent.

    A class drawn more often than it has samples repeats them in turn; one drawn less often is thinned.
    """
    if rho == 0:
        return torch.arange(len(y))
    held, count = torch.unique(y, return_counts=True)
    drawn = torch.multinomial(count.double() ** (1 - rho), len(y), replacement=True, generator=draws)
    wanted = torch.bincount(drawn, minlength=len(held))
    out = []
    for label, n in zip(held.tolist(), wanted.tolist(), strict=True):
        own = (y == label).nonzero().flatten()
        rounds = -(-n // len(own))
        shuffled = [own[torch.randperm(len(own), generator=draws)] for _ in range(rounds)]
        out.append(torch.cat(shuffled)[:n] if shuffled else own[:0])
    return torch.cat(out)


def sampled_log_prior(count: Tensor, rho: float) -> Tensor:
    """log π̃_c (C,): the class frequencies under the re-sampling, with one sample's weight for an absent class."""
    weight = torch.where(count > 0, count.clamp(min=1) ** (1 - rho), 1.0)
    return torch.log(weight / weight.sum())
