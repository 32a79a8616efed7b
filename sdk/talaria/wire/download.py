"""The global model as coarse as it travels down. It is rounded to values that its codec gives back exactly, so that
what the coordinator keeps, what a device downloads and what a simulation learns from are the same; what rounding leaves
out of one version is added to the next (error feedback on the server's side: Tang et al. 2019, DoubleSqueeze).

Weights of two dimensions and more are rounded as asked. Vectors take bfloat16 where weights take int8: one scale for
all of BatchNorm's weights would be too coarse. Statistics, counters and what a rule wrote for itself stay as they are.
"""

from __future__ import annotations

import numpy as np

from talaria.aggregate.validation import is_reserved, is_statistic
from talaria.tensors import Array, Tensors, is_float, prefixed
from talaria.wire import strict_safetensors
from talaria.wire.tensor_codecs import Codec, bfloat16_of, float32_of, to_planes

CODECS = ("raw", "fp16", "bf16", "int8")
PREFIX = "download/"
"""Where the server's state keeps what rounding left out."""
_FP16_MAX = float(np.finfo(np.float16).max)
_BF16_MAX = float(float32_of(np.array([0x7F7F], np.uint16))[0])
_LOW = np.uint32(0x7F)
"""The bits that a scale does without: 127 times it is then exact in float32, and gives back the same scale."""
_MOST = (np.array(np.finfo(np.float32).max / np.float32(127)).view(np.uint32) & ~_LOW).view(np.float32)
"""The largest scale of which 127 are a number still."""


def codec_of(name: str, value: Array, codec: str) -> str:
    """How the tensor ``name`` travels in a model of ``codec``."""
    if not is_float(value) or value.dtype.itemsize < 4 or is_reserved(name) or is_statistic(name):
        return "raw"
    return "bf16" if codec == "int8" and value.ndim < 2 else codec


def rounded(shared: Tensors, codec: str) -> Tensors:
    """``shared``, each tensor rounded to what :func:`encoded` keeps of it: the same shapes and dtypes."""
    return {name: _rounded(value, codec_of(name, value, codec)) for name, value in shared.items()}


def settled(after: Tensors, left: Tensors, state: Tensors, codec: str) -> tuple[Tensors, Tensors]:
    """The version that is published of ``after``, which a rule made, and the server's ``state`` with what rounding
    leaves out of it. ``left`` is what it left out of the versions before, and is added first."""
    exact = {k: np.asarray(v + left[k].astype(v.dtype)) if k in left else v for k, v in after.items()}
    published = rounded(exact, codec)
    coarse = [name for name, value in after.items() if codec_of(name, value, codec) != "raw"]
    return published, {**state, **prefixed({k: np.asarray(exact[k] - published[k]) for k in coarse}, PREFIX)}


def encoded(shared: Tensors, codec: str) -> bytes:
    """``shared``, which is :func:`rounded`, as a safetensors file of planes; equal tensors give equal bytes."""
    planes: Tensors = {}
    for name, value in shared.items():
        planes |= to_planes(name, value, Codec.parse(codec_of(name, value, codec)))
    return strict_safetensors.pack(planes)


def _rounded(value: Array, codec: str) -> Array:
    if codec == "raw" or not value.size:
        return value
    single = value.astype(np.float32, copy=False)
    if codec == "fp16":
        coarse = np.clip(single, -_FP16_MAX, _FP16_MAX).astype(np.float16)
    elif codec == "bf16":
        coarse = float32_of(bfloat16_of(np.clip(single, -_BF16_MAX, _BF16_MAX)))
    else:
        coarse = _levels(single)
    return coarse.astype(value.dtype)


def _levels(value: Array) -> Array:
    """Whole multiples -127..127 of a scale per row, the smallest of 17 bits that reaches the row's largest value."""
    rows = value.reshape(value.shape[0], -1)
    scale = np.abs(rows).max(1) / np.float32(127)
    scale = np.minimum(((scale.view(np.uint32) + _LOW) & ~_LOW).view(np.float32), _MOST)
    scale = np.where(scale > np.finfo(np.float32).tiny, scale, np.float32(0))
    step = np.where(scale > 0, scale, np.float32(1))[:, None]
    levels = np.clip(np.rint(rows / step), -127, 127).astype(np.int8)
    levels[scale == 0] = 0
    return (levels.astype(np.float32) * step).reshape(value.shape)
