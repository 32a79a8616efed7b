"""Updates and states as bytes. Names, shapes and dtypes are compared with what is expected before a value is read.

An update is a safetensors file of planes (see :mod:`talaria.wire.tensor_codecs`) and bitmaps of its mask, perhaps in
a zstd frame. Equal updates give equal bytes.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from talaria.aggregate.validation import is_reserved, is_statistic
from talaria.bitmaps import bits_of, indices_of
from talaria.errors import ConfigError, ModelError, TooLarge, WireError
from talaria.foreign import named, shown
from talaria.model.masks import ChannelLayout, ChannelMask, compact_shape
from talaria.tensors import Array, Tensors, is_float
from talaria.types import LONGEST_NAME, Update
from talaria.wire import strict_safetensors
from talaria.wire.compression import squeeze, unsqueeze
from talaria.wire.strict_safetensors import Entry
from talaria.wire.tensor_codecs import (
    SUFFIXES,
    Codec,
    TensorSpec,
    check_planes,
    from_planes,
    require_bounded,
    spread,
    to_planes,
)

__all__ = [
    "Limits",
    "TensorSpec",
    "decode_tensors",
    "decode_update",
    "encode_tensors",
    "encode_update",
    "schema_of",
]

VERSION = 2
MASK = "mask|"
"""Before a group's name: the bitmap of its kept channels."""
_PLANES_OF_ITS_NAME = frozenset(f"mask{suffix}" for suffix in (*SUFFIXES[1:], "|s", "|v"))
"""Planes of a tensor that is called ``mask``, which look like bitmaps of layers of one letter."""
_META = "talaria"
_RAW = Codec("raw")
"""How statistics travel, whatever the codec: what it leaves out of them is not fed back."""
_WORDS = {"raw": 4, "fp16": 2, "bf16": 2}
"""Bytes of a number in an update of a codec; of the others no byte of a word repeats sooner than the next."""
_text = json.JSONEncoder(separators=(",", ":"), sort_keys=True, allow_nan=False).encode
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LARGEST = sys.float_info.max
_BLOCK = 1 << 14
_LONG = 1 << 17
"""So many squares are added up in float32 with an error below a hundredth."""
_SURELY = 0.9
"""Of the square of the largest norm: below it, a sum in float32 decides."""
_FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a decoder takes. ``total`` in bytes after decompression."""

    total: int = 512 * 2**20
    tensors: int = 20_000
    max_norm: float = 1e6
    """Largest Euclidean norm of all floating-point values of an update together."""
    max_weight: float = 1e8
    """Largest weight, in samples."""
    metrics: int = 64


def schema_of(tensors: Tensors) -> dict[str, TensorSpec]:
    """Shape and dtype of each tensor."""
    return {name: TensorSpec(tuple(value.shape), value.dtype) for name, value in tensors.items()}


# ---- global models and states ---------------------------------------------------------------------------------


def encode_tensors(tensors: Tensors, *, codec: str = "raw", compress: bool = False) -> bytes:
    """``tensors`` as bytes; with ``codec="raw"`` and no compression a plain safetensors file, NaN included.

    Raises :class:`ConfigError` for an unknown codec, a name or a dtype that cannot be stored.
    """
    how = Codec.parse(codec)
    if how.name == "topk":
        raise ConfigError("codec='topk' keeps a few changes of an update; a whole state needs raw, fp16, bf16 or int8")
    planes = tensors if how.name == "raw" else _planes(tensors, how)
    data = strict_safetensors.pack(planes)
    return squeeze(data) if compress else data


def decode_tensors(data: bytes, *, schema: Mapping[str, TensorSpec] | None, limits: Limits | None = None) -> Tensors:
    """What :func:`encode_tensors` was given, in the order of ``schema``.

    ``schema=None`` is for a device's own flash only: whatever is well-formed is taken as it is. With a schema
    the names must agree exactly, and every value must be finite. Raises :class:`WireError`.
    """
    limits = limits or Limits()
    if schema is None:
        entries, _ = strict_safetensors.unpack(unsqueeze(data, limits.total), most=limits.tensors)
        return {name: entry.array() for name, entry in entries.items()}
    entries, _ = _open(data, schema, limits, extra=0)
    check_names(entries, schema, masks=())
    for name, spec in schema.items():
        check_planes(name, spec, entries)
    return {name: from_planes(name, spec, entries, _FLOAT32_MAX) for name, spec in schema.items()}


# ---- updates -------------------------------------------------------------------------------------------


def encode_update(update: Update, codec: str = "raw", *, compress: bool = True) -> bytes:
    """``update`` as bytes.

    Raises :class:`ConfigError` where a value is not finite or the codec does not suit it.
    """
    how = Codec.parse(codec)
    if how.name == "topk" and update.kind != "delta":
        raise ConfigError("codec='topk' leaves out what changed little; it needs kind='delta', this update has 'value'")
    try:
        finite = all(math.isfinite(v) for v in update.metrics.values())
    except TypeError:
        finite = False
    if not finite:
        raise ConfigError(f"metrics {dict(update.metrics)} of {update.client!r} must be finite numbers")
    try:
        planes = _planes(update.tensors, how)
    except ConfigError as error:
        raise ConfigError(f"update of {update.client!r}: {error}") from None
    if update.mask is not None:
        bitmaps = bitmaps_of(update.mask)
        if alike := _PLANES_OF_ITS_NAME.intersection(bitmaps) if "mask" in update.tensors else ():
            raise ConfigError(
                f"update of {update.client!r}: tensor 'mask' and the mask of layer {min(alike)[-1]!r} would travel as "
                f"{min(alike)!r}; give the layer or the tensor another name"
            )
        planes |= bitmaps
    meta = {_META: _text(_facts(update))}
    data = strict_safetensors.pack(planes, meta)
    return squeeze(data, _WORDS.get(how.name, 1)) if compress else data


def _facts(update: Update) -> dict[str, Any]:
    """What an update says of itself, as plain values."""
    return {
        "v": VERSION,
        "client": update.client,
        "weight": float(update.weight),
        "base_version": update.base_version,
        "kind": update.kind,
        "metrics": {k: float(v) for k, v in sorted(update.metrics.items())},
        "mask": None if update.mask is None else update.mask.digest,
    }


def decode_update(
    data: bytes,
    *,
    schema: Mapping[str, TensorSpec],
    layout: ChannelLayout | None = None,
    limits: Limits | None = None,
    client: str | None = None,
) -> Update:
    """The update in ``data``, checked against the *dense* ``schema`` of the shared state.

    ``client`` is who must have written it. Raises :class:`TooLarge` before anything large is allocated,
    :class:`WireError` for all else.
    """
    limits = limits or Limits()
    entries, meta = _open(data, schema, limits, extra=0 if layout is None else len(layout.sizes))
    about = _about(strict_safetensors.parse_meta(meta, _META), limits)
    if client is not None and about["client"] != client:
        raise WireError(f"update says client={about['client']!r} but came from {client!r}")
    return _update(entries, about, schema, layout, limits)


def as_decoded(
    update: Update,
    *,
    schema: Mapping[str, TensorSpec],
    layout: ChannelLayout | None = None,
    limits: Limits | None = None,
) -> Update:
    """What :func:`decode_update` makes of what :func:`encode_update` made of ``update`` with the codec raw: the same
    values after the same checks, without the bytes between them. For who plays both sides in one process."""
    limits = limits or Limits()
    if update.mask is None and _dense(update.tensors, schema):  # the usual case, and a good part of a small round
        copies = {name: np.array(update.tensors[name], order="C") for name in schema}
        return _accepted(copies, _about(_facts(update), limits), None, limits)
    planes = update.tensors if update.mask is None else {**update.tensors, **bitmaps_of(update.mask)}
    return _update(strict_safetensors.entries_of(planes), _about(_facts(update), limits), schema, layout, limits)


def _update(
    entries: Mapping[str, Entry],
    about: Mapping[str, Any],
    schema: Mapping[str, TensorSpec],
    layout: ChannelLayout | None,
    limits: Limits,
) -> Update:
    """The update of these planes and (checked) facts. Raises :class:`WireError` where they do not fit ``schema``."""
    groups = bitmaps_in(entries, schema)
    mask = mask_in(about["mask"], groups, entries, layout)
    compact = {n: TensorSpec(compact_shape(n, s.shape, mask), s.dtype) for n, s in schema.items()}
    check_names(entries, schema, groups)
    for name, spec in compact.items():
        check_planes(name, spec, entries)
    tensors: Tensors = {name: spread(name, spec, entries, limits.max_norm) for name, spec in compact.items()}
    return _accepted(tensors, about, mask, limits)


def _dense(tensors: Tensors, schema: Mapping[str, TensorSpec]) -> bool:
    """Whether these are the tensors of ``schema``, whole."""
    return tensors.keys() == schema.keys() and all(
        value.shape == schema[name].shape and value.dtype == schema[name].dtype for name, value in tensors.items()
    )


def _accepted(tensors: Tensors, about: Mapping[str, Any], mask: ChannelMask | None, limits: Limits) -> Update:
    """The update of tensors that fit. Raises :class:`WireError` where their values are beyond ``limits``."""
    _require_norm(tensors, limits.max_norm)
    return Update(
        tensors=tensors,
        weight=about["weight"],
        client=about["client"],
        base_version=about["base_version"],
        kind=about["kind"],
        mask=mask,
        metrics=about["metrics"],
    )


def _require_norm(tensors: Tensors, most: float) -> None:
    """Raise :class:`WireError` unless all values are finite and their norm is at most ``most``."""
    floats = {name: value for name, value in tensors.items() if is_float(value)}
    if _about_square(floats.values()) <= _SURELY * most**2:  # which nothing in it that is not finite lets be
        return
    for name, value in floats.items():
        require_bounded(name, value, most)
    square = sum(map(_square, floats.values()))
    if not square <= most**2:
        raise WireError(
            f"update has a norm of {math.sqrt(square):g}; at most {most:g} is taken: lower the learning rate"
        )


@np.errstate(over="ignore", invalid="ignore")
def _about_square(values: Iterable[Array]) -> float:
    """The sum of squares to within a hundredth, of float32; not finite where a value is not, and for other dtypes."""
    total = 0.0
    for value in values:
        if value.dtype.char != "f":
            return math.inf
        flat = value.reshape(-1)
        for part in (flat,) if flat.size <= _LONG else np.split(flat, range(_LONG, flat.size, _LONG)):
            total += float(part.dot(part))
    return total


def _square(value: Array) -> float:
    """The sum of squares in float64, block by block: a float64 copy of a whole tensor would leave the cache."""
    flat, total = value.reshape(-1), 0.0
    scratch = np.empty(min(flat.size, _BLOCK))
    for start in range(0, flat.size, _BLOCK):
        part = flat[start : start + _BLOCK]
        wide = scratch[: part.size]
        wide[...] = part
        total += float(wide @ wide)
    return total


def _about(about: dict[str, Any], limits: Limits) -> dict[str, Any]:
    """The update's facts, each checked."""
    names = {"v", "client", "weight", "base_version", "kind", "metrics", "mask"}
    if set(about) != names or about["v"] != VERSION:
        raise WireError(f"update facts {named(about)} are not those of version {VERSION}: {sorted(names)}")
    weight, base_version, metrics, mask = about["weight"], about["base_version"], about["metrics"], about["mask"]
    if type(weight) not in (int, float) or not 0 < weight <= limits.max_weight:
        raise WireError(f"weight={shown(weight)} must be above 0 and at most {limits.max_weight:g}")
    if type(base_version) is not int or not 0 <= base_version <= 2**53:
        raise WireError(f"base_version={shown(base_version)} must be a version of the global model")
    if about["kind"] not in ("value", "delta"):
        raise WireError(f"kind={shown(about['kind'])} must be 'value' or 'delta'")
    if not isinstance(about["client"], str) or not 0 < len(about["client"]) <= LONGEST_NAME:
        raise WireError(f"client must be a name of at most {LONGEST_NAME} characters")
    if not isinstance(metrics, dict) or len(metrics) > limits.metrics:
        raise WireError(f"metrics must be at most {limits.metrics} named numbers")
    if not all(len(k) <= 64 and k.isprintable() for k in metrics):
        raise WireError("metrics must have printable names of at most 64 characters")
    # Not isfinite: a whole number of JSON may be beyond any float.
    if not all(type(v) in (int, float) and -_LARGEST <= v <= _LARGEST for v in metrics.values()):
        raise WireError("metrics must be finite numbers")
    if mask is not None and (not isinstance(mask, str) or not _DIGEST.fullmatch(mask)):
        raise WireError("mask must be null or a digest of 64 hex digits")
    return {**about, "weight": float(weight), "metrics": {k: float(v) for k, v in metrics.items()}}


