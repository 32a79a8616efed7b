"""What an engine of programs does with a model's derivative: objectives over arrays, gradients, walks, and looks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from talaria.model.split import WHOLE
from talaria.programs.tangent import ALONG
from talaria.programs.vjp import GRADIENT, Vjp
from talaria.tensors import Array, Tensors
from talaria.training.array_sgd import ArraySGD
from talaria.training.batching import feed, steps_of
from talaria.training.interface import Task
from talaria.training.objectives import LOGITS, CrossEntropy, Curved, Objective, Pull, share_of, slopes_of
from talaria.types import Recipe, Samples

_AT_ONCE = 256
"""Samples that are looked at together."""


class Streams(Protocol):
    """Dropout's draws of one training."""

    def next(self, count: int) -> dict[str, Array]:
        """The draws (N, ...) of each layer for a batch of ``count``."""
        ...

    def copy(self) -> Streams:
        """The same draws once more, from where these stand."""
        ...


@dataclass(frozen=True)
class Derivatives:
    """``vjp`` gives the derivative of the model at a trained part and some taps, ``twice`` that of a part at the logits
    with its own derivative, ``streams`` what dropout layers draw from, given a state, a task and a purpose."""

    vjp: Callable[[Collection[str] | None, Sequence[str]], Vjp]
    twice: Callable[[Collection[str] | None], Vjp]
    streams: Callable[[Vjp, Mapping[str, Array], Task, str], Streams]

    def train(
        self,
        task: Task,
        state: Tensors,
        only: Collection[str] | None,
        recipe: Recipe,
        pull: Pull | None,
        objective: Objective,
        samples: Samples,
        purpose: str,
    ) -> Tensors:
        """See :func:`talaria.training.engine.train`; what of the model the taps do not need may be missing."""
        vjp, own = self.vjp(only, objective.taps), [k for k in objective.own if only is None or k in only]
        if not (own or _trained(vjp)) or steps_of(recipe, len(samples)) == 0:
            return dict(state)
        now, optimizer, draws = dict(state), ArraySGD(recipe), self.streams(vjp, state, task, purpose)
        for x, y in feed(task, recipe, samples, purpose):
            slopes = _slopes(vjp, now, objective, x, y, recipe.accumulate, draws, keep=True)
            slopes = {name: slope for name, slope in slopes.items() if name not in objective.own or name in own}
            if pull is not None:
                pulled = {k: pull.strength * (now[k] - pull.anchor[k]) for k in slopes if k in pull.anchor}
                slopes = {k: slope + pulled[k] if k in pulled else slope for k, slope in slopes.items()}
            optimizer.step(now, slopes)
        return now

    def gradient(
        self,
        task: Task,
        state: Tensors,
        only: Collection[str] | None,
        samples: Samples,
        objective: Objective | None,
        purpose: str,
    ) -> Tensors:
        """See :func:`talaria.training.engine.gradient`."""
        objective = objective or CrossEntropy()
        vjp = self.vjp(only, objective.taps)
        draws = self.streams(vjp, state, task, purpose)
        found = _slopes(vjp, dict(state), objective, samples.x, samples.y, 1, draws, keep=False)
        wanted = [key for key in task.split.parameters(*WHOLE) if only is None or key in only]
        own = [key for key in objective.own if only is None or key in only]
        return {key: found.get(key, np.zeros_like(state[key])) for key in (*wanted, *own)}

    def looking(self, state: Tensors, taps: Sequence[str]) -> Callable[[Array], Tensors]:
        """See :func:`talaria.training.engine.looking`."""
        vjp = self.vjp((), taps)

        def look(x: Array) -> Tensors:
            starts = range(0, max(1, len(x)), _AT_ONCE)
            parts = [vjp.forward(state, x[begin : begin + _AT_ONCE]).taps for begin in starts]
            return {tap: np.concatenate([part[tap] for part in parts]) for tap in taps}

        return look


