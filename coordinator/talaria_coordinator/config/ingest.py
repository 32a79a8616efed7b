"""The ``[ingest]`` table of a ``fleet.toml``: how many processes take up the updates of one fleet."""

from __future__ import annotations

from talaria.config import Section
from talaria.errors import ConfigError

MOST = 16


def workers_of(section: Section) -> int:
    """What an ``[ingest]`` table says; 0: the coordinator's own process takes them up."""
    workers = section.whole("workers", 0)
    section.done()
    return workers


def require_workers(workers: int, secure: bool, broker: str) -> None:
    """Raise :class:`ConfigError` where a fleet cannot have so many ingest workers."""
    if not 0 <= workers <= MOST:
        raise ConfigError(
            f"ingest: workers={workers} must be in 0..{MOST}; 0, or no [ingest], is the coordinator's own process"
        )
    if not workers:
        return
    if secure:
        raise ConfigError(
            f"ingest: workers={workers} and [privacy] secure=true exclude each other: what masked updates are checked "
            "against is in the coordinator's own process. Leave one of them out"
        )
    if broker == "amqtt":
        raise ConfigError(
            f'ingest: workers={workers} and [broker] url="amqtt" exclude each other: amqtt runs in the coordinator\'s '
            'own process, and takes what workers save. Give url = "mosquitto", or the URL of a broker'
        )