# ---- masks ---------------------------------------------------------------------------------------------


def bitmaps_of(mask: ChannelMask) -> Tensors:
    """``mask|<group>``: uint8 (ceil(channels / 8),), the kept channels as a bitmap."""
    sizes = mask.layout.sizes
    return {MASK + g: np.frombuffer(bits_of(kept, sizes[g]), np.uint8) for g, kept in mask.kept.items()}


def bitmaps_in(entries: Mapping[str, Entry], schema: Mapping[str, TensorSpec]) -> tuple[str, ...]:
    """The names of the bitmaps among ``entries``. Planes of a tensor that is itself called ``mask`` are none."""
    own = _PLANES_OF_ITS_NAME if "mask" in schema else frozenset()
    return tuple(name for name in entries if name.startswith(MASK) and name not in own)


def mask_in(
    digest: str | None,
    groups: tuple[str, ...],
    entries: Mapping[str, Entry],
    layout: ChannelLayout | None,
) -> ChannelMask | None:
    """The mask with this ``digest`` in the bitmaps ``groups`` of ``entries``; None where there is no digest. Raises
    :class:`WireError` where the bitmaps are not those of ``layout`` and ``digest``."""
    if digest is None:
        if groups:
            raise WireError("update has bitmaps but no mask; damaged")
        return None
    if layout is None:
        raise WireError("update comes with a mask, but this model has no channel layout; send it dense")
    if set(groups) != {MASK + g for g in layout.sizes}:
        raise WireError(f"mask has {len(groups)} groups; this model has {len(layout.sizes)}, by other names")
    raw = {}
    for group, size in layout.sizes.items():
        entry = entries[MASK + group]
        if entry.dtype != np.uint8 or entry.shape != (-(-size // 8),):
            raise WireError(f"mask of {group!r} must be {-(-size // 8)} bytes for {size} channels")
        raw[group] = bytes(entry.raw)
    try:
        mask = ChannelMask(layout, {g: tuple(sorted(indices_of(raw[g], size))) for g, size in layout.sizes.items()})
    except (ModelError, WireError) as why:
        raise WireError(f"mask is refused: {why}") from None
    if mask.digest != digest:
        raise WireError("the mask's bitmaps do not match its digest; damaged")
    return mask


# ---- opening -------------------------------------------------------------------------------------------


def _planes(tensors: Tensors, codec: Codec) -> Tensors:
    if codec.name == "raw" and math.isfinite(_about_square(tensors.values())) and not any("|" in n for n in tensors):
        return dict(tensors)  # as one by one, which would say what is wrong with which
    planes: Tensors = {}
    for name, value in tensors.items():
        planes |= to_planes(name, value, _RAW if is_reserved(name) or is_statistic(name) else codec)
    return planes


def _open(
    data: bytes, schema: Mapping[str, TensorSpec], limits: Limits, extra: int
) -> tuple[dict[str, Entry], dict[str, str]]:
    """The entries of ``data``, bounded by what ``schema`` can need at most (top-k needs 6 bytes a value)."""
    values = sum(max(s.dtype.itemsize, 6) * s.numel + 4 * (s.shape[0] if s.shape else 1) for s in schema.values())
    cap = min(limits.total, values + 8192 * extra + strict_safetensors.MAX_HEADER + 8)
    if len(data) > cap:
        raise TooLarge(f"{len(data)} bytes are above {cap}, the most that this schema can need")
    return strict_safetensors.unpack(unsqueeze(data, cap), most=2 * len(schema) + extra)


def check_names(entries: Mapping[str, Entry], schema: Mapping[str, TensorSpec], masks: Iterable[str]) -> None:
    """Raise :class:`WireError` for a name of ``entries`` that is neither a plane of ``schema`` nor one of ``masks``."""
    ours = {name + suffix for name in schema for suffix in (*SUFFIXES, "|s", "|v")} | set(masks)
    for name in entries:
        if name not in ours:
            raise WireError(f"tensor {name[:80]!r} is not in the schema; only the shared state's names may travel")
    for name in schema:
        if name + "|s" in entries and name + "|q" not in entries:
            raise WireError(f"tensor {name!r} has scales without levels")
        if name + "|v" in entries and name + "|i" not in entries:
            raise WireError(f"tensor {name!r} has values without positions")
