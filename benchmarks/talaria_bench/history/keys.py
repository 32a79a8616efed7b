"""The keys of fleet and devices, made from the seed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from talaria.identity import credentials
from talaria.wire.signing import Signer
from talaria_bench.history.faults import COORDINATOR
from talaria_bench.history.world import FLEET, WALL, World
from talaria_coordinator.identity.membership import EnrolledDevice, Membership


def enrol(world: World) -> None:
    """Write all keys, where the plan has any."""
    if not world.plan.keyed:
        return
    own = {name: Signer.of(key) for name, key in world.keys.items()}
    folder = world.folder / "identity"
    folder.mkdir(exist_ok=True)
    _write(world, folder / "sign.key", COORDINATOR)
    members = {name: EnrolledDevice(own[name].public, 1, WALL) for name in world.plan.devices}
    beside = folder / "members.new"
    beside.write_bytes(Membership(FLEET, "mqtt://history", (), members).encode())
    beside.rename(folder / "members.json")
    for name in world.plan.devices:
        place = world.folder / name / "identity"
        place.mkdir(exist_ok=True)
        facts = {"fleet": FLEET, "device": name, "broker": "mqtt://history"}
        facts["coordinator"] = own[COORDINATOR].public.hex()
        (place / "fleet.json").write_text(json.dumps(facts))
        _write(world, place / "sign.key", name)
        _write(world, place / "tls.key", name)


def renew(world: World, name: str) -> None:
    """Another key for this device."""
    world.enrolments += 1
    world.keys[name] = hashlib.sha256(f"{world.enrolments}/{world.keys[name]!r}".encode()).digest()


def _write(world: World, path: Path, name: str) -> None:
    path.touch(mode=0o600)
    path.write_bytes(credentials.pem(Ed25519PrivateKey.from_private_bytes(world.keys[name])))
