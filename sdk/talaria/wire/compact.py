"""A global model as a device with a mask downloads it: the kept channels alone, in the planes of the whole file.

It says of which model it is a part, and which part, and carries the sha256 of its own values.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from talaria.errors import WireError
from talaria.foreign import named, shown
from talaria.model.masks import ChannelLayout, ChannelMask, compact_shape
from talaria.tensors import Array, Tensors
from talaria.wire import strict_safetensors
from talaria.wire.codec import TensorSpec, bitmaps_in, bitmaps_of, check_names, mask_in
from talaria.wire.tensor_codecs import check_planes, from_planes

VERSION = 1
MOST = 40_000
"""Tensors that a global model may hold."""
_META = "talaria-compact"
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Compact:
    """What of the model with sha256 ``of`` a device with ``mask`` holds: the gathered tensors."""

    of: bytes
    mask: ChannelMask
    tensors: Tensors = field(repr=False)


def compacted(data: bytes, mask: ChannelMask) -> bytes:
    """The part of the global model ``data`` that ``mask`` keeps, as bytes; equal models and masks give equal bytes.

    Raises :class:`~talaria.errors.ModelError` where the mask is of another model.
    """
    entries, _ = strict_safetensors.unpack(data, most=MOST)
    planes: Tensors = {plane: _kept(plane, entry.array(), mask) for plane, entry in entries.items()}
    planes |= bitmaps_of(mask)
    values = _values(strict_safetensors.pack(planes))
    about = {
        "v": VERSION,
        "of": hashlib.sha256(data).hexdigest(),
        "mask": mask.digest,
        "values": hashlib.sha256(values).hexdigest(),
    }
    return strict_safetensors.pack(planes, {_META: json.dumps(about, separators=(",", ":"), sort_keys=True)})


def model_of(data: bytes) -> bytes:
    """The sha256 of the global model that ``data`` is, wholly or in part; of a part that is damaged, of nothing."""
    try:
        about = _about(data)
    except WireError:
        about = None
    if about is None:
        return hashlib.sha256(data).digest()
    intact = hashlib.sha256(_values(data)).hexdigest() == about["values"]
    return bytes.fromhex(about["of"]) if intact else b""


def opened(
    data: bytes, known: Mapping[str, TensorSpec], layout: ChannelLayout, free: tuple[str, ...] = ()
) -> Compact | None:
    """What :func:`compacted` made of a model whose dense tensors are ``known``; None where ``data`` is a whole model.
    Names that begin with one of ``free`` come as the file declares them.

    Raises :class:`WireError` for anything else, before a value is read.
    """
    about = _about(data)
    if about is None:
        return None
    entries, _ = strict_safetensors.unpack(data, most=MOST)
    groups = bitmaps_in(entries, known)
    mask = mask_in(about["mask"], groups, entries, layout)
    if mask is None:
        raise WireError("the compact model names no mask")
    extra = {n: TensorSpec(e.shape, e.dtype) for n, e in entries.items() if n.startswith(free) and n not in known}
    schema = {n: TensorSpec(compact_shape(n, s.shape, mask), s.dtype) for n, s in known.items()} | extra
    check_names(entries, schema, groups)
    for name, spec in schema.items():
        check_planes(name, spec, entries)
    found = {name: from_planes(name, spec, entries, _LARGEST) for name, spec in schema.items()}
    return Compact(bytes.fromhex(about["of"]), mask, found)


def _kept(plane: str, value: Array, mask: ChannelMask) -> Array:
    name, _, kind = plane.partition("|")
    places = mask.indices.get(name, ())
    for dim, places_kept in enumerate(places[:1] if kind == "s" else places):
        if places_kept is not None:
            value = value.take(places_kept, dim)
    return value


def _values(data: bytes) -> memoryview:
    return memoryview(data)[8 + struct.unpack_from("<Q", data)[0] :]


def _about(data: bytes) -> dict[str, Any] | None:
    """The facts of a compact model, each checked; None of a whole one."""
    _, meta = strict_safetensors.unpack(data, most=MOST)
    if _META not in meta:
        return None
    about = strict_safetensors.parse_meta(meta, _META)
    names = {"v", "of", "mask", "values"}
    if set(about) != names or about["v"] != VERSION:
        raise WireError(f"compact model's facts {named(about)} are not those of version {VERSION}: {sorted(names)}")
    for name in ("of", "mask", "values"):
        text = about[name]
        if not isinstance(text, str) or len(text) != 64 or not set(text) <= set("0123456789abcdef"):
            raise WireError(f"compact model's {name}={shown(text)} must be 64 hex digits")
    return about
