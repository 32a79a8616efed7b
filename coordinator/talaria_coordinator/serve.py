"""A whole coordinator in one call: its folder, its broker, its service, and a good end on SIGTERM."""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import suppress

from talaria.errors import ConfigError
from talaria.wire.address import Address
from talaria_coordinator.broker import open_broker
from talaria_coordinator.config import FleetConfig
from talaria_coordinator.desk import desk_of
from talaria_coordinator.hosts import loopback
from talaria_coordinator.opening import held, open_blobs, open_store
from talaria_coordinator.service import Report, Service


def require_safe(config: FleetConfig) -> None:
    """Raise :class:`ConfigError` where strangers could listen or speak: beyond this machine, devices and the
    coordinator need keys, and the links to the broker and to the stores need TLS."""
    config.store.require_safe()
    given = Address.parse(config.broker) if "://" in config.broker else None
    host = config.host if given is None else given.host
    if loopback(host):
        return
    mend = "make a fleet with keys by `talaria fleet init`, or accept the risk with --insecure"
    if given is not None and not given.tls:
        raise ConfigError(
            f"broker={config.broker!r} is beyond this machine and without TLS: anybody on the way could "
            f"read and alter all that is said. Use mqtts:// or wss://, and {mend}"
        )
    if config.identity is None:
        raise ConfigError(
            f"broker on {host!r}: without [identity] anybody who reaches the broker is taken for any device; {mend}"
        )


async def serve(config: FleetConfig, report: Report, *, insecure: bool = False) -> None:
    """Serve one fleet until SIGTERM, SIGINT, or (with ``stay`` off) its end.

    ``report`` is given every event; the first is ``ready`` with the broker's URL, which devices need. Raises
    :class:`~talaria.errors.TalariaError` where the folder, the broker or the port cannot be had, or where strangers
    could take part and ``insecure`` does not allow it.
    """
    if not insecure:
        require_safe(config)
    security = None if config.identity is None else config.identity / "broker"
    with (
        held(config.state),
        desk_of(config, report, insecure) as desk,
        open_broker(
            config.broker, host=config.host, port=config.port, state=config.state / "broker", security=security
        ) as broker,
    ):
        store = open_store(config)
        try:
            blobs = open_blobs(config)
            service = Service(
                config,
                store,
                blobs,
                report=desk.report,
                observe=desk.observe,
                count=desk.count,
                on_members=broker.reload,
            )
            loop = asyncio.get_running_loop()
            for name in (signal.SIGTERM, signal.SIGINT):
                # Only the main thread can listen to signals; elsewhere the caller stops the service itself.
                with suppress(RuntimeError, ValueError):
                    loop.add_signal_handler(name, service.stop)
            (config.state / "broker.url").write_text(broker.url + "\n")
            ready = {"at": time.time(), "fleet": config.name, "event": "ready", "broker": broker.url}
            report({**ready, "kind": broker.kind, "state": str(config.state), **desk.open(service)})
            await service.run(broker.url)
        finally:
            store.close()
    report({"at": time.time(), "fleet": config.name, "event": "stopped"})
