"""What happens to the fleet of a story, and after which round: drawn from its seed before it begins."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Literal

from talaria.errors import ConfigError
from talaria.federated.run import Run
from talaria.model.spec import ModelSpec
from talaria.types import Recipe

FEATURES, CLASSES = 64, 3
TOO_TIGHT, COOLER = 5.0, 0.01
"""The weight decay of a run that no gate lets pass, and the learning rate of the last one."""
TRIAL = 2
"""Rounds of a trial: one that is learned, and one in which gates are asked."""
FEWEST_ROUNDS, FEWEST_DEVICES = 12, 4

LONG = 30
"""Rounds of a first run in whose middle an operator can pause it."""

Kind = Literal["join", "retire", "readmit", "pause", "resume", "next", "back-up", "restore", "extend"]


@dataclass(frozen=True)
class Act:
    """What the operator does once ``round`` is closed."""

    round: int
    kind: Kind
    device: str = ""
    what: str = ""
    """Of ``next``: which run."""
    rounds: int = 0
    """How many more, of ``next`` and ``extend``; of ``restore``, those that it takes back."""

    def __str__(self) -> str:
        more = f" {self.rounds} rounds" if self.rounds else ""
        return f"after round {self.round}: {self.kind}{more} {self.device or self.what}".rstrip()


@dataclass(frozen=True)
class Plan:
    """The whole story. ``founders`` are there from the beginning; ``rounds`` are all that are learned."""

    seed: int
    rounds: int
    founders: tuple[str, ...]
    joiners: tuple[str, ...]
    first: int
    """Rounds of the first run."""
    acts: tuple[Act, ...]

    @property
    def devices(self) -> tuple[str, ...]:
        """Everybody who is ever there."""
        return (*self.founders, *self.joiners)


def draw(seed: int, devices: int, rounds: int) -> Plan:
    """The story of ``seed``: the first run; one that its trial calls off; one with a class more, whose trial passes,
    learned twice from a backup on; the last one, extended."""
    if rounds < FEWEST_ROUNDS or devices < FEWEST_DEVICES:
        raise ConfigError(
            f"story: rounds={rounds} and devices={devices} must be at least {FEWEST_ROUNDS} and {FEWEST_DEVICES}: "
            "less has no room for all that happens"
        )
    dice = random.Random(seed)
    late, leave = max(1, 3 * devices // 8), max(1, devices // 4)
    names = tuple(f"edge-{i:02}" for i in range(devices))
    founders, joiners = names[: devices - late], names[devices - late :]
    first = max(3, 3 * rounds // 10)
    third = max(4, 4 * rounds // 10)
    last = rounds - first - TRIAL - third
    begun, end = first + TRIAL, first + TRIAL + third  # of the third run
    gone, more = max(1, third // 4), max(1, last // 3)
    acts = [
        Act(first, "next", what="too tight", rounds=TRIAL),
        Act(begun, "next", what="a class more", rounds=third - gone),
        Act(end - gone, "back-up"),
        Act(end - gone, "extend", rounds=gone),
        Act(end, "restore", rounds=gone),
        Act(end, "next", what="cooler", rounds=last - more),
        Act(rounds - more, "extend", rounds=more),
    ]
    if first >= LONG:
        acts += [Act(first // 2, "pause"), Act(first // 2, "resume")]
    # Members come and go while a run is learned by all; those who retire come back in the last run.
    for name in joiners:
        acts.append(Act(dice.choice((dice.randrange(1, first), dice.randrange(end + 1, rounds - more))), "join", name))
    for name in dice.sample(founders[1:], min(leave, len(founders) - 2)):
        acts.append(Act(dice.randrange(1, first + 1), "retire", name))
        acts.append(Act(dice.choice((end, dice.randrange(end + 1, rounds - more))), "readmit", name))
    # After the same round: what a backup holds comes before what comes after its restore.
    order = ("pause", "resume", "retire", "back-up", "extend", "restore", "readmit", "join", "next")
    acts.sort(key=lambda act: (act.round, order.index(act.kind), act.device))
    return Plan(seed, rounds, founders, joiners, first, tuple(acts))


def run_of(seed: int, rounds: int, what: str = "") -> Run:
    """The run that the fleet begins with, or, as fleet.toml says it, the one that follows."""
    spec = ModelSpec("mlp", (FEATURES,), CLASSES, seed=1)
    run = Run(spec=spec, algorithm="fedper", rounds=rounds, seed=seed, recipe=Recipe(batch=8, epochs=2, lr=0.05))
    match what:
        case "too tight":
            return replace(run, recipe=replace(run.recipe, weight_decay=TOO_TIGHT))
        case "a class more":
            return replace(run, spec=replace(spec, classes=CLASSES + 1))
        case "cooler":
            return replace(run, spec=replace(spec, classes=CLASSES + 1), recipe=replace(run.recipe, lr=COOLER))
    return run
