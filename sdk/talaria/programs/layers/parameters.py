"""Tensors that a model's own forward reads beside its layers: learned positions, a class token, scales, tables of
numbers. They are the same for each sample, until they meet a map or are laid out for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Conv1d, Conv2d, Embedding, Identity, Linear, Module, Parameter

from talaria.programs.graph import Draft, Size
from talaria.programs.layers.activation import Of, Slope
from talaria.programs.layers.base import Map, Pullback, Step, chained, key, no_way_back, refused
from talaria.programs.layers.broadcast import BEYOND, of_extreme, stretched
from talaria.programs.layers.rows import scattered
from talaria.programs.layers.sequence import closed, filled, opened, shaped, sizes


class Source(Protocol):
    """Where a tensor that is the same for each sample comes from."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """What its numbers are."""
        ...

    @property
    def trains(self) -> bool:
        """Whether a parameter that is trained is in it."""
        ...

    @property
    def layer(self) -> str | None:
        """The layer of which it is the weight or the bias, whose outputs a mask may take; None of all else."""
        ...

    def value(self, step: Step, labels: Sequence[Size] | None = None) -> str:
        """Its value; a mask is 1 or 0. ``labels`` are its sizes where a mask may narrow some."""
        ...

    def train(self, step: Step, slope: str) -> None:
        """Keep the gradients of what it is made of, given its slope."""
        ...


@dataclass(frozen=True)
class Stored:
    """A tensor of the model by its state-dict key: ``name`` of the module ``owner``, which is called ``place``. What is
    no parameter, and no float buffer of the state, stands in the file."""

    place: str
    name: str
    owner: Module

    @property
    def tensor(self) -> Tensor:
        """The tensor itself."""
        found: Tensor = getattr(self.owner, self.name)
        return found

    @property
    def shape(self) -> tuple[int, ...]:
        """See :class:`Source`."""
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        """See :class:`Source`."""
        return self.tensor.dtype

    @property
    def trains(self) -> bool:
        """Whether it is a parameter that is trained."""
        return self.tensor.requires_grad

    @property
    def layer(self) -> str | None:
        """See :class:`Source`."""
        return self.place if isinstance(self.owner, Linear | Conv1d | Conv2d) else None

    def value(self, step: Step, labels: Sequence[Size] | None = None) -> str:
        """An input of the program, or a constant."""
        whole = self.tensor
        kind = "float32" if whole.dtype == torch.bool else str(whole.dtype).removeprefix("torch.")
        if key("", self.name) not in self.owner.state_dict():
            return step.draft.constant(whole.detach().numpy(), kind)
        value = step.weight(self.place, self.name, whole, labels or whole.shape, kind)
        assert value is not None
        return value

    def train(self, step: Step, slope: str) -> None:
        """Keep its gradient."""
        step.trained(self.owner, self.place, self.name, lambda: slope)


@dataclass(frozen=True)
class Weight:
    """What comes of a ``source`` by ``turns``, which are what the forward pass did to it before it met a map: each a
    kind (``index``, ``reshape``, ``permute`` or ``expand``) and what Tensor's method takes, ``sum`` or ``mean`` with
    the dimensions and whether these are kept, ``rows`` and which these are, ``each`` and a function of its values."""

    source: Source
    turns: tuple[tuple[str, Any], ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes as they are read."""
        return self._shapes[-1]

    @property
    def dtype(self) -> torch.dtype:
        """What its numbers are."""
        return self.source.dtype

    @property
    def trains(self) -> bool:
        """Whether a parameter that is trained is in it."""
        return self.source.trains

    @property
    def is_mask(self) -> bool:
        """Whether it says where something is so."""
        return self.dtype == torch.bool

    @property
    def layer(self) -> str | None:
        """The layer of which it is the weight or the bias, value by value; None of all else."""
        return self.source.layer if all(shape == self.shape for shape in self._shapes) else None

    @property
    def now(self) -> Tensor | None:
        """The tensor as it is read and stands in the module; None where its values are not those of the module, or may
        be others later: a parameter that is frozen here learns elsewhere."""
        if not isinstance(self.source, Stored) or any(kind not in _MOVES for kind, _ in self.turns):
            return None
        if isinstance(self.source.tensor, Parameter):
            return None
        found = self.source.tensor.detach()
        for kind, how in self.turns:
            found = _turned(found, kind, how)
        return found

    def turned(self, kind: str, how: Any) -> Weight:
        """This one with one more turn. Raises what torch raises where the turn does not fit."""
        out = replace(self, turns=(*self.turns, (kind, how)))
        out.shape  # noqa: B018 - which asks torch
        return out

    def bent(self, of: Of, module: Module | None = None) -> Weight:
        """This one with what ``of`` makes of its values; ``module`` has the settings of a function that has some."""
        return self.turned("each", (of, module or Identity()))

    def value(self, step: Step, labels: Sequence[Size] | None = None) -> str:
        """The value that is read; a mask is 1 or 0. ``labels`` are its sizes where a mask may narrow some."""
        return self._values(step, labels)[-1]

    def _values(self, step: Step, labels: Sequence[Size] | None = None) -> list[str]:
        """The value before the first turn, and after each."""
        draft, value = step.draft, self.source.value(step, None if self.layer is None else labels)
        found = [value]
        for (turn, how), shape in zip(self.turns, self._shapes, strict=False):
            if turn == "each":
                value, _ = _bent(draft, value, how)
            elif turn == "permute":
                value = draft.transpose(value, *how)
            elif turn == "expand":
                value = draft.op("Expand", value, draft.ints(*how))
            elif turn == "rows":
                value = draft.op("Gather", value, draft.ints(*how.places), axis=0)
                value = draft.reshape(value, *how.shape, *shape[1:])
            elif turn in _TOTALS:
                axes, keep = how
                value = getattr(draft, turn)(value, *axes, keep=keep)
            else:
                for axis, start, stop in _pieces(how, shape) if turn == "index" else ():
                    ends = (draft.ints(n) for n in (start, stop, axis, 1))
                    value = draft.op("Slice", value, *ends)
                value = draft.reshape(value, *self._after(turn, how, shape))
            found.append(value)
        return found

    def train(self, step: Step, slope: str) -> None:
        """Keep the gradients of what it is made of, given the slope of what was read."""
        if not self.trains:
            return
        draft, g = step.draft, slope
        for (turn, how), shape, before in reversed([*zip(self.turns, self._shapes, self._values(step), strict=False)]):
            if turn == "each":
                g = _bent(draft, before, how)[1](g)
            elif turn == "permute":
                g = draft.transpose(g, *(list(how).index(i) for i in range(len(how))))
            elif turn == "expand":
                g = shrunk(draft, g, how, shape)
            elif turn == "rows":
                g = scattered(draft, draft.reshape(g, -1, *shape[1:]), how.places, draft.ints(*shape))
            elif turn in _TOTALS:
                g = _spread(draft, g, turn, how, before, shape)
            elif turn == "reshape":
                g = draft.reshape(g, *shape)
            else:
                g = _put_back(draft, g, how, shape)
        self.source.train(step, g)

    @property
    def _shapes(self) -> list[tuple[int, ...]]:
        """The sizes before the first turn, and after each."""
        found = [self.source.shape]
        for kind, how in self.turns:
            found.append(self._after(kind, how, found[-1]))
        return found

    def _after(self, kind: str, how: Any, shape: Sequence[int]) -> tuple[int, ...]:
        if kind == "each":
            return tuple(shape)
        return tuple(_turned(torch.empty(tuple(shape), device="meta"), kind, how).shape)


