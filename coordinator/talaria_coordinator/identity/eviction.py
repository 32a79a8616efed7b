"""Eviction of devices from the broker: their rights and certificates are revoked, their links are cut."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection

from talaria.errors import TransportError
from talaria.wire.mqtt import Mqtt
from talaria_coordinator.broker import Broker
from talaria_coordinator.config.fleet import FleetConfig
from talaria_coordinator.identity import membership

logger = logging.getLogger(__name__)

KeepOut = Callable[[Collection[str], Collection[str]], Awaitable[str]]
"""Given who is out, and who got new keys; what is left to the operator, if anything."""
CUT_S = 5.0


async def nowhere(out: Collection[str], renewed: Collection[str]) -> str:
    """For a fleet without keys, whose broker knows nobody."""
    return ""


class Barring:
    """The broker of one fleet with keys, as it is told who may come."""

    def __init__(self, config: FleetConfig, broker: Broker) -> None:
        self._folder, self._broker = config.identity, broker
        self._own = broker.kind == "mosquitto"
        self._out: frozenset[str] = frozenset()
        self._untold = False
        """Whether lists were changed that a broker of the operator's own does not have yet."""

    async def __call__(self, out: Collection[str], renewed: Collection[str]) -> str:
        """Write the broker's lists, have it read them, and cut the links of those that are newly ``out`` or
        ``renewed``. Raises :class:`~talaria.errors.TalariaError` where the folder of keys refuses."""
        if self._folder is None:
            return ""
        new = frozenset(out) - self._out
        self._untold |= await asyncio.to_thread(membership.bar, self._folder, frozenset(out)) or bool(renewed)
        await asyncio.to_thread(self._broker.reload)
        if (self._folder / "ca.key").exists():
            for device in sorted(new | set(renewed)):
                await self._cut(device)
        self._out, untold, self._untold = frozenset(out), self._untold, False
        if self._own or not untold:
            return ""
        return f"copy {self._folder / 'broker'} to the broker and make it read its lists again (kill -HUP)"

    async def _cut(self, device: str) -> None:
        """Take the place of the device's link at the broker, and leave it."""
        assert self._folder is not None
        with membership.standing_in(self._folder, device) as tls:
            transport = Mqtt(self._broker.url, device, (), tls=tls, timeout=CUT_S)
            try:
                await transport.start()
            except TransportError as error:
                logger.info("the link of %s is not cut: %s", device, error)
            finally:
                await transport.close()
