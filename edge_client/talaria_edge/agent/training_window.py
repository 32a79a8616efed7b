""":class:`TrainingWindow`: waits until the device may train, for as long as the round leaves time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from talaria import time
from talaria_edge import training_policy
from talaria_edge.training_policy import Allowed, Reading, Rules

TELL_AGAIN_S = 600.0


@dataclass(frozen=True)
class Left:
    """What a round leaves: its end, None where it has none, and the seconds that training took before."""

    deadline: float | None
    took: float


@dataclass(frozen=True)
class TrainingWindow:
    """Asks, every ``every_s`` seconds, whether ``rules`` allow to train now; no rules allow it always."""

    rules: Rules | None
    every_s: float = 10.0
    read: Callable[[], Reading] = training_policy.read

    async def wait(self, tell: Callable[..., Any], left: Callable[[], float]) -> Allowed:
        """The decision: an allowed one, or the reason against it once ``left()``, the seconds that there are to wait,
        has come to nothing. ``tell("waiting", reason=...)`` is called when waiting begins, and again every ten
        minutes; ``tell("allowed")`` when it ends well."""
        told = -TELL_AGAIN_S
        while True:
            decision = (
                Allowed(True, "no rules") if self.rules is None else training_policy.allowed(self.read(), self.rules)
            )
            remaining = left()
            if decision or remaining <= 0:
                if decision and told >= 0:
                    tell("allowed")
                return decision
            if time.monotonic() - told >= TELL_AGAIN_S:
                told = time.monotonic()
                tell("waiting", reason=decision.reason)
            await asyncio.sleep(min(self.every_s, remaining))

    async def within(self, tell: Callable[..., Any], left: Callable[[], Left | None]) -> Allowed | None:
        """As :meth:`wait`, while a round leaves time to train after it; None where ``left()`` is None: it is over.

        A decline costs the round this device's update; a late update would cost it the training as well. A tenth of the
        time stays for the word to arrive.
        """
        begun = time.monotonic()

        def seconds() -> float:
            round_ = left()
            if round_ is None:
                return 0.0
            if round_.deadline is None:
                return math.inf
            return round_.deadline - time.monotonic() - max(1.25 * round_.took, 0.1 * (round_.deadline - begun))

        decision = await self.wait(tell, seconds)
        return None if left() is None else decision
