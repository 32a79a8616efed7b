"""Which faults happen to a fleet, when and to whom: drawn from a seed before anything starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from talaria.errors import ConfigError

Kind = Literal[
    "kill-coordinator", "kill-broker", "kill-edge", "cut", "delay", "duplicate", "reorder", "disk-full", "clock-jump",
    "kill-worker",
]  # fmt: skip
DECK: tuple[Kind, ...] = (
    "kill-coordinator", "kill-coordinator", "kill-broker", "kill-edge", "kill-edge", "cut", "cut",
    "delay", "duplicate", "duplicate", "reorder", "reorder", "disk-full", "disk-full", "clock-jump",
)  # fmt: skip
"""Dealt out again and again, shuffled: so a short run, too, meets most kinds."""
KINDS: tuple[Kind, ...] = tuple(dict.fromkeys(DECK))
WORKERS: tuple[Kind, ...] = ("kill-worker",) * 4
"""Dealt out too where there are ingest workers."""
LINKS = ("cut", "delay", "duplicate", "reorder")
COORDINATOR, ALL = "coordinator", "all"
CLOCK_S = 3 * 86400.0


@dataclass(frozen=True)
class Fault:
    """One fault. ``after`` seconds after the one before, at the earliest in round ``round``, ``kind`` happens
    to ``target`` (a device, the coordinator, or all) for ``seconds``: how long a killed program stays away, a link is
    bad, or a disk full.

    ``strength`` is the share of messages doubled or turned round, the delay in seconds, the bytes that a full disk
    still takes per file, or the seconds that the clock is off from now on.
    """

    number: int
    kind: Kind
    target: str
    round: int
    after: float
    seconds: float
    strength: float


def draw(seed: int, count: int, devices: Sequence[str], rounds: int, workers: int = 0) -> tuple[Fault, ...]:
    """``count`` faults over ``rounds`` rounds, to so many ingest ``workers`` too; the same arguments give the same
    faults.

    The last tenth of the rounds has none, so that all have happened before the run ends. Raises
    :class:`~talaria.errors.ConfigError` where there is nothing to draw from.
    """
    if count < 1 or not devices or rounds < 2:
        raise ConfigError(f"chaos: faults={count}, devices={len(devices)}, rounds={rounds}: need 1, 1 and 2 at least")
    random, deck, found = Random(f"chaos {seed}"), list[Kind](), list[Fault]()
    for number in range(count):
        if not deck:
            deck = [*DECK, *(WORKERS if workers else ())]
            random.shuffle(deck)
        kind = deck.pop()
        round = 1 + int(number * 0.9 * (rounds - 1) / count)
        target = _target(random, kind, devices, workers)
        seconds = random.uniform(0.0, 1.5) if kind.startswith("kill") else random.uniform(0.2, 2.0)
        found.append(Fault(number, kind, target, round, random.uniform(0.0, 1.0), seconds, _strength(random, kind)))
    return tuple(found)


def _target(random: Random, kind: Kind, devices: Sequence[str], workers: int) -> str:
    match kind:
        case "kill-worker":
            return str(random.randrange(workers))
        case "kill-coordinator":
            return COORDINATOR
        case "kill-broker":
            return ALL
        case "kill-edge":
            return random.choice(devices)
        case "disk-full" | "clock-jump":
            return random.choice([COORDINATOR, random.choice(devices)])
    return random.choice([ALL, COORDINATOR, random.choice(devices)])


def _strength(random: Random, kind: Kind) -> float:
    match kind:
        case "duplicate" | "reorder":
            return random.uniform(0.2, 0.9)
        case "delay":
            return random.uniform(0.05, 0.8)
        case "disk-full":
            return float(random.choice([0, 100, 4096, 200_000]))
        case "clock-jump":
            return random.choice([-1.0, 1.0]) * CLOCK_S * random.random()
    return 0.0


def tally(faults: Sequence[Fault]) -> dict[str, int]:
    """How many there are of each kind, none left out but those of workers where no worker had any."""
    counts = Counter(fault.kind for fault in faults)
    return {kind: counts[kind] for kind in (*KINDS, *(kind for kind in counts if kind not in KINDS))}
