"""How the clients of a simulation are called as devices of a fleet: a topic and a certificate take few characters."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import replace

from talaria.data.federated import Federated
from talaria.errors import ConfigError
from talaria.foreign import shown
from talaria.wire.topics import DEVICE_NAME

TAKEN = frozenset({"fleet"})
"""Names of files beside those of devices."""
DIGITS, LONGEST = 8, 27


def device_id(client: str) -> str:
    """The device of the client of this name: that name itself where it may be one, else what letters and digits it has
    in common with such names, and the beginning of its sha256. It depends on the name alone.

    >>> device_id("anna"), device_id("Jürgen B."), device_id("Пётр")
    ('anna', 'jurgen-b-29c990e8', 'client-57328c18')
    """
    if re.fullmatch(DEVICE_NAME, client) and client not in TAKEN:
        return client
    plain = unicodedata.normalize("NFKD", client.casefold())
    readable = re.sub("[^a-z0-9]+", "-", "".join(c for c in plain if not unicodedata.combining(c))).strip("-")
    digest = hashlib.sha256(client.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{readable[:LONGEST].rstrip('-') or 'client'}-{digest[:DIGITS]}"


def ids_of(clients: Iterable[str]) -> dict[str, str]:
    """By client, its device. Raises :class:`ConfigError` where two would be one."""
    found: dict[str, str] = {}
    for client in clients:
        found[client] = device_id(client)
    owners = {device: client for client, device in found.items()}
    for client, device in found.items():
        if owners[device] != client:
            raise ConfigError(
                f"clients {shown(client)} and {shown(owners[device])} would both be device {device!r}; rename one"
            )
    return found


def as_devices(data: Federated, ids: Mapping[str, str]) -> Federated:
    """The same data, each client under the name of its device."""
    clients, newcomers = (
        {ids[name]: client for name, client in part.items()} for part in (data.clients, data.newcomers)
    )
    return replace(data, clients=clients, newcomers=newcomers)