class ProgramWalk:
    """One sequence of weights under the recipe's SGD; a :class:`~talaria.training.interface.Walk`."""

    def __init__(
        self,
        derivatives: Derivatives,
        task: Task,
        state: Tensors,
        recipe: Recipe,
        purpose: str,
        objective: Curved | None,
        only: Collection[str] | None,
    ) -> None:
        self._derivatives, self._task, self._recipe, self._only = derivatives, task, recipe, only
        self._vjp = derivatives.vjp(only, (LOGITS,))
        self._state = dict(state)
        parameters = {*task.split.parameters(*WHOLE)}
        self._trained = [key for key in state if key in parameters and (only is None or key in only)]
        self._optimizer, self._objective = ArraySGD(recipe), objective or CrossEntropy(recipe.smoothing)
        self._draws = self.draws(purpose)

    @property
    def weights(self) -> Tensors:
        """The weights by state-dict key as they are now."""
        return {key: self._state[key] for key in self._trained}

    def draws(self, purpose: str) -> Streams:
        """Draws of dropout for one purpose."""
        return self._derivatives.streams(self._vjp, self._state, self._task, purpose)

    def gradient(
        self, x: Array, y: Array, *, at: Tensors | None = None, keep: bool = False, draws: Streams | None = None
    ) -> Tensors:
        """See :class:`~talaria.training.interface.Walk`; weights without influence are left out."""
        now = {**self._state, **(at or {})}
        slices, draws = self._recipe.accumulate, draws or self._draws
        found = _slopes(self._vjp, now, self._objective, x, y, slices, draws, keep=keep)
        if keep:
            self._state |= {key: value for key, value in now.items() if key not in self._trained}
        return {key: found[key] for key in self._trained if key in found}

    def curved(self, x: Array, y: Array, along: Tensors, draws: Streams) -> Tensors:
        """The Hessian of the batch's loss at the walk's weights times ``along``: the derivative's own derivative."""
        twice = self._derivatives.twice(self._only)
        ways = {ALONG + key: along.get(key, np.zeros_like(self._state[key])) for key in self._trained}
        total: Tensors = {}
        for xs, ys in _pieces(x, y, self._recipe.accumulate):
            done = twice.forward({**self._state, **ways}, xs, draws.next(len(ys)))
            logits, way = done.taps[LOGITS], done.taps[ALONG + LOGITS]
            slopes = self._objective({LOGITS: logits}, {}, xs, ys).taps
            share = share_of(self._objective, ys, y)
            found = done.backward({**slopes, ALONG + LOGITS: self._objective.bent(logits, ys, way)})
            for key, value in found.items():
                if key.startswith(ALONG):
                    part = value if share == 1 else np.asarray(share * value, value.dtype)
                    name = key.removeprefix(ALONG)
                    total[name] = total[name] + part if name in total else part
        return {key: total[key] for key in self._trained if key in total}

    def step(self, slopes: Tensors, *, at: Tensors | None = None, scale: float = 1.0) -> None:
        """One optimizer step of the weights, see :class:`~talaria.training.interface.Walk`."""
        self._optimizer.step(self._state, slopes, at=at, scale=scale)

    def state(self) -> Tensors:
        """Copies of all weights and buffers under the state-dict's names."""
        return {key: np.array(value, order="C") for key, value in self._state.items()}


def _slopes(
    vjp: Vjp,
    now: Tensors,
    objective: Objective,
    x: Array,
    y: Array,
    slices: int,
    draws: Streams,
    *,
    keep: bool,
) -> Tensors:
    """The gradient of a batch's mean loss, in ``slices``; with ``keep`` the statistics in ``now`` follow."""
    total: Tensors = {}
    for xs, ys in _pieces(x, y, slices):
        done = vjp.forward(now, xs, draws.next(len(ys)))
        found = slopes_of(objective, done.taps, {name: now[name] for name in objective.own}, xs, ys)
        share = share_of(objective, ys, y)
        for name, slope in {**done.backward(found.taps), **found.own}.items():
            part = slope if share == 1 else np.asarray(share * slope, slope.dtype)
            total[name] = total[name] + part if name in total else part
        if keep:
            now |= done.moved
    return total


def _pieces(x: Array, y: Array, slices: int) -> Iterator[tuple[Array, Array]]:
    count = min(slices, len(y))
    yield from zip(np.array_split(x, count), np.array_split(y, count), strict=True)


def _trained(vjp: Vjp) -> list[str]:
    names = (port.name for port in vjp.graph.outputs)
    return [name.removeprefix(GRADIENT) for name in names if name.startswith(GRADIENT)]
