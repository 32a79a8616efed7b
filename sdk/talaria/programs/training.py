"""Steps that go on from each other in buffers that stay: a small network's step is mostly the cost of its call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from talaria.programs.follow import in_runs
from talaria.programs.program import Arrays, Program
from talaria.tensors import Array

_KEPT = 12
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
        self._anchor, self._pull = anchor, pull
        given = {"weight": weights, "momentum": momentum}
        self._state = {
            f"{kind}/{name}": np.array(value, order="C") for kind, one in given.items() for name, value in one.items()
        }
        changing = [port.name.removeprefix("next/") for port in program.graph.outputs if port.name != "loss"]
        self._other = {name: np.empty_like(self._state[name]) for name in changing if name in self._state}
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
        self._anchor, self._pull, self._turn = anchor, pull, 0
        for port, value in self._state.items():
            kind, _, name = port.partition("/")
            if kind == "weight":
                np.copyto(value, weights[name])
            else:
                value.fill(0)
        for buffers, _ in self._batches.values():
            for name, value in (anchor or {}).items():
                if (port := f"anchor/{name}") in buffers:
                    np.copyto(buffers[port], value)
            if "pull" in buffers:
                buffers["pull"][()] = pull

    @property
    def weights(self) -> Arrays:
        """A copy of the whole state by state-dict key, as it is now."""
        return self._now("weight/")

    @property
    def momentum(self) -> Arrays:
        """A copy of the momenta, as they are now."""
        return self._now("momentum/")

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
        many = self.program.small
        bound: dict[tuple[int, ...], tuple[Arrays, list[Callable[[], None]]]] = {}
        for run in in_runs(batches, _ROOM // max(1, x[:1].nbytes) if many else 1):
            rows = run if many else run[0]
            if rows.shape not in bound:
                given = x.take(run[0], 0), y.take(run[0], 0)
                shapes = rows.shape, _shapes(*given, None)
                if shapes not in self._batches:
                    self._bind(shapes, *given, lr, None, steps=len(run) if many else None)
                bound[rows.shape] = self._batches[shapes]
                bound[rows.shape][0]["lr"][()] = lr
            buffers, calls = bound[rows.shape]
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
        state = self._now("weight/"), self._now("momentum/")
        feed = self.program.feed(*state, x, y, lr, draws, self._anchor, self._pull)
        buffers = {name: np.array(value, order="C") for name, value in feed.items() if name not in self._state}
        loss = {"loss": self._loss} if steps is None else {}
        session = self.program.session if steps is None else self.program.steps
        if steps is not None:
            buffers |= {name: np.empty((steps, *buffers[name].shape), buffers[name].dtype) for name in ("x", "y")}
        sets = [{**self._state, **self._other}, self._state]
        calls = []
        for read, written in ((sets[1], sets[0]), (sets[0], sets[1])):
            inputs = {name: buffers[name] if name in buffers else read[name] for name in feed}
            outputs = {f"next/{name}": written[name] for name in self._other}
            calls.append(session.bound(inputs, {**loss, **outputs}))
        if len(self._batches) == _KEPT:
            self._batches.clear()
        self._batches[shapes] = buffers, calls

    def _now(self, prefix: str) -> Arrays:
        found = {**self._state, **(self._other if self._turn else {})}
        return {name.removeprefix(prefix): v.copy() for name, v in found.items() if name.startswith(prefix)}


def _shapes(x: Array, y: Array, draws: Mapping[str, Array] | None) -> object:
    """What decides whether buffers fit; None where there is no array: then :meth:`Program.feed` says so."""
    try:
        own = (x.shape, x.dtype, y.shape, y.dtype)
        return (own, *((name, one.shape, one.dtype) for name, one in draws.items())) if draws else own
    except AttributeError:
        return None
