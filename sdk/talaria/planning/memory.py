"""Bytes that a model holds while it runs and while it trains, exact for torch's own tensors.

The model runs on torch's ``meta`` device, where tensors have a shape but no values: nothing is computed, and each
allocation and release is seen. Scratch space inside kernels is not.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from talaria.model.cloning import clone


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
    module = clone(model).to("meta").requires_grad_(False).eval()

    def run() -> None:
        with torch.no_grad():
            module(torch.empty(batch, *input_shape, device="meta"))

    return _peak(module, run)


def training(model: Module, input_shape: tuple[int, ...], batch: int, *, momentum: bool = True) -> int:
    """Peak bytes of one SGD step on ``batch`` samples, for the parameters of ``model`` that need gradients and with
    its modules' present modes: weights, gradients, momentum, saved activations."""
    needs = [p.requires_grad for p in model.parameters()]
    modes = [m.training for m in model.modules()]
    module = clone(model).to("meta")
    for parameter, need in zip(module.parameters(), needs, strict=True):
        parameter.requires_grad_(need)
    for part, mode in zip(module.modules(), modes, strict=True):
        part.training = mode
    trained = [p for p in module.parameters() if p.requires_grad]
    held = [torch.empty_like(p) for p in trained] if momentum else []

    def step() -> None:
        x = torch.empty(batch, *input_shape, device="meta")
        y = torch.empty(batch, dtype=torch.int64, device="meta")
        F.cross_entropy(module(x), y).backward()  # type: ignore[no-untyped-call]

    peak = _peak(module, step)
    return peak + sum(t.nbytes for t in held)


def train_only(model: Module, keys: Collection[str]) -> None:
    """Freeze all of ``model`` but the tensors ``keys``: no gradients elsewhere, and eval mode there."""
    wanted = set(keys)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in wanted)
    for prefix, layer in model.named_modules():
        own = [n for n, _ in (*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False))]
        layer.training = any((f"{prefix}.{n}" if prefix else n) in wanted for n in own)


def _peak(module: Module, run: Callable[[], None]) -> int:
    ledger = Ledger()
    ledger.know([*module.parameters(), *module.buffers()])
    with ledger:
        run()
    return ledger.peak