_MOVES, _TOTALS = ("index", "reshape", "permute", "expand", "rows"), ("sum", "mean")


def _turned(tensor: Tensor, kind: str, how: Any) -> Tensor:
    if kind in _TOTALS:
        total: Tensor = getattr(tensor, kind)(*how)
        return total
    if kind == "rows":
        return tensor[torch.tensor(how.places).view(how.shape)]
    moved: Tensor = tensor[how] if kind == "index" else getattr(tensor, kind)(how)
    return moved


def shrunk(draft: Draft, g: str, wide: Sequence[int], shape: Sequence[int]) -> str:
    """The slope of what was stretched from ``shape`` to ``wide``."""
    own = (1,) * (len(wide) - len(shape)) + tuple(shape)
    over = [axis for axis, (mine, size) in enumerate(zip(own, wide, strict=True)) if mine != size]
    g = draft.sum(g, *over, keep=True) if over else g
    return draft.reshape(g, *shape) if len(own) > len(shape) else g


def _spread(draft: Draft, g: str, kind: str, how: tuple[Sequence[int], bool], before: str, shape: Sequence[int]) -> str:
    """The slope of ``before`` of this ``shape``, which was added up or averaged."""
    axes, keep = how
    gone = [axis % len(shape) for axis in axes]
    g = g if keep else draft.reshape(g, *(1 if axis in gone else size for axis, size in enumerate(shape)))
    if kind == "mean":
        g = draft.op("Mul", g, draft.constant(1 / prod(shape[axis] for axis in gone)))
    return draft.op("Expand", g, draft.op("Shape", before))


