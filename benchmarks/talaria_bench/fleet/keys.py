"""Keys for a fleet of a bench, and the secure rounds that they are for. Its links stay plain: a proxy disturbs
them. The broker takes a name and a password, of everybody."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from talaria.errors import ConfigError
from talaria.privacy.rule import Privacy
from talaria_bench.fleet.files import FLEET
from talaria_coordinator.identity import membership
from talaria_edge.identity.enroll import ask, finish

PRIVACY = Privacy(secure=True, most_weight=64)
STEP_S = 6.0
LEARNED = "fedavg"
"""A device keeps nothing of it to itself: what it learned in a round that went on without it does not matter, and one
sum alone is the right one."""


def require(algorithm: str, devices: int) -> None:
    """Raise :class:`ConfigError` where a secure run could not be held to its bytes."""
    if algorithm != LEARNED:
        raise ConfigError(
            f"chaos: algorithm={algorithm!r} keeps private parts, so that no one sum is right; leave it out"
        )
    if devices < 4:
        raise ConfigError(
            f"chaos: devices={devices}: of a secure sum one may stay away, and three must be left; give 4"
        )


def made(folder: Path, devices: Sequence[str], url: str) -> Mapping[str, Mapping[str, Any]]:
    """Make the fleet's keys and those of all devices; what ``fleet.toml`` says of it."""
    keys = folder / "keys"
    membership.create(keys, FLEET, url, ["127.0.0.1"])
    for name in devices:
        own = folder / f"id-{name}"
        request = ask(own, membership.enroll(keys, name))
        finish(own, membership.admit(keys, request.read_bytes()).encode())
    _password(folder)
    privacy = {"secure": True, "most_weight": PRIVACY.most_weight, "step_s": STEP_S}
    broker = {"username": "bench", "password_file": "password"}
    return {"broker": broker, "identity": {"folder": "keys"}, "privacy": privacy}


def given(device: Path, name: str) -> None:
    """Add to ``DEVICE.toml`` where its keys are."""
    text = device.read_text().replace("[data]", f'username = "{name}"\npassword_file = "password"\n[data]')
    device.write_text(f'{text}[identity]\nfolder = "id-{name}"\n[privacy]\nsecure = true\n')


def _password(folder: Path) -> None:
    path = folder / "password"
    path.touch(mode=0o600)
    path.write_text("bench")
