"""One step of the training loop by itself, for benches that hold something beside it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.nn import Module

    from talaria.types import Recipe, Samples


def torch_step(
    module: Module, samples: Samples, recipe: Recipe, only: Collection[str] | None = None
) -> tuple[Module, Callable[[], None]]:
    """A step on all ``samples`` as a device takes it in :func:`talaria.training.loop.train`: frozen but for ``only``,
    by its optimizer and in its memory layout. The module that it trains is a copy, and comes first."""
    from talaria.model.cloning import clone
    from talaria.model.state import tensor_of
    from talaria.training import loop
    from talaria.training.sgd import SGD

    own = loop.in_fast_layout(clone(module))
    optimizer = SGD(loop.freeze_but(own, only), recipe)
    objective, x, y = loop.cross_entropy(recipe.smoothing), tensor_of(samples.x), tensor_of(samples.y)

    def step() -> None:
        optimizer.zero_grad()
        objective(own, x, y).backward()
        optimizer.step()

    return own, step
