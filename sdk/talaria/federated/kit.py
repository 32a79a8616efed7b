"""A kit: one file with all that a device without torch needs for a run.

It holds the channels and parts of the model, where its private parts begin, and every program and graph that the run's
algorithm asks of a device. What travels has no values in it: a device downloads them before it learns, and they would
be most of the file. As a file it is tensors in the safetensors layout (:mod:`talaria.wire.strict_safetensors`),
programs and graphs among them as bytes, deflated (RFC 1950); nothing in it is run when it is read. Reading one needs no
torch.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from talaria import durable, valid
from talaria.errors import ConfigError, DataError, StateError, TooLarge, WireError
from talaria.federated import own_process
from talaria.federated.blueprint import Blueprint, heard, told
from talaria.federated.run import Run
from talaria.foreign import parsed, printed
from talaria.inputs import parts_of
from talaria.model.masks import ChannelLayout
from talaria.model.split import Split
from talaria.planning.anatomy import PRODUCTS, Anatomy, Layer
from talaria.programs.given import Given
from talaria.programs.shapes import Limits
from talaria.tensors import Array, Tensors
from talaria.wire import strict_safetensors
from talaria.wire.codec import TensorSpec, schema_of

VERSION = 2
MOST = 40_000
"""Tensors and files that a kit may hold."""
MOST_LAYERS = 10_000
LARGEST_ABOUT = 1 << 24
LARGEST_FILES = 1 << 27
"""Bytes of all files in a kit together, inflated; those of real ones are less than a hundredth of it."""
DIFFER = "kit: what it says and what it holds differ; make it again"
LARGEST = 1 << 30
"""Most bytes of a file that is read as a kit."""
_META, _ABOUT, _STATE, _SCORE, _FILE, _BESIDE = "talaria-kit", "about", "state/", "score/", "file/", "beside/"


@dataclass(frozen=True)
class Kit:
    """``run`` is the run's identity, in which its rounds are not: a run that goes on keeps its kit. ``schema`` has the
    whole model's tensors and what an algorithm shares beside them, in their order, ``shared`` the names among these
    that travel, ``state`` the first values of the others; ``scores`` say which channels of each group a plan keeps,
    highest first; ``source`` has the programs."""

    run: str
    schema: Mapping[str, TensorSpec] = field(repr=False)
    shared: tuple[str, ...] = field(repr=False)
    state: Tensors = field(repr=False)
    scores: Mapping[str, Array] = field(repr=False)
    layout: ChannelLayout = field(repr=False)
    split: Split = field(repr=False)
    source: Given = field(repr=False)
    layers: tuple[Layer, ...] = field(default=(), repr=False)
    """What the model computes, layer by layer: what a device plans its widths from."""

    @cached_property
    def model(self) -> Tensors:
        """The whole model in its order: the first values of what is private, zeros for what is downloaded."""
        return {
            name: self.state[name] if name in self.state else np.zeros(spec.shape, spec.dtype)
            for name, spec in self._model_schema.items()
        }

    @property
    def _model_schema(self) -> dict[str, TensorSpec]:
        keys = {*self.split.keys}
        return {name: spec for name, spec in self.schema.items() if name in keys}

    @cached_property
    def anatomy(self) -> Anatomy:
        """What latencies and sizes are told from, at any widths. Raises :class:`~talaria.errors.ConfigError` where the
        kit does not hold it."""
        if not self.layers:
            raise ConfigError(
                "kit: does not say what the model computes, so nothing can be planned from it; give the device a plan "
                "that `talaria plan` made"
            )
        shapes = {name: spec.shape for name, spec in self._model_schema.items()}
        return Anatomy(self.layout, self.layers, shapes, self.split)

    @cached_property
    def blueprint(self) -> Blueprint:
        """What of it a coordinator needs too."""
        return Blueprint({name: self.schema[name] for name in self.shared}, self.layout, self.split, self._first)

    def _first(self) -> Tensors:
        raise ConfigError(
            "kit: holds no first values of what travels, so no run can begin here; take part in a fleet, whose "
            "coordinator has them, or install talaria[torch]"
        )

    def require(self, run: Run) -> None:
        """Raise :class:`~talaria.errors.ConfigError` where this is the kit of another run."""
        if not run.is_named(self.run):
            raise ConfigError(
                f"kit: was made for another run ({printed(self.run[:12])}, this one is {run.identity[:12]}); make it "
                "anew from the coordinator's fleet.toml with `talaria programs kit`"
            )


def encode(kit: Kit) -> bytes:
    """The file: equal kits, equal bytes."""
    about = {
        "run": kit.run,
        "state": [[name, strict_safetensors.NAMES[s.dtype], list(s.shape)] for name, s in kit.schema.items()],
        "shared": list(kit.shared),
        **told(kit.layout, kit.split),
        "layers": [asdict(layer) for layer in kit.layers],
        **_facts(kit.source),
    }
    files = _packed(about, kit.source.files)
    files |= {_FILE + _BESIDE + name: _encoded(other) for name, other in kit.source.others.items()}
    arrays = {name: np.frombuffer(data, np.uint8) for name, data in files.items()}
    state = {_STATE + name: value for name, value in kit.state.items()}
    scores = {_SCORE + group: value for group, value in kit.scores.items()}
    return strict_safetensors.pack({**state, **scores, **arrays}, {_META: str(VERSION)})


def _encoded(source: Given) -> bytes:
    """The programs of a model beside the run's own, with its first weights."""
    files = _packed({"state": list(source.state), **_facts(source)}, source.files)
    arrays = {name: np.frombuffer(data, np.uint8) for name, data in files.items()}
    state = {_STATE + name: value for name, value in source.state.items()}
    return strict_safetensors.pack({**state, **arrays}, {_META: str(VERSION)})


