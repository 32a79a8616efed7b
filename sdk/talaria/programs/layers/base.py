"""What a layer's rule is given, and what it gives back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

from torch import Tensor
from torch.nn import Module

from talaria.errors import ModelError
from talaria.programs.graph import Draft, Size, size_of


@dataclass(frozen=True)
class Affine:
    """What a normalized map is still to be multiplied with and added, (channels,) each: the parameters ``weight`` and
    ``bias`` of a layer."""

    layer: str
    module: Module
    scale: str | None
    shift: str | None


@dataclass(frozen=True)
class Map:
    """What flows between layers: (channels, batch, *space), where the step only looks (batch, channels, *space);
    without ``space`` rows of channels, (batch x lead, channels).

    ``channels`` is a number, or the name of a width that a mask may narrow. ``lead`` are the sizes between the batch
    and channels that come last. With ``affine`` the rows have a mean of zero, whoever reads them takes its scale and
    shift in (:mod:`talaria.programs.layers.weighing`), and gives slopes without a mean.
    """

    value: str
    channels: Size
    space: tuple[int, ...] = ()
    lead: tuple[int, ...] = ()
    affine: Affine | None = None
    single: bool = False
    """Whether torch has no dimension behind the batch: one number of each sample, which stands as one channel."""

    def like(self, value: str) -> Map:
        """Another map of the same sizes."""
        return Map(value, self.channels, self.space, self.lead, single=self.single)

    @property
    def axes(self) -> tuple[int, ...]:
        """The dimensions over which a channel's statistics go."""
        return tuple(range(1, 2 + len(self.space))) if self.space else (0,)


Whole = Callable[[], frozenset[str]]
"""Gives the layers of which no mask takes an output; asked only where a width stands in the way."""
Pullback = Callable[[str, Sequence[bool]], Sequence[str | None]]
"""``(gradient of the output, which inputs want theirs) -> their gradients``, None where not wanted; gradients of the
layer's own parameters are given to :meth:`Step.trained`."""
Rule = Callable[["Step", str, Module, Sequence[Map]], tuple[Map, Pullback]]


class Computed(Protocol):
    """A layer's parameter that is computed from others."""

    def value(self, step: Step, shape: Sequence[Size]) -> str:
        """The parameter, of this ``shape``."""

    def train(self, step: Step, gradient: Callable[[], str]) -> None:
        """Keep the gradients of what it is computed from, given its own."""


