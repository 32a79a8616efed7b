"""A pass that is differentiated twice: where torch's own operators are not, or wrongly, plain ones compute the same."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode


class TwiceDifferentiable(TorchFunctionMode):
    """Inside this context a weight of a direction and a length, and attention, are computed by plain operators. Of the
    first torch takes the lengths for constants where it is differentiated a second time, so that what comes of that is
    wrong; its fast attention is differentiated once (torch 2.14)."""

    def __enter__(self) -> Any:
        self._attention = ExitStack()
        self._attention.enter_context(sdpa_kernel(SDPBackend.MATH))
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *why: Any) -> None:
        super().__exit__(*why)  # type: ignore[no-untyped-call]
        self._attention.close()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (_weight if func is torch._weight_norm else func)(*args, **(kwargs or {}))


def _weight(v: torch.Tensor, g: torch.Tensor, dim: int = 0) -> torch.Tensor:
    return v * (g / torch.norm_except_dim(v, 2, dim))
