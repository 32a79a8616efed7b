"""Partial sums as bytes: the means as an update has them, and beside them the classes, each size bounded before it is
read.

A safetensors file of four tensors: ``update`` (U8, the means and their union as :mod:`talaria.wire.codec` writes an
update), ``masks`` (U8, a packed mask for each class), ``weights`` (F64) and ``clients`` (I64).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from talaria.aggregate.partial_sum import MaskClass, PartialSum
from talaria.errors import ConfigError, ModelError, TooLarge, WireError
from talaria.model import masks
from talaria.model.masks import ChannelLayout
from talaria.tensors import Tensors
from talaria.wire import codec, strict_safetensors
from talaria.wire.tensor_codecs import TensorSpec

VERSION = 1
_META = "talaria-partial"


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What a gateway may speak for: ``clients`` at most, ``samples`` at most (None: as many as so many clients may
    have), in at most ``classes`` distinct masks."""

    clients: int
    samples: float | None = None
    classes: int = 256
    update: codec.Limits = field(default_factory=codec.Limits)


def is_partial_sum(data: bytes) -> bool:
    """Whether ``data`` seems to be one, by its header."""
    return _META.encode() in data[8 : 8 + min(int.from_bytes(data[:8], "little"), 1 << 16)]


def encode_partial_sum(partial: PartialSum, layout: ChannelLayout | None = None, *, compress: bool = True) -> bytes:
    """``partial`` as bytes; ``layout`` is the model's, None where it has no channels that may go."""
    packed = [b"" if layout is None else masks.pack(one.mask or layout.full()) for one in partial.classes]
    inner = codec.encode_update(partial.whole, compress=compress)
    tensors: Tensors = {
        "update": np.frombuffer(inner, np.uint8),
        "masks": np.frombuffer(b"".join(packed), np.uint8).reshape(len(packed), -1 if packed[0] else 0),
        "weights": np.array([one.weight for one in partial.classes], np.float64),
        "clients": np.array([one.clients for one in partial.classes], np.int64),
    }
    return strict_safetensors.pack(tensors, {_META: json.dumps({"v": VERSION})})


def decode_partial_sum(
    data: bytes,
    *,
    schema: Mapping[str, TensorSpec],
    bounds: Bounds,
    layout: ChannelLayout | None = None,
    client: str | None = None,
) -> PartialSum:
    """The partial sum in ``data``, checked against the dense ``schema`` and ``bounds``; ``client`` is the gateway that
    must have written it.

    Raises :class:`~talaria.errors.TooLarge` before anything large is allocated, :class:`~talaria.errors.WireError` for
    all else.
    """
    width = 0 if layout is None else sum(-(-size // 8) for size in layout.sizes.values())
    entries, meta = strict_safetensors.unpack(data, most=4)
    if strict_safetensors.parse_meta(meta, _META) != {"v": VERSION}:
        raise WireError(f"partial sum is not of version {VERSION}")
    if set(entries) != {"update", "masks", "weights", "clients"}:
        raise WireError("partial sum needs update, masks, weights and clients")
    count = entries["weights"].shape[0] if len(entries["weights"].shape) == 1 else 0
    if not 1 <= count <= bounds.classes:
        raise TooLarge(f"partial sum has {count} classes; 1 to {bounds.classes} are taken")
    for name, dtype, shape in (
        ("masks", np.uint8, (count, width)),
        ("weights", np.float64, (count,)),
        ("clients", np.int64, (count,)),
    ):
        if entries[name].dtype != dtype or entries[name].shape != shape:
            raise WireError(f"partial sum: {name} is {entries[name].dtype} {entries[name].shape}; expected {shape}")
    if entries["update"].dtype != np.uint8 or len(entries["update"].shape) != 1:
        raise WireError("partial sum: update must be bytes")
    weights, clients = entries["weights"].array().tolist(), entries["clients"].array().tolist()
    _require_within(weights, clients, bounds)
    packed = bytes(entries["masks"].raw)
    # Where masks differ, means of different clients stand beside each other: together they are longer than any of them.
    longest = bounds.update.max_norm * math.sqrt(sum(clients))
    own = replace(bounds.update, max_weight=bounds.update.max_weight * bounds.clients, max_norm=longest)
    update = codec.decode_update(bytes(entries["update"].raw), schema=schema, layout=layout, limits=own, client=client)
    if update.weight != sum(weights) or update.metrics:
        raise WireError(f"partial sum says weight={update.weight:g}, but its classes weigh {sum(weights):g}")
    try:
        found = [
            None if layout is None else masks.unpack(layout, packed[width * n : width * (n + 1)]) for n in range(count)
        ]
        classes = tuple(
            MaskClass(None if mask is None or mask.is_full else mask, weight, many)
            for mask, weight, many in zip(found, weights, clients, strict=True)
        )
        return PartialSum(update.tensors, update.mask, classes, update.client, update.base_version, update.kind)
    except (ModelError, ConfigError) as why:
        raise WireError(f"partial sum is refused: {why}") from None


def _require_within(weights: list[float], clients: list[int], bounds: Bounds) -> None:
    """Each class counts at least one client, and they are no more, and weigh no more, than the gateway may say."""
    if any(many < 1 for many in clients) or sum(clients) > bounds.clients:
        raise WireError(f"partial sum counts {clients[:8]} clients; at least 1 each, at most {bounds.clients} together")
    for weight, many in zip(weights, clients, strict=True):
        if not 0 < weight <= bounds.update.max_weight * many:  # NaN is not
            raise WireError(
                f"partial sum: a class of {many} clients weighs {weight:g}; at most "
                f"{bounds.update.max_weight:g} for each of them is taken"
            )
    if bounds.samples is not None and sum(weights) > bounds.samples:
        raise WireError(f"partial sum weighs {sum(weights):g} samples; this gateway may say at most {bounds.samples:g}")
