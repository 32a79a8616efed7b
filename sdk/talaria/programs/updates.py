"""The end of a step: SGD with momentum as Sutskever et al. (2013) write it, and statistics that follow.

``v' = momentum v - lr g``, ``w' = w + v'``, which is torch.optim.SGD's as long as the rate stays. The rate and the sign
are in the slopes from the loss on, where they meet a number for each class of a batch, and not each weight.

A small network's step is mostly the cost of its operators, so vectors (biases, scales) are updated side by side as one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from talaria.programs.graph import FLOAT, Draft, Port
from talaria.programs.layers.base import Step
from talaria.types import Recipe

TOGETHER = 48
"""Vectors that are updated as one, at most: their sizes are followed by value (:mod:`talaria.programs.shapes`)."""


def updates(step: Step, recipe: Recipe, pulled: bool) -> list[tuple[Port, str]]:
    """The new weights, momenta and buffers under the names of their outputs."""
    draft = step.draft
    sgd = _Sgd(draft, {port.name: port for port in draft.inputs}, recipe, pulled)
    vectors = [key for key in step.gradients if len(sgd.weight(key).shape) == 1]
    groups = [vectors[i : i + TOGETHER] for i in range(0, len(vectors), TOGETHER)]
    joined = {key: group for group in groups if sgd.saved(group) > 0 for key in group}
    out, done = list[tuple[Port, str]](), set[str]()
    for key, gradient in step.gradients.items():
        if key not in joined:
            out += sgd.one(key, gradient)
        elif key not in done:
            out += sgd.together(joined[key], step.gradients)
            done.update(joined[key])
    for key, value in step.buffers.items():
        port = sgd.weight(key)
        out.append((Port(f"next/weight/{key}", port.dtype, port.shape), value))
    return out


@dataclass(frozen=True)
class _Sgd:
    draft: Draft
    ports: Mapping[str, Port]
    recipe: Recipe
    pulled: bool

    def weight(self, key: str) -> Port:
        return self.ports[f"weight/{key}"]

    def one(self, key: str, gradient: str) -> list[tuple[Port, str]]:
        """The update of one tensor."""
        weight = self.weight(key)
        momentum = self._momentum(key) if self.recipe.momentum else None
        anchor = self._anchor(key) if self.pulled else None
        slope, moved = self._moved(weight.name, gradient, momentum, anchor, len(weight.shape))
        found = [(Port(f"next/momentum/{key}", FLOAT, weight.shape), slope)] if momentum else []
        return [*found, (Port(f"next/weight/{key}", FLOAT, weight.shape), moved)]

    def together(self, keys: Sequence[str], gradients: Mapping[str, str]) -> list[tuple[Port, str]]:
        """That of several vectors: the same numbers, as each is updated value by value."""
        draft, weights = self.draft, [self.weight(key) for key in keys]

        def side_by_side(values: Sequence[str]) -> str:
            return draft.op("Concat", *values, axis=0)

        momentum = side_by_side([self._momentum(key) for key in keys]) if self.recipe.momentum else None
        anchor = side_by_side([self._anchor(key) for key in keys]) if self.pulled else None
        gradient = side_by_side([gradients[key] for key in keys])
        slope, moved = self._moved(side_by_side([port.name for port in weights]), gradient, momentum, anchor, 1)
        sizes = self._sizes(weights)
        found = list[tuple[Port, str]]()
        for kind, value in (("momentum", slope), ("weight", moved)):
            if kind == "weight" or momentum:
                parts = draft.several("Split", len(keys), value, sizes, axis=0)
                named = [Port(f"next/{kind}/{key}", FLOAT, port.shape) for key, port in zip(keys, weights, strict=True)]
                found += zip(named, parts, strict=True)
        return found

    def saved(self, keys: Sequence[str]) -> int:
        """How many operators fewer :meth:`together` has than :meth:`one` for each key, at least where each has some."""
        more = 2 * bool(self.recipe.momentum) + 2 * bool(self.recipe.weight_decay) + 3 * self.pulled
        each = more + 1 if more else 0  # a bias that only its gradient moves is mostly a part of that product
        about = {size for key in keys for size in self.weight(key).shape if isinstance(size, str)}
        kinds = 3 + 2 * bool(self.recipe.momentum) + self.pulled
        return each * (len(keys) - 1) - kinds - (len(about) + 1 if about else 0)

    def _moved(
        self, weight: str, gradient: str, momentum: str | None, anchor: str | None, rank: int
    ) -> tuple[str, str]:
        """What is added to the weight, and the weight after it, of what ``gradient`` adds."""
        draft, move = self.draft, gradient
        if anchor:
            strength = draft.number(draft.op("Mul", "pull", "lr"), rank)
            move = draft.op("Add", move, draft.op("Mul", draft.op("Sub", anchor, weight), strength))
        if self.recipe.weight_decay:
            decay = draft.number(draft.op("Mul", "lr", draft.constant(self.recipe.weight_decay)), rank)
            move = draft.op("Sub", move, draft.op("Mul", weight, decay))
        if momentum:
            move = draft.grown(move, momentum, self.recipe.momentum, rank)
            return move, draft.op("Add", weight, move)
        return move, draft.grown(move, weight, 1.0, rank)

    def _sizes(self, weights: Sequence[Port]) -> str:
        """The sizes of vectors, of which each call decides some."""
        draft = self.draft
        known = [port.shape[0] for port in weights]
        numbers = [size for size in known if isinstance(size, int)]
        if len(numbers) == len(known):
            return draft.ints(*numbers)
        by_label = dict(zip(reversed(known), reversed(weights), strict=True))  # equal sizes are read once, of the first
        read = [
            draft.ints(size) if isinstance(size, int) else draft.op("Shape", by_label[size].name, start=0, end=1)
            for size in known
        ]
        return draft.op("Concat", *read, axis=0)

    def _momentum(self, key: str) -> str:
        return self.draft.input(f"momentum/{key}", self.weight(key).shape)

    def _anchor(self, key: str) -> str:
        return self.draft.input(f"anchor/{key}", self.weight(key).shape)
