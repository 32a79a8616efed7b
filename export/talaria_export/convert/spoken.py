"""What torch's exporter does not know, said as what it knows while a model is exported: the length of a batch,
attention over three dimensions, maxima under windows of different sizes, values in the middle and at places that are
named, bounds of two kinds, products along a dimension, sizes that are no 1 and squeezed, packed sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from talaria.errors import ModelError
from talaria.model.packing import unpacked
from talaria.programs.layers.placing import index_fill, placed
from talaria.programs.layers.ranking import scatter
from talaria.programs.layers.spelled import prod
from talaria.programs.layers.windows import covering


@contextmanager
def spoken(model: Module) -> Iterator[None]:
    """In this context a pass of ``model`` computes the same by what the exporter knows. What ``len`` is changes in the
    files of Python that its passes stand in alone."""
    own = [unwrap(type(one).forward) for one in model.modules() if not type(one).__module__.startswith("torch.")]
    found = {id(space): space for one in own if (space := getattr(one, "__globals__", None)) is not None}
    spaces = [space for space in found.values() if "len" not in space]
    for space in spaces:
        space["len"] = _length
    try:
        with unpacked(model), _Spoken():
            yield
    finally:
        for space in spaces:
            del space["len"]


def _length(x: Any) -> Any:
    """``len`` of Python is a number, and would fix the batch's size; a tensor's first size need be none."""
    return x.shape[0] if isinstance(x, Tensor) else len(x)


class _Spoken(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _SAID.get(func, func)(*args, **(kwargs or {}))


def _attended(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **more: Any
) -> Any:
    if query.dim() != 3:
        return F.scaled_dot_product_attention(query, key, value, attn_mask, *args, **more)
    mask = attn_mask[:, None] if attn_mask is not None and attn_mask.dim() == 3 else attn_mask
    found = F.scaled_dot_product_attention(query[:, None], key[:, None], value[:, None], mask, *args, **more)
    return found[:, 0]


def _largest(pool: Callable[..., Any], rank: int) -> Callable[..., Any]:
    """``pool`` of maps with so many dimensions of space."""

    def pooled(x: Tensor, output_size: int | Sequence[int | None], return_indices: bool = False) -> Any:
        asked = [output_size] * rank if isinstance(output_size, int) else output_size
        sizes = [(n, many or n) for n, many in zip(x.shape[-rank:], asked, strict=True)]
        if return_indices or not any(n % many for n, many in sizes):
            return pool(x, output_size, return_indices)
        for axis, (n, many) in enumerate(sizes, x.dim() - rank):
            places = covering(n, many)
            x = x.index_select(axis, torch.tensor(places.reshape(-1).tolist()))
            x = x.reshape(*x.shape[:axis], *places.shape, *x.shape[axis + 1 :]).amax(axis + 1)
        return x

    return pooled


def _kthvalue(x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    found = torch.topk(x, k, dim, largest=False)
    value, place = (one.narrow(dim, k - 1, 1) for one in (found.values, found.indices))
    return torch.return_types.kthvalue((value, place) if keepdim else (value.squeeze(dim), place.squeeze(dim)))


def _median(x: Tensor, *dims: Any, **named: Any) -> Any:
    if not dims and not named:
        return torch.median(x)

    def along(dim: int, keepdim: bool = False) -> Any:
        return _kthvalue(x, (x.shape[dim] + 1) // 2, dim, keepdim)

    return along(*dims, **named)


def _clamped(clamp: Callable[..., Any]) -> Callable[..., Any]:
    """``clamp`` with both bounds of one kind, as ``x.clamp(0, 0.5)`` has not."""

    def bounded(x: Tensor, *bounds: Any, **named: Any) -> Any:
        def alike(one: Any) -> Any:
            return float(one) if type(one) is int and x.is_floating_point() else one

        return clamp(x, *map(alike, bounds), **{name: alike(one) for name, one in named.items()})

    return bounded


def _squeezed(x: Tensor, dim: int | Sequence[int] | None = None) -> Tensor:
    """ONNX refuses to squeeze a size that is no 1, which torch leaves; the batch is squeezed as it says."""
    if dim is None:
        return torch.squeeze(x)
    dims = [one % x.dim() for one in ([dim] if isinstance(dim, int) else dim)]
    gone = tuple(one for one in dims if one == 0 or x.shape[one] == 1)
    return torch.squeeze(x, gone) if gone else x


def _multiplied(x: Tensor, *dims: Any, **named: Any) -> Any:
    return prod(x, *dims, **named) if (dims or "dim" in named) and "dtype" not in named else torch.prod(x, **named)


def _taken(x: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
    """Without the comparison of sizes that would fix the batch's."""
    if dim is None:
        return torch.take_along_dim(x, indices)
    sizes = [*x.shape]
    sizes[dim] = indices.shape[dim]
    return torch.gather(x, dim, indices.expand(sizes))


def _put(x: Tensor, index: Any, value: Any) -> None:
    """``x[index] = value``, by pieces beside each other where these are known."""
    try:
        x.copy_(placed(x, index, value))
    except ModelError:
        x[index] = value


_SAID: Mapping[Any, Callable[..., Any]] = {
    F.scaled_dot_product_attention: _attended,
    F.adaptive_max_pool1d: _largest(F.adaptive_max_pool1d, 1),
    F.adaptive_max_pool2d: _largest(F.adaptive_max_pool2d, 2),
    **dict.fromkeys((torch.scatter, Tensor.scatter), scatter),
    Tensor.scatter_: lambda x, *given: x.copy_(scatter(x, *given)),
    **dict.fromkeys((torch.index_fill, Tensor.index_fill), index_fill),
    Tensor.index_fill_: lambda x, *given: x.copy_(index_fill(x, *given)),
    Tensor.__setitem__: _put,
    **dict.fromkeys((torch.squeeze, Tensor.squeeze), _squeezed),
    **dict.fromkeys((torch.take_along_dim, Tensor.take_along_dim), _taken),
    **dict.fromkeys((torch.prod, Tensor.prod), _multiplied),
    **dict.fromkeys((torch.kthvalue, Tensor.kthvalue), _kthvalue),
    **dict.fromkeys((torch.median, Tensor.median), _median),
    **{
        one: _clamped(one)
        for one in (torch.clamp, torch.clip, torch.clamp_, Tensor.clamp, Tensor.clip, Tensor.clamp_, Tensor.clip_)
    },
}
