"""Rounds of secure aggregation: five steps, in each of which every member says one word; what words mean, the program
knows (:mod:`talaria.privacy.coordinator`).

A device says its first word once it has trained, so that nobody waits in the later steps for more than the wire. Its
word of the third step is its masked update, and comes as every upload does. A step is over when all have said their
word, or all who are there, or at its end in time; then the program says who goes on, and what they are told
(:class:`~talaria.protocol.events.NextStep`). Until a device answers, it is told again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from talaria.protocol import actions as a
from talaria.protocol import events as e
from talaria.protocol import words
from talaria.protocol.coordinator import uploads
from talaria.protocol.coordinator.state import LIVE, Attempt, Participant
from talaria.protocol.coordinator.step_context import IgnoredError, Turn
from talaria.wire import messages as m

LONG = {words.UPLOAD: 10, words.OPENING: 10}
"""So many times as long as any other step may these take: that in which the updates come, and the last one. It is not
made again where too few answer, and what was sent for the round would be lost."""
AGAIN = 4
"""So many times ``retry`` a device is given to answer, until it is told again."""
WITHOUT = "the others went on without this device"


def heard(t: Turn, device: str, word: m.Word) -> None:
    """A part of a device's word. What was heard already is said to be heard."""
    attempt = t.state.attempts.get(word.attempt)
    member = None if attempt is None else attempt.cohort.get(device)
    if attempt is None or member is None or not attempt.secure or is_over(attempt, member):
        call_off(t, device, word.attempt)
        raise IgnoredError(f"attempt {word.attempt} did not ask {device!r} for a word, or is over for it")
    if word.step < member.step:
        t.say(device, m.Heard(attempt=word.attempt, step=word.step))
        return
    if attempt.phase != "open" or attempt.between or word.step != attempt.step or not _waited(t, device, attempt):
        raise IgnoredError(f"word of step {word.step} of attempt {word.attempt}, which is not waited for")
    gathered = member.gathered = member.gathered or words.Gathered()
    whole = gathered.take(word)
    if whole is not None:
        t.act(a.WordSaid(attempt.number, device, word.step, whole))


def is_over(attempt: Attempt, member: Participant) -> bool:
    """Whether nothing that this member of a secure round still says can be of use, as it was away when that ended."""
    return bool(attempt.secure) and member.phase not in (*LIVE, "stored")


def call_off(t: Turn, device: str, number: int) -> None:
    """Tell a device that comes back to a round that is over: else it would wait there for what nobody says."""
    t.say(device, m.Abort(attempt=number, reason="this round is over, or is not open to this device"))


def kept(t: Turn, event: e.WordKept) -> None:
    """A device's word is durable."""
    attempt = t.state.attempts.get(event.attempt)
    member = None if attempt is None else attempt.cohort.get(event.device)
    if attempt is None or member is None:
        return
    if event.step == attempt.step and member.step == event.step:
        member.step, member.gathered, member.told = event.step + 1, None, b""
        t.peer(event.device).strikes = 0
        t.act(a.Save(soon=True))
    t.say(event.device, m.Heard(attempt=event.attempt, step=event.step))


def refused(t: Turn, event: e.WordRefused) -> None:
    """A device's word does not fit: it takes part in this round no more, and in no other where it is an offence."""
    attempt = t.state.attempts.get(event.attempt)
    member = None if attempt is None else attempt.cohort.get(event.device)
    if attempt is None or member is None:
        return
    if event.offence:
        uploads.quarantine(t, event.device, event.reason)
    elif member.phase in LIVE:
        uploads.drop(t, attempt, event.device, "declined", event.reason)


def verdict(t: Turn, attempt: Attempt) -> Literal["open", "over", "failed"]:
    """Whether the step that an open round is in is over at this time, with enough words or with too few."""
    if attempt.between:
        return "open"
    said = sum(member.step > attempt.step for member in attempt.cohort.values())
    due = attempt.due if attempt.step else attempt.deadline
    late, enough = due is not None and t.now >= due, said >= attempt.quorum
    missing = (device for device in attempt.cohort if _waited(t, device, attempt))
    if any(not (enough and t.peer(device).away(t.now, t.rules.grace)) for device in missing) and not late:
        return "open"
    return "over" if enough else "failed"


def go_on(t: Turn, event: e.NextStep) -> bool:
    """Begin the step that the program names, and tell its members; True where the sum is open."""
    attempt = t.state.attempts.get(event.attempt)
    if attempt is None or attempt.phase != "open" or not attempt.secure or event.step < attempt.step:
        return False
    attempt.step, attempt.between = event.step, False
    attempt.due = t.now + attempt.secure * LONG.get(event.step, 1)
    t.act(a.Save())
    for device, member in sorted(attempt.cohort.items()):
        if device not in event.members:
            _leave_behind(t, attempt, device, member)
            continue
        if member.phase == "storing" and event.step > words.UPLOAD:  # it came in time, and is in the sum
            uploads.receipt(t, attempt, device, member)
        member.step, member.gathered = event.step + (device in event.said), None
        member.told, member.asked = event.words.get(device, b""), t.now
        _tell(t, attempt, device, member)
    return event.step == words.STEPS


def tick(t: Turn, attempt: Attempt) -> None:
    """Tell those once more who have not answered."""
    for device, member in attempt.cohort.items():
        if member.told and t.peer(device).online and t.now - member.asked >= AGAIN * t.rules.retry:
            member.asked = t.now
            _tell(t, attempt, device, member)


def remind(t: Turn, device: str) -> None:
    """Tell a device that came back what it may have missed."""
    for attempt in t.state.attempts.values():
        member = attempt.cohort.get(device)
        if attempt.phase == "open" and member is not None and member.told:
            member.asked = t.now
            _tell(t, attempt, device, member)


def _waited(t: Turn, device: str, attempt: Attempt) -> bool:
    """Whether the word of ``device`` is missing in this step."""
    member = attempt.cohort[device]
    phases = LIVE if attempt.step <= words.UPLOAD else ("stored",)
    return member.step == attempt.step and member.phase in phases and not t.peer(device).out


def _leave_behind(t: Turn, attempt: Attempt, device: str, member: Participant) -> None:
    if member.phase in LIVE:
        uploads.drop(t, attempt, device, "late", WITHOUT)
        t.say(device, m.Abort(attempt=attempt.number, reason=WITHOUT))
    member.told = b""


def _tell(t: Turn, attempt: Attempt, device: str, member: Participant) -> None:
    for word in _words(t, attempt, member):
        t.say(device, word)


def _words(t: Turn, attempt: Attempt, member: Participant) -> Iterator[m.Told]:
    return words.cut(m.Told, attempt.number, attempt.step, member.told, t.rules.chunk) if member.told else iter(())
