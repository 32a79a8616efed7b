"""The coordinator's connection to its broker."""

from __future__ import annotations

from collections.abc import Callable

from talaria.identity import credentials
from talaria.wire.mqtt import Mqtt, Transport, Will
from talaria.wire.topics import coordinator_filters
from talaria_coordinator.config.fleet import FleetConfig
from talaria_coordinator.identity import membership

Open = Callable[[str, FleetConfig, Callable[[], Will]], Transport]


def over_mqtt(url: str, config: FleetConfig, will: Callable[[], Will]) -> Transport:
    """With the fleet's own certificates where it has keys; at a hosted broker with its user name and password."""
    own = config.identity if config.username is None else None
    return Mqtt(
        url,
        f"{config.name}.{membership.COORDINATOR}",
        coordinator_filters(config.name, uploads=not config.workers),
        will=will,
        username=config.username,
        password=credentials.password_in(config.password_file),
        tls=None if own is None else membership.tls(own),
        as_published=True,
    )
