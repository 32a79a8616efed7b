"""A program that is stopped stops, whatever else happens at that moment."""

import asyncio

import pytest

from talaria.protocol.actions import Publish
from talaria.protocol.driver import Driver


class Flushed:
    """A link on which nothing waits."""

    async def flush(self, timeout):
        """It is all out."""


@pytest.mark.parametrize("turns", range(5))
def test_who_is_cancelled_as_its_wait_ends_is_cancelled(turns):
    """``asyncio.wait_for`` of Python 3.11 may forget the cancellation then: a stopped coordinator stood still."""
    driver = Driver(lambda cut: b"", inbox=4)

    async def work():
        await driver.said(Flushed(), 60.0)
        await asyncio.Event().wait()

    async def scenario():
        driver.say(Publish("a", b""))
        task = asyncio.ensure_future(work())
        for _ in range(5):
            await asyncio.sleep(0)
        driver._line.done(await driver._line.next())  # ends the wait, some turns of the loop later
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=5)
        return bool(done) and task.cancelled()

    assert asyncio.run(scenario())


def test_who_works_still_at_the_end_does_not_wait_for_room_in_an_inbox_that_nobody_reads():
    """A coordinator that was told to end in the midst of a flood, while it checked an update, did not end."""
    driver = Driver(lambda cut: b"", inbox=4)

    async def check():
        await asyncio.sleep(0.1)
        await driver.inbox.put("what came of it")

    async def life():
        driver.spawn(check())
        for _ in range(4):
            driver.inbox.put_nowait("a flood")

    async def scenario():
        async with asyncio.timeout(5):
            await driver.run(life())
        await asyncio.sleep(0)
        return len(asyncio.all_tasks())

    assert asyncio.run(scenario()) == 1
