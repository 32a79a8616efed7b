"""Steps that go on from each other in buffers that stay: a small network's step is mostly the cost of its call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from talaria.programs.follow import in_runs
from talaria.programs.program import Arrays, Program
from talaria.tensors import Array

_KEPT = 32
"""Shapes of batches whose buffers are kept: an epoch has two, its last batch being smaller, and each number of steps at
once has its own."""
_ROOM = 1 << 20
"""Bytes of samples that are stepped on at once."""


class Training:
    """A program with its state: the weights and momenta that a step writes are those that the next one reads.

    There are two sets of them, read and written in turn. What is given is copied; nothing is shared with the caller.
    """

    def __init__(
        self,
        program: Program,
        weights: Mapping[str, Array],
        momentum: Mapping[str, Array],
        *,
        anchor: Mapping[str, Array] | None = None,
        pull: float = 0.0,
    ) -> None:
        """Begin at ``weights`` and ``momentum``; these and ``anchor`` and ``pull`` are as :meth:`Program.step` takes
        them. Where shapes are equal, :meth:`begin` is the same again in the same buffers."""
        self.program = program
        given = {"weight": weights, "momentum": momentum, "anchor": anchor or {}}
        self._state = {
            kind: {name: np.array(value, order="C") for name, value in one.items()} for kind, one in given.items()
        }
        after = {port.name for port in program.graph.outputs}
        self._other = {
            kind: {name: np.empty_like(value) for name, value in one.items() if f"next/{kind}/{name}" in after}
            for kind, one in self._state.items()
        }
        self._pull = np.array(pull, np.float32)
        self._turn = 0
        self._loss = np.zeros((), np.float32)
        self._batches: dict[object, tuple[Arrays, list[Callable[[], None]]]] = {}

    def begin(
        self,
        weights: Mapping[str, Array],
        *,
        anchor: Mapping[str, Array] | None = None,
        pull: float = 0.0,
    ) -> None:
        """Another training of the same program, at weights of the same names and shapes, from rest."""
        self._turn = 0
        self._pull[()] = pull
        for given, own in ((weights, self._state["weight"]), (anchor or {}, self._state["anchor"])):
            for name, value in own.items():
                np.copyto(value, given[name])
        for value in self._state["momentum"].values():
            value.fill(0)

    @property
    def weights(self) -> Arrays:
        """A copy of the whole state by state-dict key, as it is now."""
        return self._now("weight")

    @property
    def momentum(self) -> Arrays:
        """A copy of the momenta, as they are now."""
        return self._now("momentum")

    def step(self, x: Array, y: Array, *, lr: float, draws: Mapping[str, Array] | None = None) -> float:
        """One step; the mean loss of the batch before it. Arguments and errors are those of :meth:`Program.step`."""
        shapes = _shapes(x, y, draws)
        if shapes not in self._batches:
            self._bind(shapes, x, y, lr, draws)
        buffers, calls = self._batches[shapes]
        self.program.labels(y)
        self.program.lookups.require_known(x)
        buffers["x"][...] = x  # half as long as copyto
        buffers["y"][...] = y
        if draws:
            for name, value in draws.items():
                if (port := f"draw/{name}") in buffers:
                    buffers[port][...] = value
        buffers["lr"][()] = lr
        calls[self._turn]()
        self._turn = 1 - self._turn
        return float(self._loss)

    def follow(self, x: Array, y: Array, batches: Iterable[Array], *, lr: float) -> None:
        """A step on each of ``batches``, int64 rows of ``x`` (M, ...) and ``y`` (M,): what :meth:`step` does with these
        rows, for a program that draws nothing. A small network takes many steps in one call. Errors are those of
        :meth:`step`; all labels must be classes, and all tokens known, before the first one."""
        self.program.labels(y)
        self.program.lookups.require_known(x)
        many, form = self.program.small, (x.shape[1:], x.dtype, y.shape[1:], y.dtype)
        for run in in_runs(batches, _ROOM // max(1, x[:1].nbytes) if many else 1):
            rows = run if many else run[0]
            if (shapes := (rows.shape, form)) not in self._batches:
                self._bind(shapes, x.take(run[0], 0), y.take(run[0], 0), lr, None, steps=len(run) if many else None)
            buffers, calls = self._batches[shapes]
            buffers["lr"][()] = lr
            x.take(rows, 0, buffers["x"], "clip")  # other modes copy what they give
            y.take(rows, 0, buffers["y"], "clip")
            calls[self._turn]()
            self._turn = 1 - self._turn

    def _bind(
        self,
        shapes: object,
        x: Array,
        y: Array,
        lr: float,
        draws: Mapping[str, Array] | None,
        steps: int | None = None,
    ) -> None:
        """Buffers and calls of a step on batches like ``x`` and ``y``, or of so many ``steps`` at once."""
        feed = self.program.feed(self.weights, self.momentum, x, y, lr, draws, self._state["anchor"], float(self._pull))
        held, other = _by_port(self._state) | {"pull": self._pull}, _by_port(self._other)
        buffers = {name: np.array(value, order="C") for name, value in feed.items() if name not in held}
        loss = {"loss": self._loss} if steps is None else {}
        session = self.program.session if steps is None else self.program.steps
        if steps is not None:
            buffers |= {name: np.empty((steps, *buffers[name].shape), buffers[name].dtype) for name in ("x", "y")}
        calls = []
        for read, written in ((held, other), ({**held, **other}, held)):
            inputs = {name: buffers[name] if name in buffers else read[name] for name in feed}
            outputs = {f"next/{name}": written[name] for name in other}
            calls.append(session.bound(inputs, {**loss, **outputs}))
        if len(self._batches) >= _KEPT:
            self._batches.clear()
        self._batches[shapes] = buffers, calls

    def _now(self, kind: str) -> Arrays:
        other = self._other[kind] if self._turn else {}
        return {name: other.get(name, value).copy() for name, value in self._state[kind].items()}


def _by_port(state: Mapping[str, Arrays]) -> Arrays:
    return {f"{kind}/{name}": value for kind, one in state.items() for name, value in one.items()}


def _shapes(x: Array, y: Array, draws: Mapping[str, Array] | None) -> object:
    """What decides whether buffers fit; None where there is no array: then :meth:`Program.feed` says so."""
    try:
        own = (x.shape, x.dtype, y.shape, y.dtype)
        return (own, *((name, one.shape, one.dtype) for name, one in draws.items())) if draws else own
    except AttributeError:
        return None
