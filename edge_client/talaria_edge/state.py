"""One device's memory on flash: its boot counter, its private tensors, and the round that is not yet received.

    private.safetensors           the private state after its latest round; replaced by rename only
    pending-private.safetensors   what replaces it once the coordinator has our update, or went on without us
    pending-update.bin            the update that belongs to it, to be offered again after a reboot
    body.safetensors              the newest shared body received
    boot                          the boot counter
    lock                          held by the process that uses the folder

Of all this only the pending update leaves the device.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from talaria.errors import StateError
from talaria.types import Tensors
from talaria_edge import files

logger = logging.getLogger(__name__)

FORMAT = 1


@dataclass(frozen=True)
class Private:
    """The private tensors after ``round``, the last round that they took part in, of the run with this digest."""

    tensors: Tensors
    round: int
    run: str


@dataclass(frozen=True)
class Pending:
    """A round that is trained and not yet received. ``base`` is the sha256 of the body it was trained from."""

    round: int
    base: str
    run: str
    update: bytes


class DeviceState:
    """The state folder of one device, held by one process at a time (a context manager)."""

    def __init__(self, folder: Path, fleet: str, device: str) -> None:
        self.folder = folder
        self._facts: dict[str, Any] = {"format": FORMAT, "fleet": fleet, "device": device}
        self._private = folder / "private.safetensors"
        self._next = folder / "pending-private.safetensors"
        self._update = folder / "pending-update.bin"
        self._boot = folder / "boot"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o700)
            self._lock = (folder / "lock").open("wb")
        except OSError as error:
            raise StateError(f"state: cannot use {folder}: {error.strerror}; give a folder to write to") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise StateError(
                f"state: {folder} is in use by another process; stop that agent, or give this one its own folder"
            ) from None

    def __enter__(self) -> DeviceState:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let another process use the folder."""
        self._lock.close()

    @property
    def private_path(self) -> Path:
        """Where the private tensors lie."""
        return self._private

    def next_boot(self) -> int:
        """Count this start, durably: 1 for the first one."""
        boot = 0
        if self._boot.exists():
            text = files.read(self._boot, "restore it from a backup").decode("ascii", "replace").strip()
            if not text.isdecimal() or len(text) > 15:
                raise StateError(
                    f"state: {self._boot} is damaged (it holds {text[:20]!r}, not a number); write into it a number "
                    "above the boot that the coordinator's `status` shows for this device"
                )
            boot = int(text)
        files.write(self._boot, f"{boot + 1}\n".encode())
        return boot + 1

    def private(self) -> Private | None:
        """The private state, verified, or None on a device that never took part.

        Raises :class:`~talaria.errors.StateError`, with the mend, where it is damaged or another device's.
        """
        tensors, facts = self._read(self._private)
        return None if facts is None else Private(tensors, facts["round"], facts["run"])

    def pending(self) -> Pending | None:
        """The round that is not yet received, or None. A half-written one counts as none and is removed."""
        if not (self._next.exists() and self._update.exists()):
            self._remove(self._update, self._next)
            return None
        try:
            facts, update = _opened(files.read(self._update, ""))
            _, sealed = self._read(self._next)
        except StateError as error:
            logger.warning("the unfinished round is trained again: %s", error)
            self._remove(self._update, self._next)
            return None
        if sealed is None or any(sealed[k] != facts[k] for k in ("round", "base", "run")):
            self._remove(self._update, self._next)
            return None
        return Pending(facts["round"], facts["base"], facts["run"], update)

    def stage(self, pending: Pending, private: Tensors) -> None:
        """Keep a trained round until it is received. The private state in force is not touched."""
        facts = {"round": pending.round, "base": pending.base, "run": pending.run}
        self._remove(self._update)
        files.write(self._next, files.pack(private, self._facts | facts))
        files.write(self._update, _sealed(facts, pending.update))

    def publish(self) -> None:
        """The staged private state becomes the one in force, by one rename; then its update is let go."""
        if self._next.exists():
            try:
                files.rename(self._next, self._private)
            except OSError as error:
                raise StateError(f"state: {self._private} could not be replaced: {error.strerror}") from None
        self._remove(self._update)

    def discard(self) -> None:
        """Let go of the staged round; the private state in force stays."""
        self._remove(self._update, self._next)

    def _read(self, path: Path) -> tuple[Tensors, dict[str, Any] | None]:
        if not path.exists():
            return {}, None
        mend = (
            f"restore {path.name} from a backup, or move it away: this device then begins with a new private state "
            "and loses what it had personalized"
        )
        tensors, facts = files.unpack(files.read(path, mend), path, mend)
        for name, value in self._facts.items():
            if facts.get(name) != value:
                raise StateError(
                    f"state: {path} belongs to {name} {facts.get(name)!r}, not {value!r}; give this device its own "
                    f"state folder, or {mend}"
                )
        if type(facts.get("round")) is not int or type(facts.get("run")) is not str:
            raise StateError(f"state: {path} is damaged (no round); {mend}")
        return tensors, facts

    def _remove(self, *paths: Path) -> None:
        for path in paths:
            path.unlink(missing_ok=True)


def _sealed(facts: Mapping[str, Any], data: bytes) -> bytes:
    text = json.dumps(dict(facts), sort_keys=True).encode()
    return hashlib.sha256(text + b"\n" + data).hexdigest().encode() + b"\n" + text + b"\n" + data


def _opened(data: bytes) -> tuple[dict[str, Any], bytes]:
    digest, _, rest = data.partition(b"\n")
    if hashlib.sha256(rest).hexdigest().encode() != digest:
        raise StateError("state: the pending update is damaged")
    text, _, update = rest.partition(b"\n")
    return json.loads(text), update
