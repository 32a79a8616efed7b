"""Whom a round asks for work, when it asks again, and for whom it waits no more."""

from __future__ import annotations

from talaria.protocol import actions as a
from talaria.protocol import events as e
from talaria.protocol.coordinator import async_rounds, uploads
from talaria.protocol.coordinator.state import LIVE, Attempt, Participant
from talaria.protocol.coordinator.step_context import Turn
from talaria.wire import messages as m


def seek(t: Turn, attempt: Attempt) -> None:
    """Where a round waits for the last ones only, ask who is silent whether it is there: a broker that was lost
    took the last wills with it, and nobody tells of a device that left then."""
    if attempt.stale or len(attempt.counted) < attempt.quorum:
        return
    for device, member in attempt.cohort.items():
        peer = t.peer(device)
        if member.phase not in LIVE or member.phase == "storing" or peer.dead >= peer.boot:
            continue
        if t.now - peer.heard < t.rules.silence:
            member.sought = None
        elif member.sought is None:
            member.sought = t.now
            member.phase = "called" if member.phase == "working" else member.phase
        elif t.now - member.sought >= t.rules.silence:
            member.sought, peer.dead, peer.left, peer.online = None, peer.boot, t.now, False
            t.act(a.DeviceDown(device, peer.boot))


def call(t: Turn, attempt: Attempt, device: str, again: bool = False) -> None:
    """Ask a member that is online and has not answered; ``again`` also asks one that came back."""
    member = attempt.cohort[device]
    open_ = member.phase == "called" or unconfirmed(t, device, member)
    due = open_ and t.now - member.asked >= t.rules.retry
    if not (t.peer(device).online or member.sought is not None) or not (
        due or (again and member.phase in ("called", "working", "waiting", "receiving"))
    ):
        return
    if attempt.stale and async_rounds.busy(t.state, attempt, device):
        return
    if member.phase == "working":
        member.phase = "called"  # it may have forgotten, and is asked until it answers
    member.asked = t.now
    seconds = 0.0 if attempt.deadline is None or attempt.stale else max(0.001, attempt.deadline - t.now)
    work = m.Work(
        attempt=attempt.number,
        version=attempt.version,
        model_digest=attempt.model_digest,
        seconds=seconds,
        spec=member.spec,
    )
    t.say(device, work)


def unconfirmed(t: Turn, device: str, member: Participant) -> bool:
    """Whether its update is on the way in, and its device, which came back since, has not said that it still has
    it: by a new offer, which each link begins with."""
    return member.phase in ("waiting", "receiving") and member.boot < t.peer(device).boot


def amend(t: Turn, event: e.Amend) -> None:
    """What the operator has changed since the open round was opened holds for it too."""
    attempt = t.state.attempt
    if attempt is not None and attempt.phase == "open":
        if event.target is not None:
            attempt.target = max(1, min(event.target, attempt.target))
        if event.quorum is not None:
            attempt.quorum = min(event.quorum, attempt.target)
        if event.seconds is not None:
            end = t.now + event.seconds
            attempt.deadline = end if attempt.deadline is None else min(end, attempt.deadline)
    for one in t.state.attempts.values():
        for device in sorted(event.gone & one.cohort.keys()):
            if one.cohort[device].phase in LIVE:
                uploads.drop(t, one, device, "declined", event.reason)
                t.say(device, m.Abort(attempt=one.number, reason=event.reason))
    t.act(a.Save())
    uploads.admit(t)
