"""Checks that no other coordinator serves a fleet before this one enters it, over a connection of its own.

The last coordinator left its birth with the broker. One that this store knows of was its own: whoever starts last has
the fleet. Any other is a stranger to this store, which is new, or restored from a backup, or another folder by mistake.
Whether that one lives is asked then: a coordinator that hears itself called away says that it is there; and where a
broker knows both by one name, it comes back as soon as this connection is given up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from talaria.errors import StateError, WireError
from talaria.protocol.actions import Fenced
from talaria.wire import messages as m
from talaria.wire.frames import Header, decode_frame, encode_frame, signed_by
from talaria.wire.mqtt import Arrival, Transport, Will
from talaria.wire.signing import Signer
from talaria.wire.topics import Topic
from talaria.wire.validity import day_of
from talaria_coordinator.fleet.witness import LAST_DAY_MS

LOOK_S = 2.0
"""Seconds that a broker may take to deliver what it has retained, and what is sent to it."""
ANSWER_S = 5.0
"""Seconds that a coordinator may take to answer."""
GRACE_S = 0.05
"""Messages that were on their way together may come in any order."""

T = TypeVar("T")
Connect = Callable[[Callable[[], Will]], Transport]


async def look(connect: Connect, fleet: str, signer: Signer | None, known: int) -> int:
    """The newest epoch that the broker tells of (0: none), where this coordinator may serve the fleet. ``known`` is the
    last epoch in its own store (0: a new one).

    Raises :class:`~talaria.errors.StateError` where another coordinator serves it, and
    :class:`~talaria.errors.TransportError` where the broker does not answer.
    """
    found = await _left(connect, fleet, signer, known)
    if found is None or found.epoch == known:
        return 0 if found is None else found.epoch
    lives = found.lives
    if not found.online:
        # Where a broker knows both by one name, looking has cut the other one off: it comes back now, if it lives.
        await asyncio.sleep(ANSWER_S)
        again = await _left(connect, fleet, signer, known)
        lives = again is not None and again.online and again.epoch >= found.epoch
    if lives:
        raise StateError(
            f"fleet {fleet!r}: another coordinator serves it (of epoch {found.epoch}; the last one of this store is "
            f"{known or 'none'}). Leave that one alone; or stop it first, where this store is to go on instead"
        )
    return found.epoch


def older(found: int, known: int) -> str:
    """What to say where the broker tells of an epoch ``found`` that came after the last one of the store, ``known``
    (0: none): the store is an older record of the fleet, or another one. Empty where it is the newest."""
    if not known < found < LAST_DAY_MS:
        return ""
    last = f"the last of this record at {day_of(known / 1000)}" if known else "this record knows of none"
    return (
        f"the fleet's last coordinator began at {day_of(found / 1000)} by its clock, and {last}: what was learned "
        "since is not in it, and is learned again. So it is after a restore; where another state folder or [store] has "
        "it, stop this one, and start with that"
    )


@dataclass(frozen=True)
class _Left:
    """The birth that the last coordinator left; ``lives`` where it answered just now."""

    epoch: int
    online: bool
    lives: bool = False


async def _left(connect: Connect, fleet: str, signer: Signer | None, known: int) -> _Left | None:
    topic = str(Topic(fleet, "co/state"))
    link = connect(lambda: Will(topic, b"", retain=False))
    await link.start()
    try:
        # What is said after subscribing comes back after what was retained. An empty message means nothing to anybody.
        await link.publish(topic, b"")
        heard = await _first(link, topic, LOOK_S, lambda arrival: _birth(arrival, fleet, signer))
        if heard is None:
            return None
        epoch, birth = heard
        if not birth.online or epoch == known:
            return _Left(epoch, birth.online)
        away = encode_frame(
            Header(birth.TYPE, fleet, boot=epoch), m.encode_message(replace(birth, online=False)), signer
        )
        await link.publish(topic, away)

        def answers(arrival: Arrival) -> bool | None:
            said = None if arrival.retained else _birth(arrival, fleet, signer)
            return True if said is not None and said[1].online else None

        return _Left(epoch, True, await _first(link, "", ANSWER_S, answers) is not None)
    finally:
        await link.close()


async def _first(link: Transport, marker: str, seconds: float, read: Callable[[Arrival], T | None]) -> T | None:
    """What ``read`` makes of the first message that it knows; None after so many seconds, or once an empty message came
    back on the topic ``marker``."""
    end = asyncio.get_running_loop().time() + seconds
    while True:
        try:
            async with asyncio.timeout_at(end):
                item = await link.receive()
        except TimeoutError:
            return None
        if not isinstance(item, Arrival):
            continue
        if item.topic == marker and not item.payload:
            end = min(end, asyncio.get_running_loop().time() + GRACE_S)
        elif (found := read(item)) is not None:
            return found


def _birth(arrival: Arrival, fleet: str, signer: Signer | None) -> tuple[int, m.CoordinatorBirth] | None:
    """The epoch and words of a coordinator of this fleet; None for anything else."""
    if arrival.topic != str(Topic(fleet, "co/state")) or not arrival.payload:
        return None
    try:
        frame = decode_frame(arrival.payload)
        said = m.decode_message(frame)
    except WireError:
        return None
    if not isinstance(said, m.CoordinatorBirth) or frame.header.fleet != fleet:
        return None
    if signer is not None and not signed_by(frame, signer.public):
        return None
    return frame.header.boot, said


def replaced(fleet: str, ours: int, by: Fenced) -> str:
    """Why a coordinator of epoch ``ours`` ends: another one was, or is, heard by the devices."""
    if by.online:
        return (
            f"fleet {fleet!r}: a coordinator of epoch {by.epoch} took over (ours is {ours}); stop one of the "
            "two, or give them different fleet names"
        )
    return (
        f"fleet {fleet!r}: a coordinator of epoch {by.epoch} was here meanwhile and is gone; devices have heard it "
        f"and hear ours ({ours}) no more; start this one again"
    )
