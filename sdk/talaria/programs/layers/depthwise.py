"""A depthwise convolution over a small map as one matrix for each channel.

The matrix of a channel, positions of the map by windows, holds the kernel's taps where they meet: forward, input
gradient and weight gradient are then batched products. The 0/1 table that spreads taps over matrices and gathers them
again follows from sizes alone; the file holds its two one-dimensional halves, which ONNX Runtime multiplies out when it
loads the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch.nn import Module

from talaria.programs.graph import Draft
from talaria.programs.layers.base import Map, Pullback, Step
from talaria.programs.layers.windows import Windows

SMALL = 4200
"""Entries of a channel's matrix up to which this form is taken: the whole step of mobilenet_v3_small at 64 x 64, batch
8, took 28.4 ms with 300, 26.6 with 1,100, 26.9 with 4,200, 29.2 with 17,000, and 53.6 with columns alone."""


def fits(windows: Windows) -> bool:
    """Whether the map is small enough."""
    return prod(windows.space) * prod(windows.out) <= SMALL


def convolved(step: Step, layer: str, own: Module, x: Map, windows: Windows, weight: str) -> tuple[str, Pullback]:
    """The convolution without its bias, and the way back; ``weight`` is (channels, 1, *kernel)."""
    draft = step.draft
    positions, places = prod(windows.space), prod(windows.out)
    table = _table(draft, windows)
    matrix = draft.product(draft.reshape(weight, 0, -1), table, rank=2, turn_b=True)
    matrix = draft.reshape(matrix, 0, positions, places)
    rows = draft.reshape(x.value, 0, 0, -1)
    y = draft.reshape(draft.op("MatMul", rows, matrix), 0, 0, *windows.out)

    def back(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        slope = draft.reshape(g, 0, 0, -1)

        def gradient() -> str:
            met = draft.reshape(draft.product(rows, slope, rank=3, turn_a=True), 0, positions * places)
            return draft.reshape(draft.op("MatMul", met, table), 0, 1, *windows.kernel)

        step.trained(own, layer, "weight", gradient)
        if not wanted[0]:
            return [None]
        dx = draft.product(slope, matrix, rank=3, turn_b=True)
        return [draft.reshape(dx, 0, 0, *windows.space)]

    return y, back


def _table(draft: Draft, windows: Windows) -> str:
    """(positions * places, taps): 1 where a tap of a window lies on a position."""
    rank, halves = len(windows.space), list[str]()
    zipped = zip(windows.space, windows.out, windows.kernel, windows.stride, windows.padding, strict=True)
    for axis, (size, out, kernel, stride, padding) in enumerate(zipped):
        met = [p - o * stride + padding for p in range(size) for o in range(out)]
        at = draft.ints(*(k if 0 <= k < kernel else kernel for k in met))  # beyond the depth: zeros
        half = draft.op("OneHot", at, draft.ints(kernel), draft.constant([0.0, 1.0]))
        shape = [1] * 3 * rank
        shape[axis], shape[rank + axis], shape[2 * rank + axis] = size, out, kernel
        halves.append(draft.reshape(half, *shape))
    table = halves[0]
    for half in halves[1:]:
        table = draft.op("Mul", table, half)
    return draft.reshape(table, prod(windows.space) * prod(windows.out), prod(windows.kernel))
