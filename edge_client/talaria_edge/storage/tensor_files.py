"""The files of a device: errors that say what to do, and tensors that carry their own checksum."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from talaria import durable
from talaria.errors import StateError, so_that_it_can_be_written
from talaria.tensors import Tensors

HEADER_LIMIT = 1 << 20
KEY = "talaria"


class DiskError(StateError):
    """The disk refused a write; once there is room, the same may work."""


def write(path: Path, data: bytes) -> None:
    """Replace ``path`` by ``data`` durably, or leave it as it was and raise :class:`DiskError`. The file is for its
    owner alone: what a device keeps is personal."""
    try:
        durable.write(path, data)
    except OSError as error:
        raise DiskError(
            f"state: {len(data)} bytes could not be written to {path}: {error.strerror}; "
            f"{so_that_it_can_be_written(error)}. "
            "The state saved before is intact"
        ) from None


def rename(source: Path, path: Path) -> None:
    """Replace ``path`` by the file ``source`` durably, or raise :class:`DiskError`."""
    try:
        durable.rename(source, path)
    except OSError as error:
        raise DiskError(
            f"state: {path} could not be replaced: {error.strerror}; {so_that_it_can_be_written(error)}"
        ) from None


def remove(path: Path) -> None:
    """Have no file there, or raise :class:`DiskError`."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise DiskError(
            f"state: {path} could not be removed: {error.strerror}; delete it by hand, or mend the rights of its folder"
        ) from None


def make_folder(path: Path) -> None:
    """Have a folder there, or raise :class:`DiskError`."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        mend = f"{so_that_it_can_be_written(error)}, or give another path"
        raise DiskError(f"state: the folder {path} cannot be made: {error.strerror}; {mend}") from None


def read(path: Path, mend: str) -> bytes:
    """The bytes of ``path``; StateError, with ``mend``, where it cannot be read."""
    try:
        return durable.read(path)
    except OSError as error:
        raise StateError(f"state: {path} cannot be read: {error.strerror}; {mend}") from None


def pack(tensors: Tensors, facts: Mapping[str, Any]) -> bytes:
    """A safetensors file of ``tensors`` with ``facts`` (JSON) and a checksum over both in its header."""
    text = json.dumps(dict(facts), sort_keys=True)
    header = json.dumps({"facts": text, "names": list(tensors), "sha256": _checksum(tensors, text)})
    return save({k: np.asarray(v, order="C") for k, v in tensors.items()}, metadata={KEY: header})


def unpack(data: bytes, path: Path, mend: str) -> tuple[Tensors, dict[str, Any]]:
    """What :func:`pack` packed. StateError naming ``path`` and ``mend`` where the bytes are damaged."""
    try:
        length = int.from_bytes(data[:8], "little")
        if len(data) < 8 or length > min(HEADER_LIMIT, len(data) - 8):
            raise ValueError(f"a header of {length} bytes in a file of {len(data)}")
        header = json.loads(json.loads(data[8 : 8 + length])["__metadata__"][KEY])
        tensors = load(data)
        # The file sorts its tensors; the order they were given in comes back, as sums may depend on it.
        tensors = {name: tensors[name] for name in header["names"]}
        if _checksum(tensors, header["facts"]) != header["sha256"]:
            raise ValueError("the checksum does not fit")
        facts = json.loads(header["facts"])
        if not isinstance(facts, dict):
            raise ValueError("its facts are not a table")
    except (ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
        raise StateError(f"state: {path} is damaged ({error}); {mend}") from None
    return tensors, facts


def _checksum(tensors: Tensors, text: str) -> str:
    digest = hashlib.sha256(text.encode())
    for name in tensors:
        value = np.asarray(tensors[name], order="C")
        # Devices in the field have files whose checksum is over torch's names of dtypes: they stay readable.
        digest.update(f"\x1f{name}\x1ftorch.{value.dtype.name}\x1f{value.shape}\x1f".encode())
        digest.update(value.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
