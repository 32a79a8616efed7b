"""What this device can do: measured, never guessed from a name, and cached with the machine's fingerprint."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from talaria import durable, valid
from talaria.errors import ConfigError, StateError
from talaria.foreign import shown
from talaria.planning import machine, microbenchmarks, onnx_runtime

VERSION = 1
_LEAST = 1e-300


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One device. Rates are for one core, in CPU time.

    ``block`` is the number of channels that convolutions are fast in multiples of; ``train_rate`` counts multiply-adds
    of the forward pass per second of a training step.
    """

    machine: str
    """Fingerprint: equal machines with equal software have equal ones."""
    cpu: str
    cores: int
    memory_mb: float
    simd: tuple[str, ...] = ()
    block: int = 8
    train_rate: float
    matrix_rate: float
    """Multiply-adds per second of a matrix product in torch."""
    bandwidth_mbs: float
    """Copying memory, MB/s read plus written."""
    disk_mbs: float
    """Writing to the state's disk with fsync, MB/s."""
    layers_ms: Mapping[str, float] = field(default_factory=dict)
    """ONNX Runtime's latency of one layer of each kind; empty where it is not installed."""
    watts: float | None = None
    """What training draws, where the user has measured it; needed for ``energy_j`` alone."""
    seconds: float = 0.0
    """How long measuring took."""

    def __post_init__(self) -> None:
        again = "; measure the device again"
        for name in ("cores", "block"):
            valid.whole("profile", name, getattr(self, name), 1)
        for name in ("memory_mb", "train_rate", "matrix_rate", "bandwidth_mbs", "disk_mbs"):
            valid.number("profile", name, getattr(self, name), f"a finite number above 0{again}", low=_LEAST)
        if not all(isinstance(text, str) for text in (self.machine, self.cpu, *self.simd)):
            raise ConfigError(f"profile: machine, cpu and simd must be texts{again}")
        if not isinstance(self.layers_ms, Mapping):
            raise ConfigError(f"profile: layers_ms={shown(self.layers_ms)} must be a table{again}")
        for name, took in {**self.layers_ms, "seconds": self.seconds}.items():
            valid.number("profile", shown(name), took, f"a number from 0{again}", low=0)
        if self.watts is not None:
            valid.number("profile", "watts", self.watts, "a finite number above 0", low=_LEAST)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; :meth:`from_json` is the inverse."""
        return {**vars(self), "simd": list(self.simd), "layers_ms": dict(self.layers_ms)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Profile:
        """The profile that :meth:`to_json` wrote. Raises :class:`~talaria.errors.ConfigError` for anything else."""
        odd = sorted(set(data) ^ {f.name for f in fields(cls)})
        if odd:
            raise ConfigError(f"profile: fields {odd} are missing or unknown; measure the device again")
        try:
            return cls(**{**data, "simd": tuple(data["simd"])})
        except TypeError as error:
            raise ConfigError(f"profile: a field has the wrong kind ({error}); measure the device again") from None


def fingerprint() -> str:
    """Names the machine and what its speed depends on."""
    text = json.dumps(
        [
            microbenchmarks.cpu_name(),
            os.cpu_count(),
            platform.machine(),
            microbenchmarks.simd(),
            onnx_runtime.versions(),
        ]
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def measure(folder: Path | None = None) -> Profile:
    """Measure this device, in well under a minute of CPU time; ``folder`` is where the disk is tried."""
    begin = time.monotonic()
    found = Profile(
        machine=fingerprint(),
        cpu=microbenchmarks.cpu_name(),
        cores=machine.cores(),
        memory_mb=microbenchmarks.memory_mb(),
        simd=microbenchmarks.simd(),
        block=microbenchmarks.block(),
        train_rate=microbenchmarks.train_rate(),
        matrix_rate=microbenchmarks.matrix_rate(),
        bandwidth_mbs=microbenchmarks.bandwidth_mbs(),
        disk_mbs=microbenchmarks.disk_mbs(folder or cache_folder()),
        layers_ms=microbenchmarks.layers_ms(),
    )
    return replace(found, seconds=round(time.monotonic() - begin, 2))


def cache_folder() -> Path:
    """Where measurements are kept: ``$XDG_CACHE_HOME/talaria``, or ``~/.cache/talaria``."""
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(root) if root else Path.home() / ".cache") / "talaria"
    except RuntimeError:  # a user id alone, as in a container
        raise StateError(
            f"HOME is not set, and user {os.getuid()} has no account that names a home; set XDG_CACHE_HOME to a folder "
            "of yours, where measurements are kept"
        ) from None


def cached(*, fresh: bool = False, folder: Path | None = None) -> Profile:
    """This device's profile: the stored one, or measured now and stored."""
    path = (folder or cache_folder()) / f"profile-{VERSION}-{fingerprint()}.json"
    if not fresh:
        stored = read(path)
        if stored is not None:
            try:
                return Profile.from_json(stored)
            except ConfigError:  # from another version of talaria: measured anew
                pass
    found = measure(path.parent)
    write(path, found.to_json())
    return found


def read(path: Path) -> dict[str, Any] | None:
    """A stored measurement, or None where there is none that can be read: it is only a cache."""
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(1 << 20))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def write(path: Path, data: Mapping[str, Any]) -> None:
    """Store a measurement, whole or not at all. Raises :class:`~talaria.errors.StateError` where it cannot."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        durable.write(path, json.dumps(data, indent=1, sort_keys=True).encode(), mode=0o666, alone=False)
    except OSError as error:
        raise StateError(f"cannot write {path}: {error.strerror}; set XDG_CACHE_HOME to a folder of yours") from None
