"""Lossy codecs, tensor by tensor. Each tensor becomes one or two *planes*, named after it, that the reader expects.

raw     ``w``                   the values themselves
fp16    ``w|h``                 half precision
bf16    ``w|b``                 the upper half of float32, rounded to nearest even; uint16 in arrays
int8    ``w|q``, ``w|s``        round(x / scale) in -127..127; a scale per first dimension (one for a vector)
topk    ``w|i``, ``w|v``        positions (int32, ascending) and fp16 values of the largest magnitudes; else zero

Statistics of an update, BatchNorm's and those of classes, are raw with every codec (:mod:`talaria.wire.codec`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from talaria.errors import ConfigError, WireError
from talaria.foreign import shown
from talaria.tensors import Array, Tensors, is_float
from talaria.wire.strict_safetensors import Entry

_CODEC = re.compile(r"(raw|fp16|bf16|int8|topk)(?::(0?\.\d{1,6}|1(?:\.0)?))?")
SUFFIXES = ("", "|h", "|b", "|q", "|i")


@dataclass(frozen=True)
class Codec:
    """A codec by name; ``fraction`` of the coordinates is kept by top-k."""

    name: str
    fraction: float = 0.01

    @classmethod
    def parse(cls, text: str) -> Codec:
        """``raw``, ``fp16``, ``bf16``, ``int8``, ``topk`` or ``topk:0.05``."""
        return _parsed(text)


@lru_cache(maxsize=16)
def _parsed(text: str) -> Codec:
    found = _CODEC.fullmatch(text)
    if found is None or (found[2] and (found[1] != "topk" or float(found[2]) == 0)):
        raise ConfigError(f"codec={shown(text)} is unknown; use raw, fp16, bf16, int8, topk or topk:0.05")
    return Codec(found[1], float(found[2] or 0.01))


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of one tensor, as the receiver expects it."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@np.errstate(over="ignore", invalid="ignore")
def to_planes(name: str, value: Array, codec: Codec) -> Tensors:
    """The planes of one tensor. Raises :class:`ConfigError` for values that are not finite or do not fit."""
    if "|" in name:
        raise ConfigError(f"tensor {name!r}: a name may not hold '|'")
    if not is_float(value):
        return {name: value}
    if not bool(np.isfinite(value).all()):
        raise ConfigError(f"tensor {name!r} holds NaN or infinity, and cannot be sent; lower the learning rate")
    if codec.name == "raw" or value.size == 0:
        return {name: value}
    if codec.name in ("fp16", "bf16"):
        return {name + ("|h" if codec.name == "fp16" else "|b"): _half(name, value, codec.name)}
    if codec.name == "int8":
        rows = _single(value).reshape(value.shape[0] if value.ndim > 1 else 1, -1)
        scale = np.abs(rows).max(1) / np.float32(127)
        scale = np.where(scale > np.finfo(np.float32).tiny, scale, np.float32(1))
        levels = rows / scale[:, None]
        np.clip(np.rint(levels, out=levels), -127, 127, out=levels)
        return {name + "|q": levels.astype(np.int8).reshape(value.shape), name + "|s": scale}
    flat = value.reshape(-1)
    at = _largest(np.abs(_single(flat)), max(1, math.ceil(codec.fraction * flat.size)))
    return {name + "|i": at.astype(np.int32), name + "|v": _half(name, flat[at], "fp16")}


def _largest(sizes: Array, k: int) -> Array:
    """Positions (int64, ascending) of the ``k`` largest of ``sizes``; of equal ones, the first."""
    least = np.partition(sizes, sizes.size - k)[sizes.size - k]
    kept = sizes > least
    kept[np.flatnonzero(sizes == least)[: k - int(kept.sum())]] = True
    return np.flatnonzero(kept)


def _single(value: Array) -> Array:
    """As float32; half precision is rounded from there, as it always was: a float64 is rounded twice."""
    return value.astype(np.float32, copy=False)


def _half(name: str, value: Array, kind: str) -> Array:
    single = _single(value)
    half: Array = single.astype(np.float16) if kind == "fp16" else bfloat16_of(single)
    infinite = np.isinf(half) if kind == "fp16" else half & 0x7F80 == 0x7F80
    if bool(np.any(infinite)):
        raise ConfigError(f"tensor {name!r} has values beyond the range of {kind}; use the codec bf16 or raw")
    return half


def bfloat16_of(value: Array) -> Array:
    """float32 values rounded to nearest even, as the upper halves of their bits (uint16); NaN stays NaN."""
    bits = np.ascontiguousarray(value, np.float32).reshape(-1).view(np.uint32)
    half = ((bits + (bits >> 16 & 1) + 0x7FFF) >> 16).astype(np.uint16)
    half[(bits & 0x7FFFFFFF) > 0x7F800000] = 0x7FC0
    return half.reshape(value.shape)


def float32_of(half: Array) -> Array:
    """The float32 values whose upper halves ``half`` (uint16) holds."""
    return (half.reshape(-1).astype(np.uint32) << 16).view(np.float32).reshape(half.shape)


def plane_names(name: str, entries: Mapping[str, Entry]) -> tuple[str, ...]:
    """The planes of ``name`` among ``entries``. Raises :class:`WireError` for none or for two codecs at once."""
    found = [name + s for s in SUFFIXES if name + s in entries]
    if len(found) != 1:
        raise WireError(f"tensor {name!r} is missing" if not found else f"tensor {name!r} comes in two codecs")
    (first,) = found
    suffix = first[len(name) :]  # a name may itself end as a plane's does
    if suffix == "|q":
        return first, name + "|s"
    if suffix == "|i":
        return first, name + "|v"
    return (first,)


def check_planes(name: str, spec: TensorSpec, entries: Mapping[str, Entry]) -> tuple[str, ...]:
    """The planes of ``name``, their dtypes and shapes compared with ``spec`` before a value is read."""
    names = plane_names(name, entries)
    suffix = names[0][len(name) :]
    wanted: list[tuple[np.dtype[Any], tuple[int, ...]]]
    if suffix == "":
        wanted = [(spec.dtype, spec.shape)]
    elif spec.dtype.kind != "f":
        raise WireError(f"tensor {name!r} of {spec.dtype} may come raw only")
    elif suffix in ("|h", "|b"):
        wanted = [(np.dtype(np.float16 if suffix == "|h" else np.uint16), spec.shape)]
    elif suffix == "|q":
        channels = spec.shape[0] if len(spec.shape) > 1 else 1
        wanted = [(np.dtype(np.int8), spec.shape), (np.dtype(np.float32), (channels,))]
    else:
        k = entries[names[0]].shape[0] if len(entries[names[0]].shape) == 1 else 0
        if not 1 <= k <= spec.numel:
            raise WireError(f"tensor {name!r}: {k} positions do not fit {spec.numel} values")
        wanted = [(np.dtype(np.int32), (k,)), (np.dtype(np.float16), (k,))]
    for plane, (dtype, shape) in zip(names, wanted, strict=True):
        entry = entries.get(plane)
        if entry is None:
            raise WireError(f"tensor {name!r}: its plane {plane!r} is missing")
        if entry.dtype != dtype or entry.shape != shape:
            raise WireError(
                f"tensor {plane!r} is {entry.dtype} {entry.shape}; expected {dtype} {shape}, the schema's at this mask"
            )
    return names


def from_planes(name: str, spec: TensorSpec, entries: Mapping[str, Entry], largest: float) -> Array:
    """The tensor that its (checked) planes describe; every magnitude at most ``largest``.

    Raises :class:`WireError` for values that are not finite, and as :func:`spread`.
    """
    value = spread(name, spec, entries, largest)
    require_bounded(name, value, largest)
    return value


@np.errstate(over="ignore", invalid="ignore")
def spread(name: str, spec: TensorSpec, entries: Mapping[str, Entry], largest: float) -> Array:
    """As :func:`from_planes`, its values not looked at yet.

    Raises :class:`WireError` for scales that are not finite, above zero and at most ``largest``, positions out of range
    or repeated, and the level -128, which no encoder here writes.
    """
    names = plane_names(name, entries)
    first = entries[names[0]].array()
    if names[0].endswith("|q") and len(names) == 2:
        scale = entries[names[1]].array()
        if not bool(((scale > 0) & (scale.astype(np.float64) <= largest)).all()):
            raise WireError(
                f"tensor {name!r}: a scale is not a number above 0 and at most {largest:g}; where values run away, "
                "lower the learning rate"
            )
        if bool((first == -128).any()):
            raise WireError(f"tensor {name!r}: the level -128 is never written; damaged")
        if len(spec.shape) > 1:
            scale = scale.reshape(-1, *[1] * (len(spec.shape) - 1))
        value = np.asarray(first.astype(np.float32) * scale).reshape(spec.shape)
    elif names[0].endswith("|i") and len(names) == 2:
        kept = entries[names[1]].array()
        ascending = bool((first[1:] > first[:-1]).all())
        if not ascending or int(first[0]) < 0 or int(first[-1]) >= spec.numel:
            raise WireError(f"tensor {name!r}: positions must ascend within 0..{spec.numel - 1}, without repeats")
        if not bool(np.isfinite(kept).all()):
            raise WireError(f"tensor {name!r} holds NaN or infinity")
        value = np.zeros(spec.numel, spec.dtype)
        value[first] = kept
        value = value.reshape(spec.shape)
    else:
        value = float32_of(first) if names[0] == name + "|b" else first
    return value.astype(spec.dtype, copy=False)


def require_bounded(name: str, value: Array, largest: float) -> None:
    """Raise :class:`WireError` for a value that is not finite, or of a magnitude above ``largest``."""
    if value.dtype.kind == "f" and value.size:
        top = max(abs(float(value.max())), abs(float(value.min())))
        if not top <= largest:
            what = "NaN or infinity" if math.isnan(top) or math.isinf(top) else f"a value of magnitude {top:g}"
            raise WireError(f"tensor {name!r} holds {what}; at most {largest:g} is taken: lower the learning rate")