def _facts(source: Given) -> dict[str, Any]:
    return {
        "parameters": sorted(source.parameters),
        "statistics": list(source.statistics),
        "falls": dict(source.falls),
        "cuts": dict(source.cuts),
    } | ({"parts": {name: list(shape) for name, shape in source.parts.items()}} if source.parts else {})


def _packed(about: Mapping[str, Any], files: Mapping[str, bytes]) -> dict[str, bytes]:
    """By their names in a file. Names repeat in graphs: they become a sixth."""
    text = json.dumps(about, sort_keys=True, separators=(",", ":")).encode()
    return {_ABOUT: zlib.compress(text, 9)} | {_FILE + name: zlib.compress(data, 9) for name, data in files.items()}


@dataclass
class _Room:
    """What all files of one kit, those of models beside its own too, may still take once they are inflated."""

    left: int = LARGEST_FILES

    def inflated(self, data: memoryview, most: int) -> bytes:
        """A file of at most ``most`` bytes."""
        reader, most = zlib.decompressobj(), min(most, self.left)
        found = reader.decompress(data, most + 1)
        if len(found) > most:
            raise TooLarge(f"a file of more than {most} bytes in it")
        if not reader.eof or reader.unused_data:
            raise ValueError("a file in it that is cut, or has something behind it")
        self.left -= len(found)
        return found


def decode(data: bytes, limits: Limits = Limits()) -> Kit:
    """The kit in a file. Its programs are opened, within ``limits``, when they are needed.

    Raises :class:`~talaria.errors.StateError` for anything that :func:`encode` does not write.
    """
    try:
        room = _Room()
        about, held, files, beside = _opened(data, limits, room)
        schema = _schema(about["state"])
        state = {name: held.pop(_STATE + name).array() for name in schema if _STATE + name in held}
        scores = {name.removeprefix(_SCORE): one.array() for name, one in held.items() if name.startswith(_SCORE)}
        others = {name: _decoded(one, limits, room) for name, one in beside.items()}
        layout, split = heard(about)
        source = _given(about, files, limits, others=others)
        layers = _layers(about["layers"], layout)
        kit = Kit(str(about["run"]), schema, tuple(about["shared"]), state, scores, layout, split, source, layers)
        shapes = {group: value.shape for group, value in scores.items()}
        if len(held) != len(scores) or shapes != {group: (size,) for group, size in layout.sizes.items()}:
            raise StateError(DIFFER)
        if {*split.keys, *kit.shared} != {*schema} or not layout.fits({n: one.shape for n, one in schema.items()}):
            raise StateError(DIFFER)
        if {*state} != {*schema} - {*kit.shared} or schema_of(state) != {name: schema[name] for name in state}:
            raise StateError(DIFFER)
        for source, own in ((kit.source, {*schema}), *((other, {*other.state}) for other in others.values())):
            if not {*source.parameters, *source.statistics} <= own:
                raise StateError(DIFFER)
    except (
        LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError, zlib.error, WireError,
        ConfigError, DataError,
    ) as why:  # fmt: skip
        raise StateError(f"kit: damaged ({type(why).__name__}: {str(why)[:100]}); make it again") from None
    return kit