def stored(place: str, name: str, owner: Module) -> Weight:
    """A tensor of the model as it is."""
    return Weight(Stored(place, name, owner))


def fixed(tensor: Tensor) -> Weight:
    """A tensor that no state has: it stands in the file."""
    owner = Module()
    owner.register_buffer("value", tensor.contiguous(), persistent=False)
    return stored("", "value", owner)


@dataclass(frozen=True)
class Places:
    """The whole numbers from ``start`` to before ``stop``, by which positions are looked up, of one sample or each."""

    start: int
    stop: int

    def rows(self, layer: str, table: Embedding) -> Weight:
        """What ``table``, which is called ``layer``, has there. Raises ModelError for a table with options."""
        if table.padding_idx is not None or table.max_norm or table.scale_grad_by_freq or table.sparse:
            raise refused(layer, "looks up positions in a table with options", "leave padding_idx and the others out")
        if not 0 <= self.start < self.stop <= table.num_embeddings:
            raise refused(layer, f"looks up {self} in {table.num_embeddings} rows", "make the table longer")
        return stored(layer, "weight", table).turned("index", slice(self.start, self.stop))


def _bent(draft: Draft, value: str, how: tuple[Of, Module]) -> tuple[str, Slope]:
    of, module = how
    return of(draft, value, module)


def _pieces(index: Any, shape: Sequence[int]) -> list[tuple[int, int, int]]:
    """(axis, start, stop) of what ``index`` takes of each dimension that it does not keep whole."""
    every = [one for one in (index if isinstance(index, tuple) else (index,)) if one is not None]
    if Ellipsis in every:
        at = every.index(Ellipsis)
        every[at : at + 1] = [slice(None)] * (len(shape) - len(every) + 1)
    found = []
    for axis, (one, size) in enumerate(zip(every, shape, strict=False)):
        places = range(size)[one] if isinstance(one, slice) else range(size)[one : one + 1 or None]
        if places.step != 1:
            raise ValueError("take neighbouring places")
        if len(places) != size:
            found.append((axis, places.start, places.stop))
    return found


def _put_back(draft: Draft, g: str, index: Any, shape: Sequence[int]) -> str:
    """The slope of a whole tensor, given that of what ``index`` took of it."""
    low, high, held = [0] * len(shape), [0] * len(shape), list(shape)
    for axis, start, stop in _pieces(index, shape):
        low[axis], high[axis], held[axis] = start, shape[axis] - stop, stop - start
    g = draft.reshape(g, *held)
    return draft.op("Pad", g, draft.ints(*low, *high), draft.constant(0.0)) if any(low) or any(high) else g


def beside_weight(step: Step, layer: str, kind: str, a: Any, b: Any) -> tuple[Map, Pullback]:
    """:func:`joined`, of which either is the map."""
    x, weight = (b, a) if isinstance(a, Weight) else (a, b)
    if not isinstance(x, Map):
        raise refused(layer, "reckons with parameters alone", "let each meet a map")
    return joined(step, layer, kind, x, weight)


