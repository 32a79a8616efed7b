"""What only torch can say of a run's model: where all begin, which channels it has, what is body and what head.

As a file it serves a program that never trains and so needs no torch; :mod:`talaria.federated.make_blueprint` makes it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from talaria.errors import StateError, WireError
from talaria.foreign import parsed
from talaria.model.masks import ChannelLayout
from talaria.model.split import Split
from talaria.tensors import Tensors, only
from talaria.wire import strict_safetensors
from talaria.wire.codec import TensorSpec

VERSION = 1
MOST = 40_000
"""Tensors that a file may hold."""
_META = "talaria-blueprint"


@dataclass(frozen=True)
class Blueprint:
    """``schema`` of the shared state in its own order, the model's channel groups and its parts; ``first`` gives the
    shared state that all begin from."""

    schema: Mapping[str, TensorSpec]
    layout: ChannelLayout
    split: Split
    first: Callable[[], Tensors] = field(repr=False)


def told(layout: ChannelLayout, split: Split) -> dict[str, Any]:
    """The channels and parts of a model as plain values, for a file."""
    return {
        "sizes": dict(layout.sizes),
        "axes": {key: [[list(part) for part in axis] for axis in axes] for key, axes in layout.axes.items()},
        "split": asdict(split) | {"statistics": sorted(split.statistics), "counters": sorted(split.counters)},
    }


def heard(about: Mapping[str, Any]) -> tuple[ChannelLayout, Split]:
    """What :func:`told` tells; raises whatever values of another form do, such as TypeError."""
    axes = {k: tuple(tuple((str(g), int(n)) for g, n in axis) for axis in v) for k, v in about["axes"].items()}
    parts: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in about["split"].items()}
    split = Split(**parts | {name: frozenset(parts[name]) for name in ("statistics", "counters")})
    return ChannelLayout({str(g): int(n) for g, n in about["sizes"].items()}, axes), split


def encode(shared: Tensors, layout: ChannelLayout, split: Split) -> bytes:
    """The file: ``shared`` as safetensors, with all else in its header."""
    about = {"v": VERSION, "names": list(shared), **told(layout, split)}
    return strict_safetensors.pack(shared, {_META: json.dumps(about, separators=(",", ":"))})


def decode(data: bytes) -> Blueprint:
    """The blueprint in a file, which is kept whole.

    Raises :class:`StateError` for anything that :func:`encode` does not write.
    """
    try:
        entries, meta = strict_safetensors.unpack(data, most=MOST)
        about = parsed(meta[_META])
        if about["v"] != VERSION:
            raise StateError(f"blueprint: version {about['v']}, this Talaria reads {VERSION}; make it again")
        schema = {name: TensorSpec(entries[name].shape, entries[name].dtype) for name in about["names"]}
        layout, split = heard(about)
    except (KeyError, TypeError, ValueError, AttributeError, WireError) as error:
        raise StateError(f"blueprint: damaged ({type(error).__name__}: {str(error)[:100]}); make it again") from None
    return Blueprint(schema, layout, split, lambda: only({k: one.array() for k, one in entries.items()}, schema))
