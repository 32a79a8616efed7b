"""A program, opened within limits, and run on arrays: what a device trains with where torch is not installed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path

import numpy as np

from talaria import valid
from talaria.errors import ConfigError, DataError, ModelError, TooLarge, WireError
from talaria.programs import manifest as manifests
from talaria.programs import onnx_file
from talaria.programs.follow import followed
from talaria.programs.graph import FLOAT, INT, Graph, Port
from talaria.programs.lookups import Lookups
from talaria.programs.manifest import Manifest
from talaria.programs.session import Session
from talaria.programs.shapes import Cost, Limits, Value, measure
from talaria.tensors import Array, under

Arrays = dict[str, Array]
_PARTS = ("weight", "momentum", "draw", "anchor")
_KEPT = 64
"""Combinations of shapes whose check is remembered."""
_FEW = 100
"""Labels that are compared one by one."""
_SMALL = 4_000_000
"""Multiply-adds of the test vector's step up to which a network is small."""


class Program:
    """One training step of one model and trained part, for every mask and batch size.

    >>> program = Program.open("imu_cnn.program")  # doctest: +SKIP
    >>> weights, momentum, loss = program.step(weights, momentum, x, y, lr=0.02)  # doctest: +SKIP
    """

    def __init__(self, data: bytes, limits: Limits = Limits()) -> None:
        """Check the bytes of a program's file; ONNX Runtime sees them at the first step only.

        Raises :class:`~talaria.errors.WireError` for what is no program, and :class:`~talaria.errors.TooLarge` for one
        beyond ``limits`` at the sizes of its test vector.
        """
        self.graph, self.manifest = opened(data, limits)
        self.digest = hashlib.sha256(data).hexdigest()
        """Hex sha256 of the file: its name wherever it is kept or sent."""
        self.file_bytes = len(data)
        self.limits, self._data, self._checked = limits, data, dict[object, Cost]()
        self._ports = _ports(self.graph)
        named = [(name, *name.partition("/")[::2]) for name in self._ports]
        self._reads = [[(port, key) for port, kind, key in named if kind == part] for part in _PARTS]
        self.cost = self._measured(values_of(self.graph.inputs, self.manifest))
        self.lookups = Lookups(self.graph)
        """What of a batch is looked up in tables."""
        self.lookups.all  # noqa: B018 - which refuses what no program looks up

    @staticmethod
    def open(path: str | Path, limits: Limits = Limits()) -> Program:
        """The program of a file; a file that is too large is not read."""
        try:
            with valid.path("program", "path", path).open("rb") as file:
                return Program(file.read(limits.file_bytes + 1), limits)
        except OSError as why:
            raise ConfigError(f"cannot read {path}: {why.strerror or why}; check the path") from None

    @property
    def trained(self) -> tuple[str, ...]:
        """The weights that a step changes, and the statistics that follow."""
        names = (port.name for port in self.graph.outputs)
        return tuple(name.removeprefix("next/weight/") for name in names if name.startswith("next/weight/"))

    @property
    def draws(self) -> tuple[str, ...]:
        """The dropout layers that draw in a step."""
        return tuple(name for _, name in self._reads[2])

    def momentum(self, weights: Mapping[str, Array]) -> Arrays:
        """Zeros for what is trained: the momentum of a new optimizer."""
        return {name: np.zeros_like(weights[name]) for _, name in self._reads[1]}

    def step(
        self,
        weights: Mapping[str, Array],
        momentum: Mapping[str, Array],
        x: Array,
        y: Array,
        *,
        lr: float,
        draws: Mapping[str, Array] | None = None,
        anchor: Mapping[str, Array] | None = None,
        pull: float = 0.0,
    ) -> tuple[Arrays, Arrays, float]:
        """One step of SGD: ``(weights, momentum, mean loss of the batch before it)``; nothing given is changed.

        ``momentum`` is what the step before added to the weights (Sutskever et al. 2013): that of torch.optim.SGD times
        -``lr``, as long as the rate stays.

        ``weights`` is the whole state of the model by state-dict key, float32 and int64 counters, as narrow as a mask
        says. ``x`` float32 (N, ...), ``y`` int64 (N,) in 0..classes-1. ``draws`` has the dropout draws (N, ...) by
        layer; ``pull`` and ``anchor``, by state-dict key, are those of a pulled step. Raises
        :class:`~talaria.errors.ModelError` for arrays that do not fit the program and
        :class:`~talaria.errors.DataError` for labels that are no classes and tokens that no table has.
        """
        feed = self.feed(weights, momentum, x, y, lr, draws, anchor, pull)
        found = self.run(feed)
        state = {**weights, **under(found, "next/weight/")}
        return state, {**momentum, **under(found, "next/momentum/")}, float(found["loss"])

    def feed(
        self,
        weights: Mapping[str, Array],
        momentum: Mapping[str, Array],
        x: Array,
        y: Array,
        lr: float,
        draws: Mapping[str, Array] | None = None,
        anchor: Mapping[str, Array] | None = None,
        pull: float = 0.0,
    ) -> Arrays:
        """The inputs of a step by their names in the graph, checked; what it raises, and needs, is :meth:`step`'s."""
        feed: Arrays = {"x": x, "y": y, "lr": np.array(lr, np.float32)}
        if "pull" in self._ports:
            feed["pull"] = np.array(pull, np.float32)
        for given, ports in zip((weights, momentum, draws or {}, anchor or {}), self._reads, strict=True):
            feed.update((port, given[name]) for port, name in ports if name in given)
        self._fits(feed)
        self.labels(y)
        self.lookups.require_known(x)
        return feed

    def labels(self, y: Array) -> None:
        """Raise :class:`~talaria.errors.DataError` unless all labels are classes."""
        # a negative label is a large one there; few in a list: numpy's maximum makes the step after it a tenth slower
        every = y.view(np.uint64)
        if (max(every.tolist()) if len(y) < _FEW else every.max()) >= self.manifest.classes:
            raise DataError(f"y: labels {y.min()}..{y.max()} must lie in 0..{self.manifest.classes - 1}")

    def run(self, feed: Mapping[str, Array]) -> Arrays:
        """All outputs by name, of all inputs by name, as the graph has them; shapes are not checked."""
        names = [port.name for port in self.graph.outputs]
        return dict(zip(names, self.session(names, feed), strict=True))

    @cached_property
    def session(self) -> Session:
        """ONNX Runtime's session of this program, made when it is first asked for."""
        return Session(self._data, steady=True)

    @property
    def small(self) -> bool:
        """Whether the call of a step is a good part of it."""
        return self.cost.multiply_adds <= _SMALL

    @cached_property
    def steps(self) -> Session:
        """The session of many steps at once (:func:`~talaria.programs.follow.followed`), made when it is first asked
        for."""
        return Session(onnx_file.write(followed(self.graph), ""), steady=True)

    def _fits(self, feed: Mapping[str, Array]) -> None:
        """Raises unless every input is there in its dtype, widths agree, and the step stays within the limits."""
        shapes = tuple((name, getattr(v, "shape", None), getattr(v, "dtype", None)) for name, v in feed.items())
        if shapes in self._checked:
            return
        sizes: dict[str, int] = {}
        for name, port in self._ports.items():
            if name not in feed:
                raise ModelError(f"program: {name!r} is missing; give the whole state, and draws for dropout")
            _fit(port, feed[name], sizes)
        cost = self._measured({name: Value(value.shape, value.dtype.name) for name, value in feed.items()})
        if len(self._checked) >= _KEPT:
            self._checked.clear()
        self._checked[shapes] = cost

    def _measured(self, given: Mapping[str, Value]) -> Cost:
        cost = measure(self.graph, given, self.limits)
        for port in self.graph.outputs:
            found = cost.outputs.get(port.name)
            wanted = given[port.name.removeprefix("next/")].shape if port.name != "loss" else ()
            if found is None or found.shape != wanted or found.dtype != port.dtype:
                raise WireError(f"program: {port.name[:80]!r} is not {wanted} of {port.dtype}; build it again")
        return cost


