"""What the service does for those who work for it, and patience with a disk or a database that refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from talaria.errors import TalariaError
from talaria_coordinator.fleet.aggregation import passing

T = TypeVar("T")
AGAIN_S = (2.0, 120.0)
"""Seconds until something that failed is tried again, at first and at most."""


@dataclass(frozen=True)
class Hands:
    """What the service does for its helpers: give the machine an event, tell the journal, start a task, and put
    something into the service's own line."""

    feed: Callable[[object], None]
    tell: Callable[..., None]
    spawn: Callable[[Coroutine[Any, Any, None]], object]
    put: Callable[[object], Coroutine[Any, Any, None]]
    leaving: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the service ends: what a disk or a database refuses is not tried anew then, as after a crash."""


async def leaves_within(leaving: asyncio.Event, seconds: float) -> bool:
    """Whether the service is ``leaving`` now, or within so many seconds, which are waited for else."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await leaving.wait()
    return leaving.is_set()


async def insist(work: Callable[[], T], complain: Callable[[str], None], leaving: asyncio.Event) -> T:
    """What ``work`` gives, beside the service; tried again while this machine refuses, which ``complain`` is told, and
    until the service is ``leaving``: the task is cancelled then."""
    wait = AGAIN_S[0]
    while True:
        try:
            return await asyncio.to_thread(work)
        except Exception as error:
            if not passing(error):
                raise
            complain(str(error))
            if await leaves_within(leaving, wait):
                raise asyncio.CancelledError from None
            wait = min(2 * wait, AGAIN_S[1])


async def whenever(changed: asyncio.Event, keep_out: Callable[[], Awaitable[str]], tell: Callable[..., None]) -> None:
    """Have ``keep_out`` done after each change, and again for as long as this machine's disk refuses."""
    wait = AGAIN_S[0]
    while True:
        await changed.wait()
        changed.clear()
        try:
            left = await keep_out()
        except (TalariaError, OSError) as error:
            tell("error", error=str(error))
            await asyncio.sleep(wait)
            wait = min(2 * wait, AGAIN_S[1])
            changed.set()
        else:
            wait = AGAIN_S[0]
            if left:
                tell("broker-lists", mend=left)
