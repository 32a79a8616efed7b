"""The weights of layers that weigh several times, attention and recurrent ones, with what adapters add to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch.nn import Module

from talaria.model.inside import Inside, base_of, matrices
from talaria.programs.graph import Size
from talaria.programs.layers.base import Step, key


@dataclass
class Matrices:
    """The parameters of the layer ``module``, named ``layer``, as its rule reads and trains them."""

    step: Step
    layer: str
    module: Module
    _factors: dict[str, tuple[str, str, str]] = field(default_factory=dict)
    """By parameter: the layer of its factors, and the values of these, up and down."""

    def value(self, name: str, shape: Sequence[Size]) -> str | None:
        """A parameter of the layer, plus the product of its factors where an adapter has some; None where there is
        none."""
        base, place = base_of(self.module), self.place
        tensor = dict(base.named_parameters()).get(name)
        value = self.step.weight(place, name, tensor, shape)
        if value is None or not isinstance(self.module, Inside):
            return value
        factors = next((short for short, whole in matrices(base).items() if whole == name), None)
        if factors is None:
            return value
        held = f"{self.layer}.adapter.{factors}"
        up, down = (self.module.adapter.get_submodule(f"{factors}.{part}") for part in ("up", "down"))
        rank = up.get_parameter("weight").shape[1]
        wide = self.step.weight(f"{held}.up", "weight", up.get_parameter("weight"), (shape[0], rank))
        flat = self.step.weight(f"{held}.down", "weight", down.get_parameter("weight"), (rank, shape[1]))
        assert wide is not None
        assert flat is not None
        self._factors[name] = held, wide, flat
        return self.step.draft.op("Gemm", wide, flat, value)

    def trained(self, name: str, gradient: Callable[[], str]) -> None:
        """Keep the gradient of what :meth:`value` gave: the parameter's own, and those of its factors."""
        owner, _, leaf = name.rpartition(".")
        base, draft = base_of(self.module), self.step.draft
        self.step.trained(base.get_submodule(owner), key(self.place, owner) if owner else self.place, leaf, gradient)
        if name not in self._factors:
            return
        held, up, down = self._factors[name]
        factors = self.module.get_submodule(held.removeprefix(f"{self.layer}."))
        for part, product in (
            ("up", lambda: draft.product(gradient(), down, rank=2, turn_b=True)),
            ("down", lambda: draft.product(up, gradient(), rank=2, turn_a=True)),
        ):
            self.step.trained(factors.get_submodule(part), f"{held}.{part}", "weight", product)

    @property
    def place(self) -> str:
        """The name of the layer itself, whatever adapters stand around it."""
        return key(self.layer, "base") if isinstance(self.module, Inside) else self.layer
