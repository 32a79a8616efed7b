"""A module's state as arrays, and arrays back into a module: where what travels meets torch."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from talaria.errors import ModelError
from talaria.tensors import Array, Tensors


def state_of(module: Module) -> Tensors:
    """Copies of all parameters and buffers of ``module``, contiguous. Raises :class:`ModelError` for a dtype that
    numpy lacks (bfloat16)."""
    return {k: np.array(array_of(v, k), order="C") for k, v in module.state_dict().items()}


def load(module: Module, state: Tensors) -> Module:
    """Copy ``state`` into ``module`` in place; names and shapes must fit exactly (:class:`ModelError`)."""
    own = module.state_dict(keep_vars=True)
    if own.keys() != state.keys():
        missing, unknown = sorted(own.keys() - state.keys())[:4], sorted(state.keys() - own.keys())[:4]
        raise ModelError(f"state does not fit the model: missing {missing}, unknown {unknown}")
    for name, tensor in own.items():
        if tuple(tensor.shape) != state[name].shape:
            raise ModelError(
                f"state does not fit the model: {name!r} is {state[name].shape}, the model has {tuple(tensor.shape)}"
            )
    fill(own, state)
    return module


def fill(own: Mapping[str, Tensor], values: Tensors) -> None:
    """Copy ``values`` into the tensors of ``own``, in place and by name alone: a module's ``load_state_dict`` may ask
    for more than its tensors. Names and shapes must fit."""
    with torch.no_grad():
        for key, tensor in own.items():
            tensor.copy_(tensor_of(values[key]))


def tensor_of(array: Array) -> Tensor:
    """``array`` as a tensor that shares its memory, or a copy where it must not be written or runs backwards; a number
    that arithmetic made of an array without dimensions is one again."""
    array = np.asarray(array)
    return torch.from_numpy(array if array.flags.writeable and min(array.strides, default=0) >= 0 else array.copy())


def array_of(tensor: Tensor, name: str = "tensor") -> Array:
    """``tensor`` as an array, detached; it shares memory where the tensor lies on the CPU."""
    try:
        return np.asarray(tensor.detach().cpu().numpy())
    except TypeError:
        raise ModelError(f"{name!r} is {tensor.dtype}, which arrays cannot hold; use float32") from None


def beside(module: Module, array: Array) -> Tensor:
    """``array`` as a tensor on the device where ``module`` lies (of no tensors: the CPU)."""
    own = next(chain(module.parameters(), module.buffers()), None)  # a state dict would be made of all of them
    return tensor_of(array) if own is None else tensor_of(array).to(own.device)


def to_torch(tensors: Tensors) -> dict[str, Tensor]:
    """The same values as tensors; they share memory (see :func:`tensor_of`), so write to none of them in place."""
    return {k: tensor_of(v) for k, v in tensors.items()}


def to_arrays(tensors: Mapping[str, Tensor]) -> Tensors:
    """The same values as contiguous arrays, detached; they share memory where the tensors are contiguous."""
    return {k: np.asarray(array_of(v, k), order="C") for k, v in tensors.items()}
