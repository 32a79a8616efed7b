"""Lossy codecs, tensor by tensor. Each tensor becomes one or two *planes*, named after it, that the reader expects.

raw     ``w``                   the values themselves
fp16    ``w|h``                 half precision
bf16    ``w|b``                 the upper half of float32
int8    ``w|q``, ``w|s``        round(x / scale) in -127..127; a scale per first dimension (one for a vector)
topk    ``w|i``, ``w|v``        positions (int32, ascending) and fp16 values of the largest magnitudes; else zero
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from talaria.errors import ConfigError, WireError
from talaria.tensors import Tensors
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
        found = _CODEC.fullmatch(text)
        if found is None or (found[2] and (found[1] != "topk" or float(found[2]) == 0)):
            raise ConfigError(f"codec={text!r} is unknown; use raw, fp16, bf16, int8, topk or topk:0.05")
        return cls(found[1], float(found[2] or 0.01))


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of one tensor, as the receiver expects it."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def to_planes(name: str, value: Tensor, codec: Codec) -> Tensors:
    """The planes of one tensor. Raises :class:`ConfigError` for values that are not finite or do not fit."""
    if "|" in name:
        raise ConfigError(f"tensor {name!r}: a name may not hold '|'")
    value = value.detach()
    if not value.is_floating_point():
        return {name: value}
    if not bool(torch.isfinite(value).all()):
        raise ConfigError(f"tensor {name!r} holds NaN or infinity; it cannot be sent")
    if codec.name == "raw" or value.numel() == 0:
        return {name: value}
    if codec.name in ("fp16", "bf16"):
        return {name + ("|h" if codec.name == "fp16" else "|b"): _half(name, value, codec.name)}
    if codec.name == "int8":
        rows = value.float().reshape(value.shape[0] if value.dim() > 1 else 1, -1)
        scale = rows.abs().amax(1) / 127
        scale = torch.where(scale > torch.finfo(torch.float32).tiny, scale, torch.ones_like(scale))
        q = torch.round(rows / scale[:, None]).clamp(-127, 127).to(torch.int8)
        return {name + "|q": q.reshape(value.shape), name + "|s": scale}
    flat = value.flatten()
    k = max(1, math.ceil(codec.fraction * flat.numel()))
    at = torch.argsort(flat.abs().float(), descending=True, stable=True)[:k].sort().values
    return {name + "|i": at.to(torch.int32), name + "|v": _half(name, flat[at], "fp16")}


def _half(name: str, value: Tensor, kind: str) -> Tensor:
    half = value.to(torch.float16 if kind == "fp16" else torch.bfloat16)
    if not bool(torch.isfinite(half).all()):
        raise ConfigError(f"tensor {name!r} has values beyond the range of {kind}; use the codec bf16 or raw")
    return half


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
    floating = spec.dtype.is_floating_point
    wanted: list[tuple[torch.dtype, tuple[int, ...]]]
    if suffix == "":
        wanted = [(spec.dtype, spec.shape)]
    elif not floating:
        raise WireError(f"tensor {name!r} of {spec.dtype} may come raw only")
    elif suffix in ("|h", "|b"):
        wanted = [(torch.float16 if suffix == "|h" else torch.bfloat16, spec.shape)]
    elif suffix == "|q":
        channels = spec.shape[0] if len(spec.shape) > 1 else 1
        wanted = [(torch.int8, spec.shape), (torch.float32, (channels,))]
    else:
        k = entries[names[0]].shape[0] if len(entries[names[0]].shape) == 1 else 0
        if not 1 <= k <= spec.numel:
            raise WireError(f"tensor {name!r}: {k} positions do not fit {spec.numel} values")
        wanted = [(torch.int32, (k,)), (torch.float16, (k,))]
    for plane, (dtype, shape) in zip(names, wanted, strict=True):
        entry = entries.get(plane)
        if entry is None:
            raise WireError(f"tensor {name!r}: its plane {plane!r} is missing")
        if entry.dtype != dtype or entry.shape != shape:
            raise WireError(
                f"tensor {plane!r} is {entry.dtype} {entry.shape}; expected {dtype} {shape}, the schema's at this mask"
            )
    return names


def from_planes(name: str, spec: TensorSpec, entries: Mapping[str, Entry], largest: float) -> Tensor:
    """The tensor that its (checked) planes describe; every magnitude at most ``largest``.

    Raises :class:`WireError` for values that are not finite, scales that are not finite and above zero,
    positions out of range or repeated, and the level -128, which no encoder here writes.
    """
    names = plane_names(name, entries)
    first = entries[names[0]].tensor()
    if names[0].endswith("|q") and len(names) == 2:
        scale = entries[names[1]].tensor()
        if not bool(((scale > 0) & (scale <= largest)).all()):
            raise WireError(f"tensor {name!r}: a scale is not a number above 0 and at most {largest:g}")
        if bool((first == -128).any()):
            raise WireError(f"tensor {name!r}: the level -128 is never written; damaged")
        rows = first.reshape(len(scale), -1).float() * scale[:, None]
        value = rows.reshape(spec.shape).to(spec.dtype)
    elif names[0].endswith("|i") and len(names) == 2:
        kept = entries[names[1]].tensor()
        ascending = bool((first[1:] > first[:-1]).all())
        if not ascending or int(first[0]) < 0 or int(first[-1]) >= spec.numel:
            raise WireError(f"tensor {name!r}: positions must ascend within 0..{spec.numel - 1}, without repeats")
        if not bool(torch.isfinite(kept).all()):
            raise WireError(f"tensor {name!r} holds NaN or infinity")
        value = torch.zeros(spec.numel, dtype=spec.dtype)
        value[first.long()] = kept.to(spec.dtype)
        value = value.reshape(spec.shape)
    else:
        value = first.to(spec.dtype)
    if spec.dtype.is_floating_point and value.numel():
        top = float(value.abs().max())
        if not top <= largest:
            what = "NaN or infinity" if math.isnan(top) or math.isinf(top) else f"a value of magnitude {top:g}"
            raise WireError(f"tensor {name!r} holds {what}; at most {largest:g} is taken")
    return value
