"""Tensors that are the same for each sample, reckoned with one another before they meet a map: ``self.a * self.b``, a
weight of low rank ``self.u @ self.v``, a table put together of two."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from talaria.programs.graph import Size
from talaria.programs.layers.base import Step
from talaria.programs.layers.broadcast import BEYOND, of_extreme
from talaria.programs.layers.elementwise import negated, over
from talaria.programs.layers.parameters import Weight, shrunk


@dataclass(frozen=True)
class Combined:
    """What an operator makes of some tensors; ``axis`` is the dimension along which a Concat has them side by side."""

    kind: str
    parts: tuple[Weight, ...]
    axis: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """See :class:`~talaria.programs.layers.parameters.Source`. Raises what torch raises where they do not fit."""
        likes = [torch.empty(one.shape, device="meta") for one in self.parts]
        return tuple((torch.cat(likes, self.axis) if self.kind == "Concat" else _MADE[self.kind](*likes)).shape)

    @property
    def dtype(self) -> torch.dtype:
        """See :class:`~talaria.programs.layers.parameters.Source`."""
        return torch.float32

    @property
    def trains(self) -> bool:
        """Whether one of them is trained."""
        return any(one.trains for one in self.parts)

    @property
    def layer(self) -> str | None:
        """That of the part which has its sizes, where it is made value by value."""
        layers = [one.layer for one in self.parts if one.shape == self.shape and self.kind in _EACH]
        return next((one for one in layers if one is not None), None)

    def value(self, step: Step, labels: Sequence[Size] | None = None) -> str:
        """What the operator gives."""
        values = [one.value(step, self._labels(one, labels)) for one in self.parts]
        if self.kind == "Concat":
            return step.draft.op("Concat", *values, axis=self.axis)
        return step.draft.op(self.kind, *values)

    def _labels(self, one: Weight, labels: Sequence[Size] | None) -> Sequence[Size] | None:
        if labels is None or one.layer is None:
            return None
        return [label if size != 1 else 1 for label, size in zip(labels[-len(one.shape) :], one.shape, strict=True)]

    def train(self, step: Step, slope: str) -> None:
        """Keep the gradients of all that are trained."""
        start = 0
        for place, one in enumerate(self.parts):
            if self.kind == "Concat":
                stop = start + one.shape[self.axis]
                ends = (step.draft.ints(n) for n in (start, stop, self.axis, 1))
                one.train(step, step.draft.op("Slice", slope, *ends))
                start = stop
            elif one.trains:
                one.train(step, self._slope(step, slope, place))

    def _slope(self, step: Step, g: str, place: int) -> str:
        """The slope of the part at a place, of two."""
        draft, mine, other = step.draft, self.parts[place], self.parts[1 - place]
        if self.kind == "MatMul":
            rest = other.value(step)
            turned = draft.transpose(rest, *range(len(other.shape) - 2), -1 % len(other.shape), len(other.shape) - 2)
            return draft.op("MatMul", *((g, turned) if place == 0 else (turned, g)))
        if self.kind == "Mul":
            g = draft.op("Mul", g, other.value(step))
        elif self.kind in BEYOND:
            g = of_extreme(draft, self.kind, g, mine.value(step), other.value(step))
        return shrunk(draft, g, self.shape, mine.shape)


_EACH = ("Add", "Mul", "Max", "Min")
_MADE: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Add": torch.add,
    "Mul": torch.mul,
    "MatMul": torch.matmul,
    "Max": torch.maximum,
    "Min": torch.minimum,
}
"""What torch makes of two."""


def of_two(kind: str, a: Weight, b: Weight) -> Weight:
    """Add, Mul, Max or Min of two tensors, of which either is stretched as torch does."""
    found = Combined(kind, (a, b))
    found.shape  # noqa: B018 - which asks torch
    return Weight(found)


def subtracted(a: Weight, b: Weight) -> Weight:
    """a - b."""
    return of_two("Add", a, b.bent(negated))


def divided(a: Weight, b: Weight) -> Weight:
    """a / b."""
    return of_two("Mul", a, b.bent(over(1.0)))


def product(a: Weight, b: Weight) -> Weight:
    """The product of two matrices, or of as many pairs of them."""
    if min(len(a.shape), len(b.shape)) < 2 or a.shape[:-2] != b.shape[:-2]:
        raise ValueError("programs multiply matrices, as many as many")
    return of_two("MatMul", a, b)


def outer(a: Weight, b: Weight) -> Weight:
    """Each value of a vector times each of another."""
    return of_two("Mul", a.turned("reshape", (-1, 1)), b)


def beside(parts: Sequence[Weight], dim: int = 0) -> Weight:
    """Tensors side by side."""
    found = Combined("Concat", tuple(parts), dim % len(parts[0].shape))
    found.shape  # noqa: B018 - which asks torch
    return Weight(found)


def stacked(parts: Sequence[Weight], dim: int = 0) -> Weight:
    """Tensors of one shape along a new dimension."""
    rank = 1 + len(parts[0].shape)
    shapes = [(*one.shape[: dim % rank], 1, *one.shape[dim % rank :]) for one in parts]
    return beside([one.turned("reshape", shape) for one, shape in zip(parts, shapes, strict=True)], dim % rank)
