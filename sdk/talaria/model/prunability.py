"""What can be pruned in a network: worked out once per architecture, and exact by test.

A candidate layout is believed only after a compact copy has computed the same as its masked dense twin, with random
weights in float64. Softmax over channels, a norm across channels, a fixed reshape: what the tracing did not
understand shows here and is left out, by name.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor
from torch.nn import Module

from talaria import seeds
from talaria.errors import ModelError
from talaria.model import tokens
from talaria.model.attention import MasksAsWide
from talaria.model.cloning import clone
from talaria.model.compaction import compact
from talaria.model.dependency_groups import TRACE_ERRORS, Coupling, draft, trace
from talaria.model.masks import ChannelLayout, ChannelMask, apply_dense
from talaria.model.state import fill, state_of

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Largest relative difference between a compact model and its masked dense twin."""


@dataclass(frozen=True)
class Survey:
    """What can be pruned in a model, and what cannot and why (layer or group name -> reason)."""

    layout: ChannelLayout
    refused: Mapping[str, str]


def layout(model: Module, example: Tensor) -> ChannelLayout:
    """The channel groups of ``model`` for inputs like ``example`` (batch, ...), float32; see :func:`survey`."""
    return survey(model, example).layout


def survey(model: Module, example: Tensor) -> Survey:
    """The layout of all channels that can be taken out exactly, and the reasons for the rest.

    The model's input and output are never pruned. A model that cannot be traced at all gives an empty layout: it
    still trains and travels, unpruned. A branch of ``forward`` that compares two shapes, or looks at values, may go the
    other way in a smaller network; that is not seen here. ``model`` keeps its weights, gradients and train mode.
    """
    try:
        with seeds.ALONE, warnings.catch_warnings():  # whose filters are one list for all threads
            # Of a recurrent network's long chain torch-pruning says that it looks no further; what it finds is checked.
            warnings.filterwarnings("ignore", "Maximum recursive depth reached", UserWarning)
            coupling = trace(model, example)
    except TRACE_ERRORS as error:
        return Survey(ChannelLayout({}, {}), {type(model).__name__: f"cannot be traced: {error}"})
    with torch.no_grad(), MasksAsWide():
        return _checked(model, coupling, example)


def _checked(model: Module, coupling: Coupling, example: Tensor) -> Survey:
    """The draft without the groups that do not compute the same when they are cut out."""
    twin, example = _shaken(model, example)
    out: dict[str, str] = {}
    while True:
        found = draft(model, coupling, without=out)
        refused = {**found.refused, **out}
        wrong = _wrong(twin, found.layout, list(found.layout.sizes), example)
        if not found.layout.sizes or wrong is None:
            return Survey(found.layout, refused)
        alone = {}
        for group in found.layout.sizes:
            reason = _wrong(twin, found.layout, [group], example)
            if reason is not None:
                alone[group] = reason
        out.update(alone or dict.fromkeys(found.layout.sizes, f"only together: {wrong}"))


def _wrong(twin: Module, layout: ChannelLayout, groups: list[str], example: Tensor) -> str | None:
    """What is wrong with ``groups`` of ``layout``: checked with all of them pruned, and then with a few subsets.

    Every group is in a subset, and of any two one is in a subset without the other; there they keep one channel more.
    For some networks are exact only while two groups keep equally many (``chunk`` cuts in the middle), or an even
    number.
    """
    reason = _differs(twin, _some(layout, groups), example)
    for bit in range(len(groups).bit_length()):
        if reason is None:
            some = [group for number, group in enumerate(groups, 1) if number >> bit & 1]
            reason = _differs(twin, _some(layout, some, more=1), example)
    return reason or _untrainable(twin, _some(layout, groups), example)


