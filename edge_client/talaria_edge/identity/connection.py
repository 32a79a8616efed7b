"""A device's connection to its broker, with its own keys, on no link where strangers could listen or speak."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from talaria import time
from talaria.errors import ConfigError, TransportError
from talaria.identity.credentials import Credentials, name_in, password_in
from talaria.protocol.device.machine import DeviceLimits, DeviceMachine
from talaria.wire import broker_url
from talaria.wire.broker_url import Address
from talaria.wire.mqtt import Mqtt, Transport, Will
from talaria.wire.topics import device_filters
from talaria_edge.config import DeviceConfig
from talaria_edge.home_assistant import command_topic

Open = Callable[[DeviceConfig, Callable[[], Will]], Transport]
FIRST_RETRY_S, LAST_RETRY_S = 0.5, 30.0


def over_mqtt(config: DeviceConfig, will: Callable[[], Will]) -> Transport:
    """A device's own connection to its broker."""
    filters = device_filters(config.fleet, config.device)
    if config.home_assistant is not None:
        filters += (command_topic(config.fleet, config.device),)
    own = config.identity if config.username is None else None
    return Mqtt(
        config.broker,
        f"{config.fleet}.{config.device}",
        filters,
        will=will,
        username=config.username,
        password=password_in(config.password_file),
        tls=None if own is None else Credentials.load(own).tls,
    )


def credentials_of(folder: Path, fleet: str, device: str) -> Credentials:
    """The keys in ``folder``; :class:`ConfigError` where they are another fleet's or device's."""
    own = Credentials.load(folder)
    if (own.fleet, own.device) != (fleet, device):
        raise ConfigError(
            f"identity: {folder} belongs to device {own.device!r} of fleet {own.fleet!r}, not to {device!r} of "
            f"{fleet!r}; give each device its own folder"
        )
    named = name_in(own.tls.cert)
    if named not in (None, device):
        raise ConfigError(
            f"identity: {own.tls.cert} is the certificate of {named!r}, for whom the broker would take {device!r}; "
            "bring this device's own back, or join the fleet again"
        )
    return own


def keys_of(config: DeviceConfig) -> Credentials | None:
    """This device's own keys, or None where it has none. Raises as :func:`credentials_of`."""
    return None if config.identity is None else credentials_of(config.identity, config.fleet, config.device)


def machine_of(config: DeviceConfig, own: Credentials | None, process: bytes) -> DeviceMachine:
    """What decides what this device says to its fleet: signed with its ``own`` keys, heard of their coordinator alone;
    ``process`` are bytes that no other program has."""
    return DeviceMachine(
        config.fleet,
        config.device,
        limits=DeviceLimits(max_model=config.max_model, retry=config.retry_s),
        profile=json.dumps(dict(config.profile)).encode(),
        signer=None if own is None else own.signer,
        coordinator_key=None if own is None else own.coordinator_key,
        process=process,
    )


def require_safe(config: DeviceConfig) -> None:
    """Raise :class:`ConfigError` where strangers could listen or speak: beyond this machine the link to the broker
    needs TLS, and the device needs keys, with which it also knows its coordinator."""
    mend = "join a fleet with keys by `talaria edge join`, or accept the risk with --insecure"
    broker_url.require_safe(Address.parse(config.broker).host, config.broker, config.identity is not None, mend)


def unheard(fleet: str, seconds: float) -> str:
    """Why a broker that is reached may have nothing of a coordinator."""
    return (
        f"nobody of fleet {fleet!r} was heard in {seconds:g} s; it has never run at this broker, [fleet] name is "
        f"another one, or the broker does not let this device read fl/1/{fleet}/co/#"
    )


async def reach(transport: Transport, patience_s: float, tell: Callable[..., Any]) -> None:
    """The first connection; afterwards the transport reconnects by itself. ``patience_s=0`` tries for ever, else
    :class:`~talaria.errors.TransportError` is raised once it is over."""
    begun, wait = time.monotonic(), FIRST_RETRY_S
    while True:
        try:
            await transport.start()
        except TransportError as error:
            if patience_s and time.monotonic() - begun + wait > patience_s:
                raise
            tell("unreachable", error=str(error), retry_s=wait)
            await asyncio.sleep(wait)
            wait = min(2 * wait, LAST_RETRY_S)
        else:
            return
