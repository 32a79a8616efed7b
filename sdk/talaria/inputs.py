"""Several named inputs of one model, side by side in one array: all that carries samples carries one ``x``.

The numbers of a sample stand in the order of its inputs' names, each input row by row. Needs numpy alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from talaria.errors import DataError
from talaria.foreign import shown
from talaria.npz import Array

Parts = Mapping[str, tuple[int, ...]]
"""The shape of each input by its name, without N, in the order of names."""
MOST = 64
"""Inputs of one model, at most."""
narrowing = partial(np.errstate, over="ignore", under="ignore")
"""``with narrowing():`` numbers become float32. What it cannot hold is infinite, which whoever learns or infers from it
refuses; what is too small for it is 0."""
_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]{0,39}")
_TAKEN = ("train", "val", "test", "unlabelled")


def array_of(values: Any, name: str) -> Array:
    """What a torch tensor, an array or lists hold, as an array of numbers. Raises :class:`DataError`, beginning with
    ``name``, where it is none."""
    found = _array(values, name)
    if found.dtype.kind == "c":
        raise DataError(f"{name}: holds {found.dtype}; give real numbers, such as their real and imaginary parts")
    if found.dtype.kind not in "bfiu":
        raise DataError(f"{name}: holds {found.dtype}, need numbers; turn texts and categories into numbers first")
    return found


def _array(values: Any, name: str) -> Array:
    require_none_hidden(values, name)
    try:
        return np.asarray(out_of_torch(values))
    except (ValueError, TypeError, RuntimeError) as error:
        raise DataError(f"{name}: is no array ({str(error)[:120]}); give samples of one shape") from None


def require_none_hidden(values: Any, name: str) -> None:
    """Raise :class:`DataError` for a masked array of numpy that hides values: what lies under its mask is no number."""
    if np.ma.is_masked(values):
        many = int(np.ma.getmaskarray(values).sum())
        raise DataError(f"{name}: hides {many} of its values under a mask; fill them (.filled(0)), or drop the samples")


def out_of_torch(values: Any) -> Any:
    """What a torch tensor holds, or each of a list of them, wherever they lie; everything else as it is. Nobody who
    brings none imports torch."""
    return [_numbers(one) for one in values] if isinstance(values, list | tuple) else _numbers(values)


def _numbers(value: Any) -> Any:
    if not hasattr(value, "detach"):
        return value
    value = value.detach().cpu()
    return value.float().numpy() if str(value.dtype) == "torch.bfloat16" else value.numpy()


def parts_of(shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """``shapes`` by name, in order. Raises :class:`DataError` for a name or a shape that none can have."""
    if not 1 <= len(shapes) <= MOST:
        raise DataError(f"inputs: {len(shapes)} are named; name 1 to {MOST}")
    for name, shape in shapes.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name in _TAKEN:
            raise DataError(
                f"inputs: {shown(name)} names no input; use letters, digits and _, as an argument of the model's "
                f"forward, and not {', '.join(_TAKEN)}, which name parts of a file"
            )
        whole = isinstance(shape, list | tuple) and all(type(size) is int and size > 0 for size in shape)
        if not whole or not len(shape):
            raise DataError(f"inputs: {name}={shown(shape)} must be its shape without N, such as {name}=(6, 100)")
    return {name: tuple(shapes[name]) for name in sorted(shapes)}


def size_of(parts: Parts) -> int:
    """How many numbers a sample has in all."""
    return sum(math.prod(shape) for shape in parts.values())


def joined(arrays: Mapping[str, Any], where: str = "x") -> tuple[Array, dict[str, tuple[int, ...]]]:
    """The arrays (N, ...) of named inputs as one, float32 (N, numbers), and their shapes. Raises :class:`DataError`,
    beginning with ``where``."""
    found = {}
    for name, values in arrays.items():
        array = _array(values, f"{where}: input {shown(name)}")
        if array.dtype.kind not in "bif" or array.ndim < 1:
            mend = "need float32, whole numbers for tokens, or bool for a mask"
            if array.dtype.kind == "u":
                mend = "divide pixels by 255 as float32, and write a mask as bool"
            raise DataError(f"{where}: input {shown(name)} is {array.dtype} {array.shape}; {mend}")
        found[name] = array[:, None] if array.ndim == 1 else array
    parts = parts_of({name: array.shape[1:] for name, array in found.items()})
    rows = {name: len(array) for name, array in found.items()}
    if len(set(rows.values())) > 1:
        raise DataError(f"{where}: its inputs have {shown(rows)} samples; give as many of each")
    with narrowing():
        flat = [found[name].reshape(rows[name], math.prod(parts[name])).astype(np.float32) for name in parts]
    return np.concatenate(flat, 1), parts


def apart(x: Array, parts: Parts) -> dict[str, Array]:
    """What :func:`joined` joined, as views."""
    out, at = {}, 0
    for name, shape in parts.items():
        size = math.prod(shape)
        out[name] = x[:, at : at + size].reshape(len(x), *shape)
        at += size
    return out


def fitting(given: Mapping[str, Any], parts: Parts) -> Array:
    """One sample's named inputs, or a batch of them, as one array (N, numbers) for a model of ``parts``. Raises
    :class:`DataError` for other names or shapes."""
    if set(given) != set(parts):
        raise DataError(f"x: has the inputs {shown(sorted(map(str, given)))}; the model takes {told(parts)}")
    arrays = {name: _array(given[name], f"x: input {name!r}") for name in parts}
    if all(arrays[name].shape == shape for name, shape in parts.items()):
        arrays = {name: array[None] for name, array in arrays.items()}
    for name, shape in sorted(parts.items(), key=lambda part: arrays[part[0]].shape == part[1]):  # the odd one first
        if arrays[name].shape[1:] != shape:
            raise DataError(
                f"x: input {name!r} has shape {arrays[name].shape}; give {shape} for one, or (N, ...) of each for N"
            )
    return joined(arrays)[0]


def require_alike(what: str, given: Parts | None, own: Parts, shape: tuple[int, ...]) -> None:
    """Raise :class:`DataError`, beginning with ``what``, where samples of the named inputs ``given`` are not for a
    model that reads ``own``, or, where that is empty, one array of this ``shape``; None: they say no names, and pass.
    """
    if given is not None and dict(given) != dict(own):
        takes = told(own) or f"one array {tuple(shape)}"
        raise DataError(
            f"{what} have the inputs {told(given)}, and the model takes {takes}; name and order them as it expects"
        )


def told(parts: Parts) -> str:
    """The inputs in words."""
    return ", ".join(f"{name} {shape}" for name, shape in parts.items())