@dataclass
class Step:
    """The training step that is being written: its draft, its parameters, and what has become of them."""

    draft: Draft
    head: str
    """The layer whose width no mask narrows."""
    gradients: dict[str, str] = field(default_factory=dict)
    computed: dict[str, Computed] = field(default_factory=dict)
    """By state-dict key, where that would have the parameter, the ones that are no inputs of the program."""
    buffers: dict[str, str] = field(default_factory=dict)
    """New values of buffers that follow training."""
    looks: bool = False
    """Whether there is no way back: maps are (batch, channels, *space) then, and convolutions ONNX Runtime's own."""
    widths: dict[str, int] = field(default_factory=dict)
    """The unpruned sizes of the names in shapes."""
    rate: str | None = None
    """By which statistics move; None: each layer's own momentum."""
    folds: bool = False
    """Whether all that read the layer being written take its scale and shift in."""
    twice: bool = False
    """Whether the graph is differentiated once more: every operator has a rule in :mod:`talaria.programs.tangent`."""
    whole: Whole = frozenset
    second: bool = False
    """Whether torch has the batch second in what the layer being written gives."""
    merged: int = 1
    """How many of each sample stand one by one in the batch of the layer being written, as x.flatten(0, 1) has them."""
    again: frozenset[str] = frozenset()
    """Layers that the pass calls several times."""
    tapped: frozenset[str] = frozenset()
    """Layers of which all that they give is looked at, whatever of it the network reads."""

    def weight(
        self, layer: str, name: str, tensor: Tensor | None, shape: Sequence[Size], dtype: str = "float32"
    ) -> str | None:
        """The value of a layer's parameter or buffer, an input of the program; None where the layer has none."""
        if tensor is None:
            return None
        if key(layer, name) in self.computed:
            return self.computed[key(layer, name)].value(self, shape)
        if layer in shape and (layer == "N" or layer.startswith("#") or {*"*+"} & {*layer}):
            what = "is called as sizes are: N is the batch's, #4 a number's, and * and + reckon with them"
            raise refused(layer, what, "name it otherwise")
        port = f"weight/{key(layer, name)}"
        self.widths |= {label: n for label, n in zip(shape, tensor.shape, strict=True) if isinstance(label, str)}
        return port if self.draft.has(port) else self.draft.input(port, shape, dtype)

    def trained(self, module: Module, layer: str, name: str, gradient: Callable[[], str]) -> None:
        """Keep the gradient of a parameter, if it is trained; a layer that is used twice gives two, which add up."""
        if key(layer, name) in self.computed:
            self.computed[key(layer, name)].train(self, gradient)
            return
        parameter = getattr(module, name)
        if parameter is None or not parameter.requires_grad:
            return
        made, place = gradient(), key(layer, name)
        self.gradients[place] = self.draft.op("Add", self.gradients[place], made) if place in self.gradients else made

    def known(self, size: Size) -> int:
        """A size as a number; that of the unpruned model where a mask may narrow it."""
        try:
            return size_of(size, self.widths)
        except KeyError:
            raise ModelError(
                f"program: the width {size!r} is turned before any layer weighs it; train this model with torch"
            ) from None

    def held(self, size: Size) -> Size:
        """A size, as a number where no mask narrows it."""
        if isinstance(size, int):
            return size
        names = (one.rpartition("*")[0] or one for one in size.split("+") if not one.startswith("#"))
        if not self.whole().issuperset(names):
            return size
        return self.known(size)

    def extent(self, size: Size) -> str:
        """A size as each call has it, int64 (1,)."""
        draft = self.draft
        if isinstance(size, int) or size.startswith("#"):
            return draft.ints(self.known(size))
        if "+" in size:
            first, _, rest = size.partition("+")
            return draft.op("Add", self.extent(first), self.extent(rest))
        name, axis = next((port.name, port.shape.index(size)) for port in draft.inputs if size in port.shape)
        return draft.op("Shape", name, start=axis, end=axis + 1)

    def drawn(self, place: str, shape: Sequence[Size], *, second: bool = False) -> str:
        """What the values at a ``place`` of a layer are multiplied with, (batch, *shape): 0 where one falls away,
        1/(1-p) elsewhere. It is an input of the program, with the batch ``second`` where torch draws so. Each call of a
        layer has one of its own, in the order of the calls."""
        port, number = f"draw/{place}", 1
        while self.draft.has(port):
            number += 1
            port = f"draw/{place}#{number}"
        draft, batch = self.draft, ("N",) if self.merged == 1 else ("N", self.merged)
        first, rest = (shape[:1], shape[1:]) if second else ((), shape)
        draw = draft.input(port, (*first, *batch, *rest))
        if self.merged > 1:
            at, end = len(first), len(first) + 2 + len(rest)
            before = [draft.op("Shape", draw, start=0, end=at)] if first else []
            behind = [draft.op("Shape", draw, start=at + 2, end=end)] if rest else []
            whole = [*before, draft.ints(-1), *behind]
            draw = draft.op("Reshape", draw, draft.op("Concat", *whole, axis=0) if whole[1:] else whole[0])
        return draft.transpose(draw, 1, 0, *range(2, 2 + len(rest))) if second else draw

    @property
    def batch(self) -> str:
        """The batch's size, int64 (1,)."""
        samples = self._asked()
        return samples if self.merged == 1 else self.draft.op("Mul", samples, self.draft.ints(self.merged))

    def _asked(self) -> str:
        """How many samples there are, int64 (1,)."""
        return self.draft.op("Shape", "x", start=0, end=1)

    @property
    def samples(self) -> str:
        """The batch's size, float32 (1,)."""
        return self.draft.op("Cast", self.batch, to=1)

    @property
    def several(self) -> str:
        """Whether there is more than one sample: BatchNorm stands still otherwise."""
        number = self.draft.op("Reshape", self.draft.op("Cast", self._asked(), to=1), self.draft.ints())
        return self.draft.op("Greater", number, self.draft.constant(1.0))

    def ones(self, *lead: int) -> str:
        """(batch x lead,) of ones: a product with them adds up rows. ONNX Runtime's ReduceSum takes 16.8 us for 16 x
        1024, this 1.4; for 512 x 64 5.0 and 1.7."""
        draft, many = self.draft, self.batch
        if not lead:
            return draft.op("Expand", draft.constant(1.0), many)
        shape = draft.op("Concat", many, draft.ints(prod(lead)), axis=0)
        return draft.reshape(draft.op("Expand", draft.constant(1.0), shape), -1)

    def summed(self, rows: str, lead: Sequence[int]) -> str:
        """The sum over rows: (batch x lead, channels) as (channels,)."""
        if not lead:
            ones = self.draft.op("Expand", self.draft.constant([[1.0]]), self.batch)
            return self.draft.reshape(self.draft.row(ones, rows), -1)
        return self.draft.op("MatMul", self.ones(*lead), rows)

    def entries(self, at: Map) -> str:
        """How many values each channel of a map has, float32 (1,)."""
        return self.draft.op("Mul", self.samples, self.draft.constant(float(prod(at.space))))


def key(layer: str, name: str) -> str:
    """The state-dict key of a layer's tensor."""
    return f"{layer}.{name}" if layer else name


def refused(layer: str, what: str, mend: str) -> ModelError:
    """The error for a layer that no program can hold."""
    return ModelError(f"program: layer {layer!r} {what}; {mend}, or train this model with torch")


def listed(given: Sequence[Any]) -> list[Any]:
    """Sizes, or dimensions, that a call is given one by one or together."""
    return list(given[0]) if len(given) == 1 and isinstance(given[0], tuple | list) else list(given)


def no_way_back(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
    """The pullback of a layer in a graph that only looks."""
    raise ModelError("program: a graph that only looks has no gradients; make a step")


def chained(*ways: Pullback) -> Pullback:
    """The way back through rules that read one map each, of which the first is the first here too."""

    def back(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        for way in reversed(ways[1:]):
            (found,) = way(g, [True])
            assert found is not None
            g = found
        return ways[0](g, wanted)

    return back


def no_dilation(layer: str, module: Module) -> None:
    """Refuse windows with holes."""
    dilation = getattr(module, "dilation", 1)
    if any(d != 1 for d in (dilation if isinstance(dilation, tuple) else (dilation,))):
        raise refused(layer, f"has dilation={dilation}", "use a larger kernel without it")


def spread(value: int | Sequence[int], rank: int) -> tuple[int, ...]:
    """One number for each dimension of space."""
    return (value,) * rank if isinstance(value, int) else tuple(value)
