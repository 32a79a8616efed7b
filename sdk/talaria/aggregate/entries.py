"""An update as plain tensors and back, so that a buffer of them is part of an aggregator's state."""

import hashlib
import json

import torch
from torch import Tensor

from talaria import tree
from talaria.errors import StateError
from talaria.model import masks
from talaria.types import ChannelLayout, ChannelMask, Tensors, Update

VALUES, MASK, WHO, LAYOUT = "values/", "kept/", "who", "layout"


def pack(update: Update) -> Tensors:
    """``values/<name>``, ``kept/mask/<group>`` where masked, and ``who``: JSON bytes of client, base, weight, kind.

    Metrics are not kept.
    """
    out = tree.prefixed(tree.copied(update.tensors), VALUES)
    if update.mask is not None:
        out |= tree.prefixed(masks.as_tensors(update.mask), MASK)
    who = {"client": update.client, "base": update.base, "weight": update.weight, "kind": update.kind}
    return out | {WHO: text(json.dumps(who, sort_keys=True))}


def unpack(entry: Tensors, layout: ChannelLayout | None) -> Update:
    """The update that :func:`pack` wrote. Raises :class:`~talaria.errors.StateError` on anything else."""
    try:
        who = json.loads(read(entry[WHO]))
        kept = tree.under(entry, MASK)
        mask: ChannelMask | None = None
        if kept:
            if layout is None:
                raise StateError("buffered update: it has a mask, but the state has no layout; the state is damaged")
            mask = masks.from_tensors(layout, kept)
        return Update(
            tree.under(entry, VALUES),
            weight=who["weight"],
            client=who["client"],
            base=who["base"],
            kind=who["kind"],
            mask=mask,
        )
    except (KeyError, ValueError, TypeError) as error:
        raise StateError(f"buffered update: the state is damaged ({error!r}); restore the last good one") from error


def digest(update: Update) -> bytes:
    """32 bytes that differ for different updates: a redelivered message has the same."""
    sha = hashlib.sha256(f"{update.client}\x1f{update.base}\x1f{update.weight!r}\x1f{update.kind}".encode())
    sha.update((update.mask.digest if update.mask is not None else "").encode())
    for name in sorted(update.tensors):
        value = update.tensors[name].detach().contiguous()
        sha.update(f"\x1f{name}\x1f{value.dtype}\x1f{tuple(value.shape)}\x1f".encode())
        sha.update(value.view(-1).view(torch.uint8).numpy().tobytes())
    return sha.digest()


def pack_layout(layout: ChannelLayout) -> Tensor:
    """The layout as JSON bytes, uint8."""
    return text(json.dumps({"sizes": dict(layout.sizes), "axes": dict(layout.axes)}, sort_keys=True))


def unpack_layout(data: Tensor) -> ChannelLayout:
    """The layout that :func:`pack_layout` wrote."""
    try:
        found = json.loads(read(data))
        axes = {
            name: tuple(tuple((str(g), int(r)) for g, r in axis) for axis in dims)
            for name, dims in found["axes"].items()
        }
        return ChannelLayout({str(g): int(n) for g, n in found["sizes"].items()}, axes)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise StateError(f"buffered layout: the state is damaged ({error!r}); restore the last good one") from error


def text(value: str) -> Tensor:
    """UTF-8 bytes of ``value``, uint8 (n,)."""
    return raw(value.encode())


def raw(value: bytes) -> Tensor:
    """Bytes as uint8 (n,); at least one."""
    return torch.frombuffer(bytearray(value), dtype=torch.uint8)


def read(value: Tensor) -> str:
    """The text that :func:`text` wrote."""
    return bytes(value.tolist()).decode()
