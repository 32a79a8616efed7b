"""Checks that no other coordinator serves a fleet before this one enters it, over a connection of its own.

The last coordinator left its birth with the broker. One that this store knows of was its own: whoever starts last has
the fleet. Any other is a stranger to this store, which is new, or restored from a backup, or another folder by mistake.
Whether that one lives is asked then: a coordinator that hears itself called away says that it is there; and where a
broker knows both by one name, looking has put it out, and it puts this connection out as soon as it comes back, again
and again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from talaria.errors import StateError, TransportError, WireError
from talaria.protocol.actions import Fenced
from talaria.wire import messages as m
from talaria.wire.frames import Header, decode_frame, encode_frame, signed_by
from talaria.wire.mqtt import Arrival, LinkDown, Transport, Will
from talaria.wire.signing import Signer
from talaria.wire.topics import Topic
from talaria.wire.validity import day_of
from talaria_coordinator.fleet.witness import LAST_DAY_MS

LOOK_S = 2.0
"""Seconds that a broker may take to deliver what it has retained, and what is sent to it."""
ANSWER_S = 10.0
"""Seconds that a coordinator may take to answer, or to come back: a link that breaks again and again waits up to 8."""
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
    epoch, lives = await _looked(connect, fleet, signer, known)
    if lives is None:  # another one breaks each link of ours, a broker that begins anew breaks one
        epoch, lives = await _looked(connect, fleet, signer, known)
    if lives is not False:
        raise StateError(
            f"fleet {fleet!r}: another coordinator serves it (of epoch {epoch}; the last one of this store is "
            f"{known or 'none'}). Leave that one alone; or stop it first, where this store is to go on instead"
        )
    return epoch


async def _looked(connect: Connect, fleet: str, signer: Signer | None, known: int) -> tuple[int, bool | None]:
    """The newest epoch that the broker tells of (0: none), and whether its coordinator lives, where this store does not
    know it; None where the link broke before it could answer."""
    topic = str(Topic(fleet, "co/state"))
    link = connect(lambda: Will(topic, b"", retain=False))
    await link.start()
    try:
        # What is said after subscribing comes back after what was retained. An empty message means nothing to anybody.
        await link.publish(topic, b"")
        left = await _first(link, topic, LOOK_S, lambda item: _birth(item, fleet, signer))
        if left is None:
            return 0, False
        epoch, birth = left
        if epoch == known:
            return epoch, False
        if birth.online:
            away = Header(birth.TYPE, fleet, boot=epoch)
            await link.publish(topic, encode_frame(away, m.encode_message(replace(birth, online=False)), signer))

        def answer(item: Arrival) -> bool | None:
            said = None if item.retained else _birth(item, fleet, signer)
            return True if said is not None and said[1].online else None

        try:
            return epoch, await _first(link, "", ANSWER_S, answer) is not None
        except TransportError:
            return epoch, None
    finally:
        await link.close()


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


async def _first(link: Transport, marker: str, seconds: float, read: Callable[[Arrival], T | None]) -> T | None:
    """What ``read`` makes of the first message that it knows; None after so many seconds, or once an empty message came
    back on the topic ``marker``. Raises :class:`~talaria.errors.TransportError` where the link breaks."""
    end = asyncio.get_running_loop().time() + seconds
    while True:
        try:
            async with asyncio.timeout_at(end):
                item = await link.receive()
        except TimeoutError:
            return None
        if isinstance(item, LinkDown):
            raise TransportError(f"the link broke while the broker was asked who serves the fleet: {item.reason}")
        if not isinstance(item, Arrival):
            continue
        if item.topic == marker and not item.payload:
            end = min(end, asyncio.get_running_loop().time() + GRACE_S)
        elif (found := read(item)) is not None:
            return found


def _birth(item: Arrival, fleet: str, signer: Signer | None) -> tuple[int, m.CoordinatorBirth] | None:
    """The epoch and words of a coordinator of this fleet; None for anything else."""
    if item.topic != str(Topic(fleet, "co/state")) or not item.payload:
        return None
    try:
        frame = decode_frame(item.payload)
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