def _opened(
    data: bytes, limits: Limits, room: _Room
) -> tuple[dict[str, Any], dict[str, strict_safetensors.Entry], dict[str, bytes], dict[str, bytes]]:
    """What a file says, its tensors, the files in it, and those of models beside its own, still packed."""
    entries, meta = strict_safetensors.unpack(data, most=MOST)
    version = meta[_META]
    if version != str(VERSION):
        raise StateError(f"kit: is of version {version[:20]!r}, this Talaria reads {VERSION}; make it again")
    about: dict[str, Any] = parsed(room.inflated(entries.pop(_ABOUT).raw, LARGEST_ABOUT).decode())
    within = {name.removeprefix(_FILE): entries.pop(name).raw for name in list(entries) if name.startswith(_FILE)}
    beside = {name.removeprefix(_BESIDE): bytes(raw) for name, raw in within.items() if name.startswith(_BESIDE)}
    files = {n: room.inflated(raw, limits.file_bytes) for n, raw in within.items() if not n.startswith(_BESIDE)}
    return about, entries, files, beside


def _schema(found: Any) -> dict[str, TensorSpec]:
    """Names, dtypes and shapes of the whole state; bounded, as zeros are made of it."""
    schema, largest = dict[str, TensorSpec](), 0
    for name, dtype, shape in found:
        spec = TensorSpec(tuple(int(size) for size in shape), strict_safetensors.DTYPES[dtype])
        if len(shape) > strict_safetensors.MAX_DIMS or not all(0 <= size <= LARGEST for size in spec.shape):
            raise ValueError("a tensor of no size")
        largest += math.prod(spec.shape) * spec.dtype.itemsize
        schema[str(name)] = spec
    if len(schema) != len(found) or largest > LARGEST:
        raise ValueError("tensors beyond what a model has")
    return schema


def _decoded(data: bytes, limits: Limits, room: _Room) -> Given:
    about, held, files, beside = _opened(data, limits, room)
    state = {name: held.pop(_STATE + name).array() for name in about["state"]}
    if held or beside:
        raise StateError(DIFFER)
    return _given(about, files, limits, state=state)


def _given(about: Mapping[str, Any], files: Mapping[str, bytes], limits: Limits, **more: Any) -> Given:
    return Given(
        parameters=frozenset(about["parameters"]),
        statistics=tuple(about["statistics"]),
        falls=_numbers(about["falls"]),
        cuts=_sizes(about["cuts"]),
        files=files,
        limits=limits,
        parts=parts_of(about["parts"]) if "parts" in about else {},
        **more,
    )


def made(run_json: str) -> bytes:
    """The file of a run, made in a process of its own, which needs torch.

    Raises :class:`~talaria.errors.ConfigError` where there can be no kit of the run.
    """
    return own_process.made("talaria.federated.make_kit", run_json, "run: its kit cannot be made")


def open_kit(path: str | Path) -> Kit:
    """The kit in a file; a file that is too large is not read. Raises :class:`~talaria.errors.ConfigError` where it
    cannot be read, and as :func:`decode`."""
    try:
        data = durable.read(valid.path("kit", "path", path), LARGEST + 1)
    except OSError as why:
        raise ConfigError(f"kit: cannot read {path}: {why.strerror or why}; check the path") from None
    if len(data) > LARGEST:
        raise TooLarge(f"kit: {path} has more than {LARGEST} bytes, so it is none")
    try:
        return decode(data)
    except StateError as why:
        raise StateError(f"kit: {path}: {str(why).removeprefix('kit: ')}") from None


def _layers(found: Any, layout: ChannelLayout) -> tuple[Layer, ...]:
    """The layers of a model that ``layout`` is of; bounded, so that no figure of them runs away."""
    if not isinstance(found, list) or len(found) > MOST_LAYERS:
        raise ValueError("layers beyond what a model has")
    made = []
    for one in found:
        out, into = (tuple((str(g), int(n)) for g, n in one[axis]) for axis in ("out", "into"))
        dense, positions = ((int(one[name][0]), int(one[name][1])) for name in ("dense", "positions"))
        kernel = int(one["kernel"])
        sizes = (kernel, *dense, *positions, *(n for _, n in (*out, *into)))
        if not all(0 < size <= 1 << 31 for size in sizes) or not {g for g, _ in (*out, *into)} <= set(layout.sizes):
            raise ValueError("a layer of no size, or of channels that are not the model's")
        if one["kind"] not in PRODUCTS:
            raise ValueError("a layer of an unknown kind")
        made.append(Layer(str(one["name"]), one["kind"], out, into, dense, kernel, positions, bool(one["linear"])))
    return tuple(made)


def _numbers(found: Mapping[str, Any]) -> dict[str, float]:
    out = {name: float(value) for name, value in found.items()}
    if not all(0 <= value <= 1 for value in out.values()):
        raise ValueError("a share beyond 0..1")
    return out


def _sizes(found: Mapping[str, Any]) -> dict[str, int | None]:
    out = {name: None if value is None else int(value) for name, value in found.items()}
    if any(value is not None and value < 1 for value in out.values()):
        raise ValueError("features of no size")
    return out
