"""Every random draw derives from (seed, client, round, purpose), so that a run can be repeated anywhere, in any
language."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence

if TYPE_CHECKING:
    from torch import Generator

Numbers = np.ndarray[Any, np.dtype[Any]]

ALONE = RLock()
"""Held while a thread uses what torch has once for all of them: its global generator, and how it follows a pass."""
os.register_at_fork(after_in_child=ALONE._at_fork_reinit)  # type: ignore[attr-defined]  # no other thread lives there


def seed_of(seed: int, client: str, round: int, purpose: str) -> int:
    """A 63-bit seed; draws for different purposes never disturb each other.

    >>> seed_of(0, "anna", 3, "shuffle") == seed_of(0, "anna", 3, "shuffle")
    True
    >>> seed_of(0, "anna", 3, "shuffle") == seed_of(0, "anna", 3, "dropout")
    False
    """
    text = f"{seed}\x1f{client}\x1f{round}\x1f{purpose}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1


class _Key(ISeedSequence):
    """A Philox's key as it asks for one: ``Philox(key=...)`` reads the system's entropy first, five times as long."""

    def __init__(self, seed: int) -> None:
        self._words = np.array([seed % 2**64, seed >> 64], np.uint64)

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> Numbers:
        return self._words


class Draws:
    """Random numbers, one after another, from the words of Philox 4x64-10 with ``seed`` as its key and its counter from
    1 on: the same on every machine and in every version of numpy, and made in any language.

    >>> Draws(7).order(5).tolist() == Draws(7).order(5).tolist()
    True
    """

    def __init__(self, seed: int) -> None:
        self._philox = np.random.Philox(_Key(seed))  # type: ignore[arg-type]  # numpy's stubs know one kind of sequence

    def copy(self) -> Draws:
        """The same draws once more, from where these stand."""
        again = Draws(0)
        again._philox.state = self._philox.state
        return again

    def words(self, count: int) -> Numbers:
        """The next ``count`` words, uint64."""
        return self._philox.random_raw(count)

    def uniform(self, *shape: int) -> Numbers:
        """Numbers in [0, 1), float64: a word's upper 53 bits over 2**53."""
        return (self.words(math.prod(shape)) >> np.uint64(11)).reshape(shape) * 2.0**-53

    def integers(self, low: int, high: int, *shape: int) -> Numbers:
        """Whole numbers in low..high-1, int64: ``low`` and the whole part of a uniform number times their count."""
        return low + (self.uniform(*shape) * (high - low)).astype(np.int64)

    def order(self, count: int) -> Numbers:
        """A random order of 0..count-1, int64: that of as many words, the earlier first between equal ones."""
        return self.words(count).argsort(kind="stable")

    def normal(self, *shape: int) -> Numbers:
        """Standard normal numbers, float64 (Box and Muller, 1958): of n uniform u and n uniform v, where n is half of
        what is asked for, rounded up, first all cosines, then all sines."""
        count = math.prod(shape)
        half = -(-count // 2)
        length, turn = np.sqrt(-2 * np.log1p(-self.uniform(half))), 2 * np.pi * self.uniform(half)
        return np.concatenate([length * np.cos(turn), length * np.sin(turn)])[:count].reshape(shape)


def draws(seed: int, client: str, round: int, purpose: str) -> Draws:
    """The draws of :func:`seed_of`."""
    return Draws(seed_of(seed, client, round, purpose))


def words(count: int, seed: int, client: str, round: int, purpose: str) -> Numbers:
    """The first ``count`` words, uint64, of :func:`draws`."""
    return draws(seed, client, round, purpose).words(count)


def order(count: int, seed: int, client: str, round: int, purpose: str) -> list[int]:
    """A random order of 0..count-1, see :meth:`Draws.order`.

    >>> sorted(order(5, 0, "", 3, "cohort"))
    [0, 1, 2, 3, 4]
    """
    drawn: list[int] = draws(seed, client, round, purpose).order(count).tolist()
    return drawn


def uniform(seed: int, client: str, round: int, purpose: str) -> float:
    """One number in [0, 1), see :meth:`Draws.uniform`."""
    return float(draws(seed, client, round, purpose).uniform(1)[0])


def generator(seed: int, client: str, round: int, purpose: str) -> Generator:
    """A CPU generator of torch seeded by :func:`seed_of`."""
    from torch import Generator

    return Generator().manual_seed(seed_of(seed, client, round, purpose))


@contextmanager
def aside(seed: int | None = None) -> Iterator[None]:
    """What is drawn from torch's global generator in this context is this thread's alone, and leaves it as it was;
    ``seed`` is where it begins."""
    import torch

    with ALONE, torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.default_generator.manual_seed(seed)
        yield
