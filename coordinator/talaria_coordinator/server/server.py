"""A whole coordinator in one call: folders, brokers, the service of each fleet, and a clean shutdown on SIGTERM."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from talaria import stopping
from talaria.errors import ConfigError, TalariaError
from talaria.foreign import shown
from talaria.identity.credentials import password
from talaria.wire import broker_url
from talaria.wire.broker_url import Address
from talaria_coordinator.broker import Broker, open_broker
from talaria_coordinator.config.fleet import FleetConfig
from talaria_coordinator.fleet.above import Above
from talaria_coordinator.fleet.service import Report
from talaria_coordinator.server import ingest
from talaria_coordinator.server.open_state import held
from talaria_coordinator.server.operator_server import desk_of
from talaria_coordinator.server.served import Served


def require_safe(config: FleetConfig) -> None:
    """Raise :class:`ConfigError` where strangers could listen or speak: beyond this machine, devices and the
    coordinator need keys, and the links to the broker and to the stores need TLS."""
    config.store.require_safe()
    url = config.broker if "://" in config.broker else None
    host = config.host if url is None else Address.parse(url).host
    mend = "make a fleet with keys by `talaria fleet init`, or accept the risk with --insecure"
    broker_url.require_safe(host, url, config.identity is not None, mend)


def configs_in(paths: Sequence[Path]) -> list[Path]:
    """The settings that ``paths`` name: files as they are; of a folder its ``fleet.toml``, else all ``*.toml`` in it
    and the ``fleet.toml`` of each folder in it, by name. Raises :class:`ConfigError` for a folder without any."""
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            found.append(path)
        elif (path / "fleet.toml").is_file():
            found.append(path / "fleet.toml")
        else:
            inside = sorted([*path.glob("*.toml"), *path.glob("*/fleet.toml")])
            if not inside:
                raise ConfigError(f"serve: {path} holds neither *.toml nor a folder with a fleet.toml; name the files")
            found += inside
    return found


async def serve(config: FleetConfig, report: Report = lambda event: None, *, insecure: bool = False) -> None:
    """Serve one fleet until it is told to end, or (with ``stay`` off) its end; what ``talaria coordinator serve`` does.

    The program may be killed at any time: served again from the same state folder, the round completes with the same
    bytes. To end it from within, cancel the task. In the main thread SIGTERM, SIGINT and SIGHUP end it in good order.

    Args:
        config: What the fleet needs, by hand or by :func:`load_config`.
        report: Given every event as plain values, in this event loop; the first is ``ready`` with the URL of the
            ``broker``, which devices need.
        insecure: Accept devices, brokers and stores beyond this machine without TLS or keys.

    Raises:
        TalariaError: The folder, the broker or the port cannot be had, or strangers could take part and ``insecure``
            does not allow it.

    Example:
        ``asyncio.run(talaria_coordinator.serve(talaria_coordinator.load_config("watch/fleet.toml"), print))``
    """
    await serve_all([config], report, insecure=insecure)


async def serve_all(
    configs: Sequence[FleetConfig], report: Report, *, insecure: bool = False, above: Above | None = None
) -> None:
    """Serve several fleets in one process, each with its own folder, store and API, until all have ended.

    Fleets without keys that name the same managed broker (``auto``, ``mosquitto``, ``amqtt``) share one, which keeps
    its files with the first. A fleet that fails is told as ``failed`` and leaves the others alone; its error is raised
    once they have ended. ``above`` is where the rounds of a site come from, which is the one fleet then. Raises
    :class:`~talaria.errors.ConfigError` where two fleets are in each other's way.
    """
    for config in configs:
        if not isinstance(config, FleetConfig):
            raise ConfigError(f"serve: config={shown(config)} must be a FleetConfig; load_config reads one from a file")
    require_apart(configs)
    for config in configs:
        if config.site and above is None:
            raise ConfigError(f"serve: fleet {config.name!r} is a site ([upstream]); `talaria gateway run` serves it")
    served: list[Served] = []

    def stop() -> None:
        for one in served:
            one.stop()

    stopping.when_asked(stop)
    with ExitStack() as brokers:
        running: dict[object, Broker] = {}
        errors: list[TalariaError] = []

        async def one(config: FleetConfig) -> None:
            try:
                await _served(
                    config, report, insecure, lambda: _broker(config, configs, brokers, running), served, above
                )
            except TalariaError as error:
                errors.append(error)
                if len(configs) > 1:
                    report({"at": time.time(), "fleet": config.name, "event": "failed", "error": str(error)})

        try:
            async with asyncio.TaskGroup() as group:
                for config in configs:
                    group.create_task(one(config))
        except BaseExceptionGroup as found:
            raise found.exceptions[0] from None
    if errors:
        raise errors[0]


def require_apart(configs: Sequence[FleetConfig]) -> None:
    """Raise :class:`ConfigError` where two fleets have one name, one state folder or one port of the API."""
    if not configs:
        raise ConfigError("serve: no fleet is given; name its fleet.toml")
    for what, values in (
        ("[fleet] name", [config.name for config in configs]),
        ("[fleet] state", [str(config.state.resolve()) for config in configs]),
        ("[api] port", [str(config.api.port) for config in configs if config.api is not None and config.api.port]),
    ):
        twice = sorted({value for value in values if values.count(value) > 1})
        if twice:
            raise ConfigError(f"serve: two of these fleets have {what} = {twice[0]}; each needs its own")
    stores = [(config.store.database, config.store.blobs or config.state) for config in configs]
    shared = [database for database, _ in set(stores) if database is not None]
    if len(shared) > len(set(shared)):
        raise ConfigError("serve: fleets of one [store] database need their blobs in one place: name one [store] blobs")


def _broker(
    config: FleetConfig, configs: Sequence[FleetConfig], stack: ExitStack, running: dict[object, Broker]
) -> Broker:
    """The broker of a fleet, begun where none of those that run is for it; with room for all ``configs`` that share
    it."""
    key = _shared(config)
    if key not in running:
        sharing = [one for one in configs if _shared(one) == key]
        security = None if config.identity is None else config.identity / "broker"
        running[key] = stack.enter_context(
            open_broker(
                config.broker,
                host=config.host,
                port=config.port,
                state=config.state / "broker",
                security=security,
                devices=sum(one.expected for one in sharing),
                chunk=max(one.chunk for one in sharing),
            )
        )
    return running[key]


def _shared(config: FleetConfig) -> object:
    """What fleets that share a broker have alike."""
    managed = "://" not in config.broker and config.identity is None
    return (config.broker, config.host, config.port) if managed else config.name


async def _served(
    config: FleetConfig,
    report: Report,
    insecure: bool,
    broker_of: Callable[[], Broker],
    served: list[Served],
    above: Above | None,
) -> None:
    if not insecure:
        require_safe(config)
    if config.password_file is not None:
        password(config.password_file)
    with held(config.state), desk_of(config, report, insecure) as desk:
        ingest.require(config)
        one = Served(config, desk, broker_of(), above)
        served.append(one)
        await one.live()
    report({"at": time.time(), "fleet": config.name, "event": "stopped"})