def _some(layout: ChannelLayout, groups: list[str], more: int = 0) -> ChannelMask:
    """A mask that keeps half of the channels of ``groups``, and ``more``, in no regular pattern: one is missing among
    them, as what reads the channels beside each does not notice where those at an end are."""
    generator = torch.Generator().manual_seed(len(groups))
    kept = dict(layout.full().kept)
    for group in groups:
        size = layout.sizes[group]
        count = min(max(1, size // 2) + more, size - 1)
        chosen = sorted(torch.randperm(size, generator=generator)[:count].tolist())
        if count > 1 and chosen[-1] - chosen[0] < count:
            chosen = [0, *chosen[1:]] if chosen[0] else [*chosen[:-1], size - 1]
        kept[group] = tuple(chosen)
    return ChannelMask(layout, kept)


def _differs(twin: Module, mask: ChannelMask, example: Tensor) -> str | None:
    dense = clone(twin)
    try:
        fill(dense.state_dict(), apply_dense(state_of(twin), mask))
        got, want = _flat(compact(twin, mask)(example)), _flat(dense(example))
    except (*TRACE_ERRORS, ModelError) as error:
        return f"does not run when channels are taken out: {_said(error)}"
    size = float(want.abs().max()) if want.numel() else 0.0
    if got.shape != want.shape or not 0 < size < torch.inf:
        return "changes the output's shape, or gives nothing but zeros or no finite output"
    if not float((got - want).abs().max()) <= TOLERANCE[want.dtype] * size:
        return "computes something else when channels are taken out"
    return None


def _untrainable(twin: Module, mask: ChannelMask, example: Tensor) -> str | None:
    """Why what ``mask`` leaves cannot train, though ``twin`` can: a pass in training may call layers of its own."""
    dense, left = (_fails(one.train(), example) for one in (clone(twin), compact(twin, mask)))
    return None if dense or not left else f"cannot be trained when channels are taken out: {left}"


def _fails(module: Module, example: Tensor) -> str | None:
    with seeds.aside():
        try:
            module(example)
        except TRACE_ERRORS as error:
            return _said(error)
    return None


def _said(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:120]


def _flat(output: object) -> Tensor:
    if isinstance(output, Tensor):
        return output.flatten()
    parts = list(output.values()) if isinstance(output, Mapping) else output
    if isinstance(parts, (list, tuple)):
        return torch.cat([_flat(part) for part in parts])
    raise TypeError(f"the model returns {type(output).__name__}, not tensors")


def _shaken(model: Module, example: Tensor) -> tuple[Module, Tensor]:
    """A float64 copy whose weights hide nothing, or a float32 one where the model insists on its own dtype."""
    if example.is_floating_point() and bool((example == example.flatten()[0]).all()):
        # a blank example would hide every difference
        example = tokens.example(model, tuple(example.shape[1:]), len(example))
    for dtype in (torch.float64, torch.float32):
        batch = example.to(dtype) if example.is_floating_point() else example
        try:
            for near in (False, True):
                twin = clone(model).to(dtype).eval()
                _shake(twin, dtype, near)
                if bool(_flat(twin(batch)).isfinite().all()):
                    break
        except TRACE_ERRORS:
            continue
        break
    return twin, batch


def _shake(model: Module, dtype: torch.dtype, near: bool) -> None:
    """Random weights and statistics, so that no zero initialisation hides a difference; with ``near`` the sign and half
    to one and a half of what is not 0, as in a filterbank of whose product a network takes the logarithm.

    The gain of 2 keeps the signal's size through ReLU and half of the channels gone, however deep the network is.
    """
    generator = torch.Generator().manual_seed(0)
    for key, tensor in model.state_dict().items():
        if not tensor.is_floating_point():
            continue
        if tensor.dim() >= 2:
            noise = 2 * torch.randn(tensor.shape, generator=generator) / sqrt(max(1, tensor[0].numel()))
        elif key.endswith(("running_var", "weight")):
            noise = 0.5 + torch.rand(tensor.shape, generator=generator)
        else:
            noise = 0.3 * torch.randn(tensor.shape, generator=generator)
        if near:
            noise = torch.where(tensor == 0, noise, tensor * (0.5 + torch.rand(tensor.shape, generator=generator)))
        tensor.copy_(noise.to(dtype))
