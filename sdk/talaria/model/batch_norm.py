"""BatchNorm layers: which of them keep statistics, how these are estimated anew, and a batch of a single sample."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator
from contextlib import contextmanager

import torch
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm


def tracked(module: Module, still: Container[str] = ()) -> dict[str, _BatchNorm]:
    """The layers that keep running statistics, by name, but for those whose statistics are among the keys ``still``."""
    norms = {name: one for name, one in module.named_modules() if isinstance(one, _BatchNorm)}
    return {n: one for n, one in norms.items() if one.track_running_stats and f"{n}.running_mean" not in still}


@contextmanager
def estimated_anew(layers: Collection[_BatchNorm]) -> Iterator[None]:
    """The statistics of ``layers`` become the mean over the passes made within, without gradients; then they are in
    eval mode."""
    momenta = [layer.momentum for layer in layers]
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # a cumulative mean
        layer.train()
    with torch.no_grad():
        yield
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum
        layer.eval()


class lone_sample_in_eval:  # noqa: N801 - reads as a statement: with lone_sample_in_eval(...)
    """BatchNorm layers in eval while a batch holds a single sample."""

    def __init__(self, module: Module, count: int) -> None:
        every = module.modules() if count == 1 else ()
        self.layers = [m for m in every if isinstance(m, _BatchNorm) and m.training]

    def __enter__(self) -> None:
        for layer in self.layers:
            layer.eval()

    def __exit__(self, *_: object) -> None:
        for layer in self.layers:
            layer.train()
