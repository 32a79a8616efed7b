"""CIFAR-100 cut once for :mod:`cifar100_at_budget`: a coordinator's part, and 20 clients of Dirichlet(0.1)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from talaria import npz
from talaria.data.partition import dirichlet, mixed, mixes_of, stratified

CLASSES = 100
CLIENTS, ALPHA, OWN, TESTS = 20, 0.1, 100, 100
"""Clients, skew of their labels, and images of each to learn from and to test on."""
PIXELS = 64
SHIFT = 4
"""Most pixels of 32 that a view is moved by, each way."""


def read(path: Path, public: int, splits: int, seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    """The fixed cuts: pixels as bytes (N, 3, 32, 32), and labels (N,). The clients' images are those of all splits, one
    after another; the coordinator's are in none."""
    raw = npz.read(path, ("train_x", "train_y", "test_x", "test_y"), ("classes",))
    labels = raw["train_y"]
    rest, _, kept = stratified(labels, 0.0, public / len(labels), np.random.default_rng([seed, 0]))
    own, tests = [], []
    for split in range(seed, seed + splits):
        parts = dirichlet(labels[rest], CLIENTS, ALPHA, split, min_samples=OWN)
        parts = [np.random.default_rng([split, 1, k]).permutation(part)[:OWN] for k, part in enumerate(parts)]
        own += [rest[part] for part in parts]
        tests += mixed(raw["test_y"], mixes_of(labels[rest], parts, CLASSES), TESTS, split)

    def some(which: str, index: np.ndarray[Any, Any]) -> tuple[Tensor, Tensor]:
        pixels = torch.from_numpy(raw[f"{which}_x"][index]).permute(0, 3, 1, 2).contiguous()
        return pixels, torch.from_numpy(raw[f"{which}_y"][index].astype(np.int64))

    return {
        "public": some("train", kept),
        "own": some("train", np.concatenate(own)),
        "test": some("test", np.concatenate(tests)),
    }


def view(pixels: Tensor, number: int, seed: int) -> Tensor:
    """One of the ways to look at ``pixels``: as they are, mirrored, then moved by up to four pixels and mirrored at
    random, each image on its own."""
    if number < 2:
        return pixels.flip(3) if number else pixels
    draws = np.random.default_rng([seed, 2, number])
    moved = torch.empty_like(pixels)
    padded = F.pad(pixels, (SHIFT, SHIFT, SHIFT, SHIFT))
    for i, (down, right, mirror) in enumerate(draws.integers(0, (2 * SHIFT + 1, 2 * SHIFT + 1, 2), (len(pixels), 3))):
        part = padded[i, :, down : down + pixels.shape[2], right : right + pixels.shape[3]]
        moved[i] = part.flip(2) if mirror else part
    return moved


def inputs(pixels: Tensor) -> Tensor:
    """What the published weights expect, at :data:`PIXELS`."""
    return F.interpolate(pixels.float() / 127.5 - 1, (PIXELS, PIXELS), mode="bilinear", align_corners=False)