def joined(step: Step, layer: str, kind: str, x: Map, weight: Weight) -> tuple[Map, Pullback]:
    """x plus, times, or to the power of what is the same for each sample (``kind`` Add, Mul or Pow), or the larger or
    smaller one of the two (Max or Min); the map's sizes of 1 are stretched to it."""
    wider = _stretch(step, x, weight)
    if wider is not None:
        x, stretch = stretched(step, layer, x, wider)
        y, way = joined(step, layer, kind, x, weight)
        return y, chained(stretch, way)
    draft, shape, wide = step.draft, weight.shape, [step.known(one) for one in sizes(x)]
    does = {"Add": "adds", "Mul": "multiplies", "Pow": "takes the power of"}
    require_met(layer, weight, wide, does.get(kind, "compares"))
    rows = not x.space and not x.single and shape[-1:] == (wide[-1],) and prod(shape[:-1]) == 1  # as they stand
    if rows and len(shape) > 1:
        weight, shape = weight.turned("reshape", (-1,)), shape[-1:]
    value = weight.value(step, sizes(x)[-len(shape) :] if weight.layer else None)
    whole = x.value if rows else opened(step, x.value, x)
    made = draft.op(kind, whole, value)

    def of_map(slope: str) -> str:
        if kind in BEYOND:
            return of_extreme(draft, kind, slope, whole, value)
        if kind == "Mul":
            return draft.op("Mul", slope, value)
        less = draft.op("Pow", whole, draft.op("Sub", value, draft.constant(1.0)))
        return draft.op("Mul", slope, draft.op("Mul", less, value))

    def of_weight(slope: str) -> str:
        if kind in BEYOND:
            return of_extreme(draft, kind, slope, value, whole)
        if kind != "Pow":
            return slope if kind == "Add" else draft.op("Mul", slope, whole)
        above = draft.op("Greater", whole, draft.constant(0.0))
        steep = draft.op("Where", above, draft.op("Mul", made, draft.op("Log", whole)), draft.constant(0.0))
        return draft.op("Mul", slope, steep)

    def back(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        slope = g if rows else opened(step, g, x)
        met = of_weight(slope)
        weight.train(step, step.summed(met, x.lead) if rows else each(step, met, shape, len(wide)))
        if kind == "Add" or not wanted[0]:
            return [g]
        return [of_map(slope) if rows else closed(step, of_map(slope), x)]

    return x.like(made) if rows else filled(step, made, x), no_way_back if step.looks else back


def _stretch(step: Step, x: Map, weight: Weight) -> list[Size] | None:
    """The sizes that a map has behind the batch beside a tensor that is wider somewhere; None where it is not."""
    own = sizes(x)
    behind = weight.shape[-len(own) :] if own else ()
    whole: list[Size] = [*own]
    for place, size in enumerate(behind, len(own) - len(behind)):
        whole[place] = size if step.known(own[place]) == 1 else own[place]
    return None if tuple(whole) == own else whole


def require_met(layer: str, weight: Weight, wide: Sequence[int], does: str) -> None:
    """Refuse a tensor that is not stretched to the sizes ``wide`` behind the batch."""
    shape = weight.shape
    behind = shape[1:] if len(shape) == 1 + len(wide) and shape[0] == 1 else shape
    if any(b not in (1, w) for b, w in zip(behind[::-1], wide[::-1], strict=False)) or len(behind) > len(wide):
        raise refused(layer, f"{does} a tensor of {shape} to maps of {list(wide)}", "give it the map's sizes")


def each(step: Step, slope: str, shape: Sequence[int], rank: int) -> str:
    """The sum of a slope (batch, ...) over all that a tensor of this shape was stretched to."""
    draft, own = step.draft, (1,) * (1 + rank - len(shape)) + tuple(shape)
    over = [i for i, size in enumerate(own) if size == 1]
    if over == [0]:
        flat = draft.op("Flatten", slope, axis=1) if rank else draft.reshape(slope, -1, 1)
        return draft.reshape(draft.op("MatMul", step.ones(), flat), *shape)
    return draft.reshape(draft.sum(slope, *over, keep=True), *shape)


def for_each(step: Step, layer: str, weight: Weight, behind: Sequence[int]) -> tuple[Map, Pullback]:
    """What is the same for each sample, once for each: a class token. ``behind`` are the sizes behind the batch."""
    shape = weight.shape[1:] if len(weight.shape) == 1 + len(behind) else weight.shape
    first = weight.shape[0] if len(weight.shape) > len(behind) else 1
    fits = all(b in (1, w) for b, w in zip(shape[::-1], behind[::-1], strict=False))
    if first != 1 or len(shape) > len(behind) or not fits or not behind:
        raise refused(layer, f"lays {weight.shape} out as {tuple(behind)} for each sample", "give it a first size of 1")
    draft = step.draft
    whole = draft.op("Concat", step.batch, draft.ints(*behind), axis=0)
    out = shaped(step, layer, list(behind))
    y = filled(step, draft.op("Expand", weight.value(step), whole), out)

    def back(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        weight.train(step, each(step, opened(step, g, out), weight.shape, len(behind)))
        return []

    return y, no_way_back if step.looks else back
