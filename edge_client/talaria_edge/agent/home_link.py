""":class:`HomeLink`: an agent's link to its broker, on which the device also appears in Home Assistant."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from talaria import time
from talaria.errors import TalariaError
from talaria.wire.transport import Arrival, Incoming, LinkUp, Transport
from talaria_edge import home_assistant as ha
from talaria_edge.config import DeviceConfig
from talaria_edge.deployment import gate

logger = logging.getLogger(__name__)

Report = Callable[[dict[str, Any]], None]
AGAIN_S = ha.SILENT_S / 3


class HomeLink:
    """A :class:`Transport` around the agent's own: what is for Home Assistant never reaches the agent. :meth:`seen` is
    told each event of the agent."""

    def __init__(self, inner: Transport, config: DeviceConfig, report: Report, shown: ha.Shown) -> None:
        assert config.home_assistant is not None
        self._inner, self._config, self._report, self._home = inner, config, report, config.home_assistant
        self.shown = shown
        self._topic = ha.state_topic(config.fleet, config.device)
        self._command = ha.command_topic(config.fleet, config.device)
        self._up = False
        self._work: set[asyncio.Task[None]] = set()
        self._busy = asyncio.Lock()

    @property
    def largest(self) -> int | None:
        """As the agent's link."""
        return self._inner.largest

    async def start(self) -> None:
        """Connect, and from then on say every few minutes what is shown."""
        await self._inner.start()
        self._spawn(self._beat())

    async def receive(self) -> Incoming:
        """The next thing for the agent."""
        while True:
            item = await self._inner.receive()
            if isinstance(item, LinkUp):
                self._up = True
                self._spawn(self._announce())
            if not isinstance(item, Arrival) or item.topic != self._command:
                return item
            # What somebody left at the broker was meant for another day.
            if not item.retained and item.payload in (b"install", b"rollback"):
                self._spawn(self._obey(item.payload.decode()))

    async def publish(self, topic: str, payload: bytes, *, retain: bool = False, name: str = "") -> bool:
        """As the agent's link."""
        return await self._inner.publish(topic, payload, retain=retain, name=name)

    def flying(self, name: str) -> bool:
        """As the agent's link."""
        return self._inner.flying(name)

    async def recall(self) -> None:
        """As the agent's link."""
        await self._inner.recall()

    async def flush(self, timeout: float) -> bool:
        """As the agent's link."""
        return await self._inner.flush(timeout)

    def renew(self, reason: str) -> None:
        """As the agent's link."""
        self._inner.renew(reason)

    async def close(self) -> None:
        """Say that the device is away, and end."""
        for task in self._work:
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)
        if self._up:
            with suppress(TalariaError, TimeoutError):
                async with asyncio.timeout(2.0):
                    await self._inner.publish(f"{self._topic}/alive", b"offline", retain=True)
                await self._inner.flush(2.0)
        await self._inner.close()

    def seen(self, event: Mapping[str, Any]) -> None:
        """Show what an event of the agent changes."""
        now = ha.after(self.shown, event)
        if now != self.shown or event.get("event") in ("deployed", "kept", "done"):
            self.shown = now
            if self._up:
                self._spawn(self._show())

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(self._guarded(work))
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    async def _guarded(self, work: Any) -> None:
        try:
            await work
        except (TalariaError, OSError) as error:
            self._tell("error", error=str(error))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(AGAIN_S)
            await self._show()

    async def _announce(self) -> None:
        config = ha.discovery(
            self._home, self._config.fleet, self._config.device, update=self._config.bundle is not None
        )
        topic = ha.config_topic(self._home, self._config.fleet, self._config.device)
        await self._say(topic, json.dumps(config))
        await self._show()
        await self._say(f"{self._topic}/alive", "online")

    async def _show(self) -> None:
        await self._say(self._topic, json.dumps(self.shown.to_json()))
        if self._config.bundle is not None:
            await self._say(f"{self._topic}/bundle", json.dumps(await asyncio.to_thread(self._versions)))

    def _versions(self) -> dict[str, Any]:
        """The bundle in force and the newest, by the first 12 digits of their sha256; what nobody knows is left out."""
        state, waiting = gate.read(self._config.state), gate.waiting(self._config.state)
        newest = state.current if waiting is None else waiting.digest
        told = {"installed_version": state.current, "latest_version": newest}
        found: dict[str, Any] = {name: digest[:12] for name, digest in told.items() if digest is not None}
        return found | ({} if waiting is None else {"release_summary": waiting.reason[:250]})

    async def _obey(self, word: str) -> None:
        if self._config.bundle is None:
            return
        work = gate.install if word == "install" else gate.rollback
        async with self._busy:
            try:
                state = await asyncio.to_thread(work, self._config.state, self._config.bundle)
                self._tell("installed" if word == "install" else "rolled-back", bundle=state.current)
            finally:
                await self._show()

    async def _say(self, topic: str, text: str) -> None:
        await self._inner.publish(topic, text.encode(), retain=True)

    def _tell(self, event: str, **facts: Any) -> None:
        self._report({"at": time.time(), "device": self._config.device, "event": event, **facts})


def at_home(config: DeviceConfig, report: Report, opened: Any) -> tuple[Report, Any]:
    """The agent's report and its way to open a link, for a device that is shown in Home Assistant; as they are for one
    that is not."""
    if config.home_assistant is None:
        return report, opened
    link: list[HomeLink] = []
    shown = [_before(config)]

    def opening(config: DeviceConfig, will: Any) -> HomeLink:
        if link:
            shown[0] = link[-1].shown
        link[:] = [HomeLink(opened(config, will), config, report, shown[0])]
        return link[0]

    def telling(event: dict[str, Any]) -> None:
        report(event)
        if link:
            link[0].seen(event)

    return telling, opening


def _before(config: DeviceConfig) -> ha.Shown:
    """What was known when the agent ran last."""
    try:
        found = json.loads((config.state / "result.json").read_bytes())
        return ha.finished(ha.Shown(), found)
    except (OSError, ValueError, RecursionError, AttributeError):
        return ha.Shown()
