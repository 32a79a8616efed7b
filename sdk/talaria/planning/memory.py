"""Bytes that a model holds while it runs and while it trains, exact for torch's own tensors.

The model runs on the ``meta`` device of torch where it can, where tensors have a shape but no values: nothing is
computed, and each allocation and release is seen. Scratch space inside kernels is not.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter, RNNBase
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from talaria import seeds
from talaria.model import tokens
from talaria.model.batch_norm import lone_sample_in_eval
from talaria.model.cloning import clone
from talaria.model.dependency_groups import TRACE_ERRORS


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside this context, ``live`` is what tensors made here hold, in bytes, and ``peak`` the most they held."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, Tensor):
                self._note(value)
        return out

    def know(self, values: Any) -> None:
        """Count what exists already."""
        for value in values:
            self._note(value)

    def _note(self, value: Tensor) -> None:
        storage = value.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes()
        self._known[key] = weakref.finalize(storage, self._gone, key, size)
        self.live += size
        self.peak = max(self.peak, self.live)

    def _gone(self, key: int, size: int) -> None:
        self._known.pop(key, None)
        self.live -= size


def running(model: Module, input_shape: tuple[int, ...], batch: int = 1) -> int:
    """Peak bytes of one inference: weights, input and the activations alive at once."""

    @torch.no_grad()
    def run(module: Module, x: Tensor) -> None:
        module.eval()(x)

    return _peak(model, input_shape, batch, run)


def training(model: Module, input_shape: tuple[int, ...], batch: int, *, momentum: bool = True) -> int:
    """Peak bytes of one SGD step on ``batch`` samples, for the parameters of ``model`` that need gradients and with
    its modules' present modes: weights, gradients, momentum, saved activations. BatchNorm stands still for a single
    sample, as where it trains."""

    def step(module: Module, x: Tensor) -> None:
        with lone_sample_in_eval(module, batch):
            out = module(x)
        rows = out.reshape(-1, out.shape[-1])
        y = torch.zeros(len(rows), dtype=torch.int64, device=x.device)
        F.cross_entropy(rows, y).backward()  # type: ignore[no-untyped-call]

    held = sum(p.nbytes for p in model.parameters() if p.requires_grad) if momentum else 0
    return _peak(model, input_shape, batch, step) + held


def train_only(model: Module, keys: Collection[str]) -> None:
    """Freeze all of ``model`` but the tensors ``keys``: no gradients elsewhere, and eval mode there."""
    wanted = set(keys)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in wanted)
    for prefix, layer in model.named_modules():
        own = [n for n, _ in (*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False))]
        layer.training = any((f"{prefix}.{n}" if prefix else n) in wanted for n in own)


def _peak(model: Module, input_shape: tuple[int, ...], batch: int, run: Callable[[Module, Tensor], None]) -> int:
    """What ``run`` of a copy of ``model`` and a batch holds at most. With values where it must be: recurrent layers
    have other kernels on ``meta``, and some networks look at values, or hold tensors that are not theirs to move."""
    if not any(isinstance(part, RNNBase) for part in model.modules()):
        empty: dict[int, Any] = {id(b): torch.empty_like(b, device="meta") for b in model.buffers()}
        empty |= {id(p): Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in model.parameters()}
        try:
            return _held(clone(model, empty), torch.empty(batch, *input_shape, device="meta"), run)
        except TRACE_ERRORS:
            pass
    with seeds.aside():
        return _held(clone(model), tokens.example(model, input_shape, batch), run)


def _held(module: Module, x: Tensor, run: Callable[[Module, Tensor], None]) -> int:
    ledger = Ledger()
    ledger.know([*module.parameters(), *module.buffers(), x])
    with ledger:
        run(module, x)
    return ledger.peak