def _ports(graph: Graph) -> dict[str, Port]:
    """The inputs by name. Raises :class:`~talaria.errors.WireError` for one that no program has."""
    ports = {port.name: port for port in graph.inputs}
    known = {"x": FLOAT, "y": INT, "lr": FLOAT}
    numbers = known | {"pull": FLOAT}
    for name, port in ports.items():
        kind, slash, rest = name.partition("/")
        dtypes = (numbers[name],) if name in numbers else (FLOAT, INT) if kind == "weight" else (FLOAT,)
        named = name in numbers or (slash and rest and kind in _PARTS)
        if not named or port.dtype not in dtypes:
            raise WireError(f"program: takes {name[:80]!r} of {port.dtype}, which no program does; build it again")
    names = [port.name for port in graph.outputs]
    ours = [name for name in names if name.startswith("next/") and name.removeprefix("next/") in ports]
    if (
        len(ports) != len(graph.inputs)
        or not known.keys() <= ports.keys()
        or sorted([*ours, "loss"]) != sorted({*names})
    ):
        raise WireError("program: its inputs and outputs are not those of a step; build it again")
    return ports


def opened(data: bytes, limits: Limits) -> tuple[Graph, Manifest]:
    """The graph in a file, and what the file says of it. Raises :class:`~talaria.errors.WireError` for what no program
    has, and :class:`~talaria.errors.TooLarge` for more bytes or operators than ``limits`` let be."""
    if len(data) > limits.file_bytes:
        raise TooLarge(f"program: {len(data)} bytes, at most {limits.file_bytes} are read; raise Limits.file_bytes")
    graph, note = onnx_file.read(data)
    manifest = manifests.read(note)
    if len(graph.nodes) > limits.nodes:
        raise TooLarge(f"program: {len(graph.nodes)} operators, at most {limits.nodes} are run; raise Limits.nodes")
    return graph, manifest


