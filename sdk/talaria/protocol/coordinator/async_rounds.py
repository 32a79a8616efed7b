"""Asynchronous rounds: a round is a buffer and closes when it is full. Devices that still train from its global model
go on; their updates count in later rounds, while these are at most ``stale`` versions ahead.

A device has one place in a buffer: it is asked again once the version that holds its update is made. What is stored
while a full buffer is folded is held, without a receipt, until the next round opens. A round that is not full in time
is carried over: the next one begins with what it holds, and asks all who are idle once more.
"""

from __future__ import annotations

from talaria.protocol import actions as a
from talaria.protocol.coordinator import uploads
from talaria.protocol.coordinator.state import HELD, LIVE, Attempt, CoordinatorState
from talaria.protocol.coordinator.step_context import Turn
from talaria.wire import messages as m

RECALLED = "the global model it started from is too old by now"
FOLLOWED = "another run has followed the one that it trained in"


def busy(state: CoordinatorState, attempt: Attempt, device: str) -> bool:
    """Whether a device has its place in this buffer already, or an update of an earlier round under way."""
    if any(entry[0] == device for entry in attempt.counted):
        return True
    earlier = (r.cohort[device].phase for n, r in state.attempts.items() if n < attempt.number and device in r.cohort)
    return any(phase in LIVE or phase == HELD for phase in earlier)


def fill(t: Turn, attempt: Attempt, before: Attempt | None, since: int) -> None:
    """Begin a buffer with what was carried over and what was held, oldest first; tell those who are too old, or of
    another run, as attempts before ``since`` are."""
    if before is not None and before.phase == "carried" and before.number >= since:
        attempt.counted = list(before.counted)
    for number, old in sorted(t.state.attempts.items()):
        for device, member in sorted(old.cohort.items()):
            if number == attempt.number or member.phase not in (*LIVE, HELD):
                continue
            if attempt.version - old.version > attempt.stale or number < since:
                dismiss(t, old, device, RECALLED if number >= since else FOLLOWED)
            elif member.phase == HELD and uploads.counted(t, old, device, member):
                t.say(device, m.Receipt(attempt=number, sha256=member.sha256, outcome="stored", reason=""))


def end(t: Turn, attempt: Attempt, reason: str) -> None:
    """Let go of the members of a round that is over: of a buffer only those who have not begun, which are asked anew,
    unless it was called off."""
    if attempt.stale and attempt.phase == "failed":
        dismiss_all(t, reason)
        return
    for device, member in sorted(attempt.cohort.items()):
        if attempt.stale and member.phase == "called":
            uploads.drop(t, attempt, device, "late")
        elif not attempt.stale and member.phase in LIVE:
            dismiss(t, attempt, device, reason)
    uploads.admit(t)


def dismiss_all(t: Turn, reason: str) -> None:
    """Nothing that is still under way will count."""
    for attempt in t.state.attempts.values():
        for device, member in sorted(attempt.cohort.items()):
            if member.phase in LIVE or member.phase == HELD:
                dismiss(t, attempt, device, reason)
    t.act(a.Save())
    uploads.admit(t)


def dismiss(t: Turn, attempt: Attempt, device: str, reason: str) -> None:
    """End a member's part in a round, and tell it."""
    uploads.drop(t, attempt, device, "late")
    t.say(device, m.Abort(attempt=attempt.number, reason=reason))
