"""A new fleet's folder, ready to be served: keys, the broker's configuration, and fleet.toml."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

from talaria.errors import ConfigError
from talaria.identity import credentials
from talaria.wire.broker_url import at, loopback
from talaria_coordinator.broker import mosquitto
from talaria_coordinator.config.api import PORT
from talaria_coordinator.identity import membership

_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.:-]{0,251}[A-Za-z0-9])?")

TOKEN = "api.token"
BROKER = """\
# For a Mosquitto of your own. The account that runs it must own this folder (chown), and is the only one to read it.
# After `talaria fleet revoke`, make it read the lists again: kill -HUP, or systemctl reload mosquitto.
"""

SETTINGS = """\
[fleet]
name = {name}
devices = {devices}                 # learn once so many have come

[broker]
url = "mosquitto"             # with the files in broker/; or the URL of a broker that has them
host = {listen}
port = {port}

[identity]
folder = "."

[rounds]
deadline_s = 600
quorum = 0.5

[api]                         # dashboard, API and metrics, on this machine alone
port = {api_port}                   # of http://127.0.0.1; 0 is any free one, which the coordinator tells
token_file = "api.token"      # every request needs the word in it
# host = "0.0.0.0"            # beyond this machine: give a certificate too, as nobody should read the token on its way
# cert = "api.crt"
# key = "api.key"

[run]                         # what your fleet learns; see `talaria algorithms`
algorithm = "hermes"
rounds = 30
[run.spec]
name = "imu_cnn"
input_shape = [6, 100]
classes = 7
[run.recipe]                  # how a device trains in a round; what is left out is as it stands here
epochs = 2
batch = 16
lr = 0.02
momentum = 0.9
"""


def found(
    folder: Path, name: str, hosts: Sequence[str], port: int, devices: int, api_port: int = PORT
) -> dict[str, str]:
    """Make the folder; what was made, by name. ``hosts`` are how devices reach the broker, the first one preferred.
    The API's token is new, and in a file for its owner alone.

    Raises :class:`ConfigError` where the folder holds a fleet already, or a name is not one.
    """
    for host in hosts:
        if not _HOST.fullmatch(host) and not _is_address(host):
            raise ConfigError(f"init: host={host!r} is no host name or address; give it without scheme and port")
    url = f"mqtts://{at(hosts[0], port)}"
    if all(map(loopback, hosts)):
        listen = "::1" if "::1" in hosts else "127.0.0.1"
    else:
        listen = "::" if any(":" in host for host in hosts) else "0.0.0.0"
    membership.create(folder, name, url, list(dict.fromkeys([*hosts, "localhost", "127.0.0.1", "::1"])))
    broker = folder.resolve() / "broker"
    config = mosquitto.config(listen, port, broker / "persistence", security=broker, devices=devices)
    credentials.write(broker / "mosquitto.conf", (BROKER + config).encode())
    credentials.make_private(broker / "persistence")
    credentials.write(folder / TOKEN, (secrets.token_hex(32) + "\n").encode(), private=True)
    settings = SETTINGS.format(
        name=json.dumps(name), devices=devices, listen=json.dumps(listen), port=port, api_port=api_port
    )
    credentials.write(folder / "fleet.toml", settings.encode())
    return {
        "fleet": name,
        "folder": str(folder),
        "broker": url,
        "settings": str(folder / "fleet.toml"),
        "token_file": str(folder / TOKEN),
    }


def _is_address(host: str) -> bool:
    """Also one of IPv6 that begins or ends with a colon."""
    with suppress(ValueError):
        return bool(ip_address(host))
    return False
