"""Every random draw derives from (seed, client, round, purpose), so that a run can be repeated anywhere."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Generator


def seed_of(seed: int, client: str, round: int, purpose: str) -> int:
    """A 63-bit seed; draws for different purposes never disturb each other.

    >>> seed_of(0, "anna", 3, "shuffle") == seed_of(0, "anna", 3, "shuffle")
    True
    >>> seed_of(0, "anna", 3, "shuffle") == seed_of(0, "anna", 3, "dropout")
    False
    """
    text = f"{seed}\x1f{client}\x1f{round}\x1f{purpose}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1


def words(count: int, seed: int, client: str, round: int, purpose: str) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """``count`` random words, uint64: Philox 4x64-10 with the key of :func:`seed_of`, its counter from 1 on.

    They are the same on every machine and in every version of numpy, and are made in any language.
    """
    return np.random.Philox(key=seed_of(seed, client, round, purpose)).random_raw(count)


def order(count: int, seed: int, client: str, round: int, purpose: str) -> list[int]:
    """A random order of 0..count-1: that of as many :func:`words`, the earlier first between equal ones.

    >>> sorted(order(5, 0, "", 3, "cohort"))
    [0, 1, 2, 3, 4]
    """
    drawn: list[int] = np.argsort(words(count, seed, client, round, purpose), kind="stable").tolist()
    return drawn


def uniform(seed: int, client: str, round: int, purpose: str) -> float:
    """One number in [0, 1): the upper 53 bits of the first word, over 2**53."""
    return int(words(1, seed, client, round, purpose)[0] >> 11) / 2**53


def generator(seed: int, client: str, round: int, purpose: str) -> Generator:
    """A CPU generator seeded by :func:`seed_of`."""
    from torch import Generator

    return Generator().manual_seed(seed_of(seed, client, round, purpose))
