"""Every algorithm goes the way that it went when its vectors were taken; trajectories.py says how to take them."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from trajectories import CASES, VECTORS, apart, digest, trajectory

LIMIT, SCORES = 1 << 12, 1 << 16
"""Roundings by which three rounds may differ between two processors, and those of pFedGM, whose head is scaled by the
inverse of a small covariance. Chosen, not measured: three rounds add up roundings of each step."""
SENSITIVE = ("pfedgm", "ffgg gradient")  # with other kernels (default, SSE41) the latter moved by 12,006 roundings


def test_there_is_a_vector_for_every_case() -> None:
    with np.load(VECTORS, allow_pickle=False) as taken:
        assert set(taken) == {f"{name} | {setting}" for name, setting in CASES}


@pytest.mark.parametrize(("name", "setting"), CASES)
def test_three_rounds_go_as_they_went(name: str, setting: str) -> None:
    with np.load(VECTORS, allow_pickle=False) as taken:
        wanted = taken[f"{name} | {setting}"]
    tensors = trajectory(name, setting)
    assert len(tensors) == len(wanted)
    limit = SCORES if name.startswith(SENSITIVE) else LIMIT
    for key, now, then in zip(tensors, digest(tensors), wanted, strict=True):
        assert apart(now, then) <= limit, key
