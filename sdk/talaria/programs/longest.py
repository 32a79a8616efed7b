"""Whether a network's answers depend on the longest sample of a batch, to whose length torch pads what it unpacks; a
program pads to the whole length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.utils import rnn

from talaria.model import tokens
from talaria.model.cloning import clone
from talaria.model.dependency_groups import TRACE_ERRORS
from talaria.model.packing import replaced
from talaria.programs.layers.base import refused

PACK, PAD = rnn.pack_padded_sequence, rnn.pad_packed_sequence
TRIED = 32
"""Samples of each kind among which shorter ones are looked for."""
NEAR = 1e-4
"""How far answers may lie apart, beside their size."""


def require_none(module: Module, input_shape: Sequence[int]) -> None:
    """Raise :class:`~talaria.errors.ModelError` unless ``module`` answers a batch of shorter samples
    (N, *input_shape) as it does where all that is unpacked is padded to the whole length."""
    own = clone(module)
    for layer in own.modules():
        draws = hasattr(layer, "p") or getattr(layer, "dropout", None)
        layer.training = layer.training and not draws
    seen = False
    for x in _shorter(own, input_shape):
        plain, whole = (_answered(own, x, _Padding(longest)) for longest in (True, False))
        seen = True
        if plain.shape != whole.shape or not (plain - whole).abs().max() <= NEAR * plain.abs().max():
            raise refused(
                "pad_packed_sequence", "pads to the longest sample of the batch, on which the answers depend", _MEND
            )
    if not seen:
        raise refused("pad_packed_sequence", "pads to a length that is not known", _MEND)


_MEND = "name the whole length, as in total_length=x.size(1)"


@dataclass
class _Padding:
    """torch's own packing, unpacked to the ``longest`` sample or to the whole length, which it notes, with lengths."""

    longest: bool
    lengths: list[Tensor] = field(default_factory=list)
    whole: int = 0

    def pack(self, input: Tensor, lengths: Any, batch_first: bool = False, enforce_sorted: bool = True) -> Any:
        self.lengths.append(torch.as_tensor(lengths))
        self.whole = input.shape[1 if batch_first else 0]
        return PACK(input, lengths, batch_first, enforce_sorted)

    def pad(
        self, sequence: Any, batch_first: bool = False, padding_value: float = 0.0, total_length: Any = None
    ) -> Any:
        wanted = total_length if self.longest else self.whole
        return PAD(sequence, batch_first, padding_value, wanted)


def _answered(module: Module, x: Tensor, padding: _Padding) -> Tensor:
    with torch.no_grad(), replaced(module, {PACK: padding.pack, PAD: padding.pad}):
        found: Tensor = module(x)
    return found


def _shorter(module: Module, input_shape: Sequence[int]) -> Iterator[Tensor]:
    """Batches of which no sample is as long as can be: as they are drawn, and with zeros in the end of a dimension."""
    drawn = tokens.example(module, tuple(input_shape), TRIED)
    for axis in range(drawn.dim()):
        x = drawn.clone()
        if axis:
            x.narrow(axis, (1 + x.shape[axis]) // 2, x.shape[axis] // 2).zero_()
        padding = _Padding(True)
        try:
            _answered(module, x, padding)
        except TRACE_ERRORS:
            continue
        short = torch.stack([one < padding.whole for one in padding.lengths]).all(0) if padding.lengths else None
        if short is not None and int(short.sum()) > 1:
            yield x[short]