def values_of(ports: Iterable[Port], manifest: Manifest) -> dict[str, Value]:
    """Inputs or outputs by name, at the sizes of the manifest. Raises :class:`~talaria.errors.WireError` where it has
    none."""
    try:
        found = {p.name: Value(tuple(map(manifest.size, p.shape)), p.dtype) for p in ports}
        if none := [name for name, value in found.items() if min(value.shape, default=1) < 1]:
            raise ValueError(repr(none[0]))
        return found
    except (KeyError, ValueError) as why:
        raise WireError(f"program: its manifest has no size for {str(why)[:80]}; build it again") from None


def _fit(port: Port, value: Array, sizes: dict[str, int]) -> None:
    if not isinstance(value, np.ndarray) or value.dtype.name != port.dtype:
        raise ModelError(f"program: {port.name!r} must be an array of {port.dtype}, is {_what(value)}; convert it")
    if len(value.shape) != len(port.shape):
        raise ModelError(f"program: {port.name!r} has shape {value.shape}, needs {port.shape}; give this model's state")
    of_model = port.name.partition("/")[0] in ("weight", "momentum", "anchor")
    for label, size in zip(port.shape, value.shape, strict=True):
        wanted = label if isinstance(label, int) else sizes.setdefault(label, size)
        if size == wanted > 0:
            continue
        if not of_model:
            which, mend = "", "give at least one sample, with its label, of the shape it was built for"
        elif label == wanted:
            which = ""
            mend = "leave these channels whole in every mask and plan, as in a convolution of several groups, or train "
            mend += "this model with torch"
        else:
            which, mend = f" with {label}={wanted}", "give one model's state under one mask"
        raise ModelError(f"program: {port.name!r} has shape {value.shape}, needs {port.shape}{which}; {mend}")


def _what(value: object) -> str:
    return str(value.dtype) if isinstance(value, np.ndarray) else type(value).__name__
