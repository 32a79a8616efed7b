"""CIFAR-100 cut once for :mod:`cifar100_at_budget`: a coordinator's part, and 20 clients of Dirichlet(0.1)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from talaria.simulate.data import npz
from talaria.simulate.data.partition import dirichlet, mixed, mixes_of, stratified

CLASSES = 100
CLIENTS, ALPHA, OWN, TESTS = 20, 0.1, 100, 100
"""Clients, skew of their labels, and images of each to learn from and to test on."""
PIXELS = 64


def read(path: Path, public: int, seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    """The fixed cut: pixels as bytes (N, 3, 32, 32), and labels (N,)."""
    raw = npz.read(path, ("train_x", "train_y", "test_x", "test_y"), ("classes",))
    labels = raw["train_y"]
    rest, _, kept = stratified(labels, 0.0, public / len(labels), np.random.default_rng([seed, 0]))
    parts = dirichlet(labels[rest], CLIENTS, ALPHA, seed, min_samples=OWN)
    parts = [np.random.default_rng([seed, 1, k]).permutation(part)[:OWN] for k, part in enumerate(parts)]
    tests = mixed(raw["test_y"], mixes_of(labels[rest], parts, CLASSES), TESTS, seed)

    def some(which: str, index: np.ndarray[Any, Any]) -> tuple[Tensor, Tensor]:
        pixels = torch.from_numpy(raw[f"{which}_x"][index]).permute(0, 3, 1, 2).contiguous()
        return pixels, torch.from_numpy(raw[f"{which}_y"][index].astype(np.int64))

    own, tested = rest[np.concatenate(parts)], np.concatenate(tests)
    return {"public": some("train", kept), "own": some("train", own), "test": some("test", tested)}


def inputs(pixels: Tensor) -> Tensor:
    """What the published weights expect, at :data:`PIXELS`."""
    return F.interpolate(pixels.float() / 127.5 - 1, (PIXELS, PIXELS), mode="bilinear", align_corners=False)
