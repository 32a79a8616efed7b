"""Who shares masks and secrets with whom: all with all, or a Harary graph in an order that the cohort's keys draw.

Bell et al., Secure Single-Server Aggregation with (Poly)Logarithmic Overhead (CCS 2020), section 3: with k neighbours
instead of all, cost does not grow with the cohort; :func:`chances` says what k must be.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import repeat
from math import comb

from talaria.errors import ConfigError


def graph(names: Sequence[str], degree: int, seed: bytes) -> dict[str, tuple[str, ...]]:
    """Each device's neighbours, sorted: all others where ``degree`` is 0 or no fewer than there are, else ``degree``
    (even) around a ring whose order ``seed`` draws. Everybody who knows names and seed comes to the same."""
    names = sorted(names)
    if degree == 0 or degree >= len(names) - 1:
        return {name: tuple(other for other in names if other != name) for name in names}
    if degree % 2:
        raise ConfigError(f"secure: degree={degree} must be even: half of the neighbours stand on each side of a ring")
    order = sorted(names, key=lambda name: hashlib.sha256(b"talaria/ring/1\x00" + seed + name.encode()).digest())
    half = range(1, degree // 2 + 1)
    return {
        name: tuple(sorted(order[(at + step * side) % len(order)] for step in half for side in (-1, 1)))
        for at, name in enumerate(order)
    }


def bitsets(edges: Mapping[str, Sequence[str]], names: Sequence[str]) -> list[int]:
    """For each of ``names``, the neighbours among them as bits, the first name lowest."""
    bit = {name: 1 << at for at, name in enumerate(names)}
    return [sum(map(bit.get, edges[name], repeat(0))) for name in names]


def smallest_part(members: int, edges: Sequence[int]) -> int:
    """Devices in the smallest connected part of the graph that ``edges`` span among ``members``, both as bits.

    What opens is one sum for each connected part, so that this many devices hide each other.
    """
    least, left = members.bit_count(), members
    while left:
        part = front = left & -left
        while front:
            at = front.bit_length() - 1
            reached = edges[at] & members & ~part
            part |= reached
            front = (front & ~(1 << at)) | reached
        least, left = min(least, part.bit_count()), left & ~part
    return least


def chances(devices: int, degree: int, threshold: int, colluding: int, leaving: int) -> tuple[float, float]:
    """Bounds on how likely a round cannot open, and some device's secrets do to those who collude with the coordinator.

    Each device's secret has ``degree + 1`` holders, itself among them, of whom ``threshold`` give it. A round cannot
    open where more than ``degree + 1 - threshold`` of some device's holders are among the ``leaving``; ``threshold``
    ``colluding`` ones are enough to open a device. Exact hypergeometric tails, added over all devices.
    """
    missing = _tail(devices, leaving, degree + 1, degree + 2 - threshold)
    seeing = _tail(devices - 1, colluding, degree, threshold)
    return min(1.0, devices * missing), min(1.0, (devices - colluding) * seeing)


def _tail(population: int, marked: int, drawn: int, least: int) -> float:
    """How likely at least ``least`` of ``drawn`` are among the ``marked`` of ``population``."""
    ways = range(max(0, least), min(marked, drawn) + 1)
    return sum(comb(marked, k) * comb(population - marked, drawn - k) for k in ways) / comb(population, drawn)
