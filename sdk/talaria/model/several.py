""":class:`Several`: a network of several named inputs as one that reads them side by side in one array."""

from __future__ import annotations

import inspect
import math
from typing import Any

from torch import Tensor
from torch.nn import Module

from talaria import inputs
from talaria.errors import DataError, ModelError
from talaria.foreign import shown
from talaria.inputs import Parts


class Several(Module):
    """``module`` is called with its inputs by name, each of the shape given here without N.

    >>> import torch
    >>> from torch import nn
    >>> class Two(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.head = nn.Linear(5, 3)
    ...     def forward(self, walk, mask):
    ...         return self.head(walk.flatten(1)[:, :5] * mask)
    >>> model = Several(Two(), walk=(2, 3), mask=(5,))
    >>> model.numbers, tuple(model(torch.zeros(4, model.numbers)).shape)
    (11, (4, 3))
    """

    def __init__(self, module: Module, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        if not isinstance(module, Module):
            raise ModelError(f"Several: {shown(module)} must be a torch module")
        try:
            self.parts = inputs.parts_of(shapes)
        except DataError as error:
            raise ModelError(f"Several: {error}") from None
        needed, taken = _arguments(module)
        odd = sorted((needed - set(shapes)) | (set(shapes) - taken if taken is not None else set()))
        if odd:
            takes = ", ".join(sorted(needed if taken is None else taken)) or "none"
            raise ModelError(
                f"Several: the module's forward takes {takes}, and the inputs named are {', '.join(sorted(shapes))}; "
                f"name them alike ({', '.join(odd)} differ)"
            )
        self.module = module

    @property
    def numbers(self) -> int:
        """How many numbers a sample has in all: the model's ``input_shape`` is this one size."""
        return inputs.size_of(self.parts)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` (N, numbers), the inputs in the order of their names."""
        given, at = {}, 0
        for name, shape in self.parts.items():
            size = math.prod(shape)
            given[name] = x[:, at : at + size].reshape(-1, *shape)
            at += size
        answer: Tensor = self.module(**given)
        return answer


def require_one(module: Module, what: str) -> None:
    """Raise :class:`ModelError` where ``module`` needs more than one input."""
    needed, _ = _arguments(module)
    if len(needed) > 1:
        shapes = ", ".join(f"{name}=(...)" for name in sorted(needed))
        raise ModelError(
            f"{what}: its forward takes {', '.join(sorted(needed))}; a model reads one array, so give it as "
            f"talaria.model.several.Several(module, {shapes}) with the shape of each, and the samples as x_NAME"
        )


def require_fits(module: Module, shape: tuple[int, ...], parts: Parts | None) -> None:
    """Raise :class:`DataError` where samples of named ``parts`` (None: of one input), or of this ``shape``, are not
    what ``module`` reads."""
    own = module.parts if isinstance(module, Several) else None
    if own is None and parts is not None:
        raise DataError(f"data: the samples have the inputs {inputs.told(parts)}, and the model reads one array; "
                        "give it as talaria.model.several.Several(module, NAME=shape, ...)")  # fmt: skip
    if own is None:
        return
    inputs.require_alike("data: the samples", parts, own, shape)
    if shape != (inputs.size_of(own),):
        raise DataError(
            f"data: samples have shape {shape}, and the model takes {inputs.told(own)}, {inputs.size_of(own)} numbers "
            "side by side; give x_NAME for each input"
        )


def _arguments(module: Module) -> tuple[set[str], set[str] | None]:
    """The arguments that a module's forward needs, and all it takes; None for any."""
    try:
        known: list[Any] = list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):
        return set(), None
    plain = [one for one in known if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    free = any(one.kind is one.VAR_KEYWORD for one in known)
    return {one.name for one in plain if one.default is one.empty}, None if free else {one.name for one in plain}
