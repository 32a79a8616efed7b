"""``talaria edge leave``: a device's owner takes it out of its fleet for good.

The device says so, signed with its key where it has one, until the coordinator answers: then that is in the
coordinator's store, and no round asks this device or waits for it. What it gave before stays in the global model.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress

from talaria import time
from talaria.errors import TalariaError, TransportError
from talaria.protocol import actions as a
from talaria.protocol import events as e
from talaria.protocol.driver import Driver
from talaria.wire.mqtt import LinkDown, LinkUp, NotTaken, Transport, Will
from talaria_edge import home_assistant as ha
from talaria_edge.config import DeviceConfig
from talaria_edge.identity.connection import Open, keys_of, machine_of, over_mqtt, reach, require_safe
from talaria_edge.storage.state import DeviceStore, has_left

STAYS = "so it belongs to the fleet still, and nothing has changed here"
MEND = "try again later, or ask its operator for `talaria coordinator retire`"


def leave(
    config: DeviceConfig,
    *,
    erase: bool = False,
    wait_s: float = 30.0,
    insecure: bool = False,
    opened: Open = over_mqtt,
) -> None:
    """Take the device out of its fleet; afterwards ``erase`` what it kept, or leave it where it is. It refuses to take
    part from then on.

    Raises :class:`~talaria.errors.TransportError` where the broker or the coordinator does not answer within ``wait_s``
    seconds, and :class:`~talaria.errors.StateError` where an agent runs with its folder, or it has left before; nothing
    is erased then. To ``erase`` what a device kept that has left before needs nobody's answer.
    """
    if not insecure:
        require_safe(config)
    with DeviceStore(config.state, config.fleet, config.device) as store:
        if not (erase and has_left(config.state)):  # it left before, or a kill came before it was erased
            asyncio.run(_Leaving(config, store, opened).run(wait_s))
            store.left()
        if erase:
            store.erase()


class _Leaving:
    """One connection of the device, which says that it leaves until that is heard."""

    def __init__(self, config: DeviceConfig, store: DeviceStore, opened: Open) -> None:
        self._config, self._store, self._opened = config, store, opened
        self._half = machine_of(config, keys_of(config), os.urandom(8))
        self._driver = Driver(lambda cut: b"", inbox=256)
        self._state = store.protocol()
        self._heard, self._up = False, False
        self._said = ""

    async def run(self, wait_s: float) -> None:
        try:
            async with asyncio.timeout(wait_s):
                await self._driver.run(self._live(wait_s))
        except TimeoutError:
            fleet = self._config.fleet
            if not self._up:
                said = f"{self._config.broker} did not answer"
            else:
                said = f"no coordinator of fleet {fleet!r} answered" + (f" ({self._said})" if self._said else "")
            raise TransportError(f"leave: {said} within {wait_s:g} s, {STAYS}; {MEND}") from None
        except TransportError as error:
            raise TransportError(f"leave: {error}, {STAYS}; {MEND}") from None

    async def _live(self, wait_s: float) -> None:
        transport = self._opened(self._config, self._will)
        self._driver.last_word = lambda: self._half.will(self._state) if self._state.linked else None
        async with self._driver.linked(transport, reach(transport, wait_s, lambda *a, **k: None), self._linked):
            self._driver.beside(self._say())
            while not self._heard:
                self._feed(await self._driver.inbox.get())
            await self._clean(transport)

    def _will(self) -> Will:
        self._feed(e.Connecting(time.monotonic()))
        return Will(*self._half.will(self._state))

    def _linked(self, change: LinkUp | LinkDown | NotTaken) -> None:
        if isinstance(change, NotTaken):
            self._said = change.reason
        else:
            self._up = isinstance(change, LinkUp)

    async def _say(self) -> None:
        while True:
            await self._driver.inbox.put(e.SayGoodbye(time.monotonic(), for_good=True))
            await asyncio.sleep(self._config.retry_s)

    def _feed(self, event: object) -> None:
        for action in self._half.step(self._state, event)[1]:
            match action:
                case a.Save():
                    self._store.save_protocol(self._state)
                case a.Publish():
                    self._driver.say(action)
                case a.Released():
                    self._heard = True
                case a.FrameRefused() | a.Told():
                    self._said = action.reason
                case a.Noticed():
                    self._said = action.text
                case _:
                    pass  # whatever a round asks for, this device takes part in none

    async def _clean(self, transport: Transport) -> None:
        """Nothing of what it showed in Home Assistant stays at the broker."""
        home = self._config.home_assistant
        if home is None:
            return
        topic = ha.state_topic(self._config.fleet, self._config.device)
        config = ha.config_topic(home, self._config.fleet, self._config.device)
        with suppress(TalariaError):
            for shown in (config, topic, f"{topic}/bundle", f"{topic}/alive"):
                await transport.publish(shown, b"", retain=True)
