"""Who is there: births, last wills, boots that count on, and two programs with one name."""

from __future__ import annotations

from talaria.protocol import actions as a
from talaria.protocol.coordinator import secure_rounds, uploads
from talaria.protocol.coordinator.calls import call
from talaria.protocol.coordinator.state import LIVE, Peer
from talaria.protocol.coordinator.step_context import IgnoredError, Turn
from talaria.wire import messages as m

FLAP_SECONDS = 60.0
COMINGS = 4
"""So many times as often as it is born may a device come in a minute: what it says brings it back too. Each coming
costs a record, a line of the journal, and all that it may have missed."""
RETURNS = 3
"""A broker may bring an old birth again; three times within a minute it is another program that lives."""
DOUBLED = (
    "another program has this device's name and keys, and the two put each other out at the broker: stop one of them, "
    "or enroll one under a name of its own"
)

LEFT = "left by its owner"
"""Why no round waits for a device any more."""


def lifecycle(t: Turn, device: str, peer: Peer, boot: int, message: m.DeviceBirth) -> None:
    """A device's birth or last will came, which may be an old one."""
    before = peer.births[-1][1] if peer.births else message.process
    # Two with one name who are both told where to count on from, come to the same boots.
    if message.online and (boot != peer.boot or message.process != before):
        _count(t, device, peer, message.process, boot > peer.boot)
        if boot == peer.boot:
            peer.shared = boot
    other = message.process and peer.process not in (b"", message.process)
    if message.online and other and boot == peer.boot > peer.dead:
        # An older memory that counted on to it: what it says would be taken for what that boot has said already.
        t.act(a.Forgot(device, boot, boot))
        t.say(device, m.Rebirth(above=boot))
        return
    if boot < peer.boot or boot <= peer.dead:
        if message.online:
            remind(t, device, peer, boot)
        return
    if not message.online:
        peer.boot, peer.dead, peer.left = boot, boot, t.now
        if peer.online:
            t.act(a.DeviceDown(device, boot))
        peer.online = False
        return
    if boot > peer.boot:
        if sum(fresh for *_, fresh in peer.births) > t.rules.flaps:
            # Its link breaks again and again, which anybody on the way can do to anybody: no offence.
            # It does not count against the next: what breaks without end has its turns all the same.
            peer.births[-1] = (t.now, message.process, False)
            peer.boot, peer.process, peer.online, peer.profile = boot, message.process, False, message.profile
            raise IgnoredError(f"more than {t.rules.flaps} births within a minute; it is away until it speaks")
    elif peer.online and peer.profile == message.profile:
        peer.process = message.process
        return
    peer.boot, peer.process, peer.profile = boot, message.process, message.profile
    came(t, device, peer)


def came(t: Turn, device: str, peer: Peer) -> None:
    """Told by its birth, or by the first that it says where that came first: ask it again for what is open. Who comes
    without end is away until it says something later on."""
    recent = [at for at in peer.comings if t.now - at < FLAP_SECONDS]
    peer.online = len(recent) < COMINGS * t.rules.flaps
    peer.comings = [*recent, t.now] if peer.online else recent
    if not peer.online:
        return
    t.act(a.DeviceUp(device, peer.boot, peer.profile))
    for attempt in t.state.attempts.values():
        if device in attempt.cohort and uploads.countable(t, attempt):
            call(t, attempt, device, again=True)
    secure_rounds.remind(t, device)


def left(t: Turn, device: str) -> None:
    """Its owner takes it out of the fleet for good: what is still to come of it is waited for no more. An update that
    is here already counts."""
    for attempt in t.state.attempts.values():
        member = attempt.cohort.get(device)
        if member is not None and member.phase in LIVE:
            uploads.drop(t, attempt, device, "declined", LEFT)
    t.act(a.Save(), a.Departed(device, for_good=True))


def _count(t: Turn, device: str, peer: Peer, process: bytes, fresh: bool) -> None:
    """Remember a birth, and tell where two programs have one name: each comes back after the other, for a process
    that ended never does."""
    recent = [birth for birth in peer.births if t.now - birth[0] < FLAP_SECONDS]
    peer.births = [*recent, (t.now, process, fresh)]
    while len(peer.births) > t.rules.flaps + 1:  # those that were acted on are what is counted, and go last
        peer.births.remove(next((birth for birth in peer.births if not birth[2]), peer.births[0]))
    order = [born for _, born, _ in peer.births if born]
    turns = [born for before, born in zip([b"", *order], order, strict=False) if born != before]
    if len(turns) - len(set(turns)) < RETURNS:
        return
    if t.now - peer.doubled >= FLAP_SECONDS:
        peer.doubled = t.now
        t.act(a.Doubled(device))
    t.say(device, m.Trouble(attempt=0, reason=DOUBLED))


def remind(t: Turn, device: str, peer: Peer, boot: int) -> None:
    """A device has lost its memory, or an older one was restored: nothing that it says now could count. Tell it
    where to count on from. A frame played back by a stranger changes nothing for a device that is where it should
    be: its boot is above what is said here."""
    if t.now - peer.reminded < t.rules.retry:
        return
    peer.reminded = t.now
    newest = max(peer.boot, peer.dead)
    t.act(a.Forgot(device, boot, newest))
    t.say(device, m.Rebirth(above=newest if newest == peer.dead else newest - 1))
