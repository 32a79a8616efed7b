"""What is fuzzed: a decoder by name, the errors it may raise, and valid inputs to begin from.

A program registers its own decoders under the entry-point group ``talaria_bench.fuzz``: a function that gives
:class:`Target` s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from random import Random
from typing import TypeVar

from talaria.errors import TalariaError

GROUP = "talaria_bench.fuzz"
CPU_SECONDS = 0.5
"""Of one input at most. Instrumented code runs several times slower than it does in a program."""
LONGEST_REASON = 2000
STACK = 200
"""Calls under which a decoder runs here: as deep as any program of ours calls one, and then some. What nests so deep
that a decoder itself just stands it, is found only where little of the stack is left."""
NESTED = tuple(
    word
    for depth in (9, 300, *range(500, 1000, 20))
    for word in (b"\x91" * depth + b"\x90", b"[" * depth + b"]" * depth)
)
"""Lists in lists, in msgpack and JSON: longer than libFuzzer takes a word."""
T = TypeVar("T")


class Defect(Exception):  # noqa: N818  what fuzzing looks for
    """A decoder did what it never should: took what is not right, said what cannot be said, or took too long."""


@dataclass(frozen=True)
class Target:
    """``run`` decodes bytes; ``allowed`` is all that it may raise; ``seeds`` are inputs that it takes."""

    name: str
    run: Callable[[bytes], object]
    allowed: tuple[type[TalariaError], ...]
    seeds: Sequence[bytes]


@dataclass
class Tally:
    """What became of the inputs of one target."""

    taken: int = 0
    refused: int = 0
    slowest_s: float = 0.0

    @property
    def runs(self) -> int:
        """How many inputs there were."""
        return self.taken + self.refused

    def shoot(self, target: Target, data: bytes) -> None:
        """One input. Anything but the target's own errors gets out: it is what was looked for."""
        begin = time.thread_time()
        try:
            deeper(lambda: target.run(data))
        except target.allowed as why:
            self.refused += 1
            sayable(str(why))
        else:
            self.taken += 1
        spent = time.thread_time() - begin
        self.slowest_s = max(self.slowest_s, spent)
        if spent > CPU_SECONDS:
            raise Defect(f"{target.name}: {len(data)} bytes took {spent:.2f} s of CPU")


def deeper(call: Callable[[], T], frames: int = STACK) -> T:
    """``call()``, so many calls further down."""
    return call() if frames < 1 else deeper(call, frames - 1)


def awkward(seeds: Sequence[bytes], words: Sequence[bytes], most: int) -> list[bytes]:
    """The seeds with one byte replaced by a word, at every place; where these are more, ``most`` of them by lot."""
    places = [(seed, at) for seed in seeds for at in range(len(seed))]
    chosen = [(*place, word) for place in places[: 100 * most] for word in words]
    if len(chosen) > most:
        chosen = Random(0).sample(chosen, most)
    return [seed[:at] + word + seed[at + 1 :] for seed, at, word in chosen]


def sayable(reason: str) -> None:
    """A refusal is sent, stored and shown, so it must be text that can be, and short. Raises :class:`Defect`."""
    try:
        reason.encode()
    except UnicodeEncodeError:
        raise Defect(f"a reason that no store can hold: {reason!a:.200}") from None
    if len(reason) > LONGEST_REASON:
        raise Defect(f"a reason of {len(reason)} characters: {reason!a:.200}")


def installed() -> list[Target]:
    """The targets of all programs that are installed, by name."""
    found = [target for entry in entry_points(group=GROUP) for target in entry.load()()]
    return sorted(found, key=lambda target: target.name)
