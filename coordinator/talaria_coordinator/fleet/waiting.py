"""What an idle fleet waits for: how many devices are missing, and which."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from talaria.errors import StateError
from talaria.protocol.coordinator.state import LIVE, CoordinatorState
from talaria_coordinator.config.fleet import Draw
from talaria_coordinator.fleet import cohort
from talaria_coordinator.storage.records import Device

AFTER_S, EVERY_S = 5.0, 60.0
GATHER_S = 120.0
"""A fleet of named members begins so long after the last of them came, where a quorum is here."""
READABLE = 4 << 20
"""Largest saved machine, in bytes, that is read to see who is waited for."""
NAMED = 20
"""So many of the missing are named, first by name."""


@dataclass(frozen=True)
class Waiting:
    """``here`` of ``needed`` devices are here; ``missing`` are those that are known by name and are not."""

    here: int
    needed: int
    missing: tuple[str, ...]
    reason: str

    def facts(self) -> dict[str, Any]:
        """As it is told."""
        more = len(self.missing) - NAMED
        who = [*self.missing[:NAMED], *([f"and {more} more"] if more > 0 else [])]
        return {"here": self.here, "needed": self.needed, "missing": who, "reason": self.reason}


def waits(
    draw: Draw, round: int, roster: Sequence[str], devices: Sequence[Device], online: Collection[str]
) -> Waiting | None:
    """What stands in the way of round ``round``; None where nothing is missing."""
    out = {d.device for d in devices if d.quarantine is not None}
    if not roster:
        left = {d.device for d in devices if d.retired is not None} - out
        come = {d.device for d in devices if d.able}
        missing = tuple(sorted(set(draw.members) - come))
        need = draw.expected
        here = need - len(missing) if draw.members else min(need, len(come))
        reason = f"{here} of {need} devices have come; learning begins with the last of them"
        if draw.members:
            reason += f", or with a quorum of those here once nobody new has come for {GATHER_S:.0f} s"
        else:
            reason += "; where fewer will come, set [fleet] devices and start again"
        for what, names in (("in quarantine", out), ("left for good", left)):
            if absent := sorted(names & set(missing) if draw.members else names):
                reason += f"; {what}: {', '.join(absent[:NAMED])}"
        return Waiting(here, need, missing, reason) if here < need else None
    asked = cohort.wanted(draw, round, roster, online, out)
    if asked.cohort and asked.online >= asked.quorum:
        return None
    missing = tuple(sorted(name for name in asked.cohort if name not in online))
    reason = f"{asked.online} of the {len(asked.cohort)} devices that are to learn are here; {asked.quorum} are needed"
    if not asked.cohort:
        reason = "all devices that are to learn are in quarantine; release them, or let others come"
    return Waiting(asked.online, asked.quorum, missing, reason)


def holding(machine: bytes | None) -> list[dict[str, Any]]:
    """Who keeps the open round waiting, by name: how far each is, and whether it is here. Of a saved machine as large
    as that of a great fleet, or a damaged one, which its coordinator tells of, nobody is told."""
    if machine is None or len(machine) > READABLE:
        return []
    try:
        state = CoordinatorState.load(machine)
    except StateError:
        return []
    attempt = state.attempt
    if attempt is None or attempt.phase != "open":
        return []
    late = [name for name in sorted(attempt.cohort) if attempt.cohort[name].phase in LIVE][:NAMED]
    return [
        {
            "device": name,
            "phase": attempt.cohort[name].phase,
            "online": name in state.peers and state.peers[name].online,
        }
        for name in late
    ]


@dataclass
class Gathering:
    """Who a fleet begins without: a device that is broken when the fleet is new, or begins anew, must not hold it up
    for ever. Who comes later takes part from then on."""

    _come: frozenset[str] = frozenset()
    _last: float | None = None

    def over(self, draw: Draw, round: int, come: Collection[str], online: Collection[str], now: float) -> bool:
        """Whether to begin at ``now``, a clock that only goes on, without the members that have not ``come``, of
        which ``online`` are here."""
        here = frozenset(set(draw.members) & set(come))
        if here != self._come or self._last is None:
            self._come, self._last = here, now
        out = set(draw.members) - here
        ready = cohort.ask(draw, round, draw.members, here & set(online), (), out) is not None
        return ready and now - self._last >= GATHER_S


@dataclass
class Patience:
    """What is waited for is told after a while, and then each minute as long as it lasts."""

    _next: float | None = None

    def due(self, now: float) -> bool:
        """Whether to say at ``now``, a clock that only goes on, what is waited for."""
        if self._next is None:
            self._next = now + AFTER_S
        if now < self._next:
            return False
        self._next = now + EVERY_S
        return True

    def over(self, now: float) -> None:
        """It goes on; what is waited for soon after is told no sooner than a minute after the last time."""
        self._next = None if self._next is None or self._next <= now + AFTER_S else self._next
