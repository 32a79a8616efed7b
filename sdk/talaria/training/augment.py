"""Named input augmentations: pure functions ``(x, generator) -> x`` that draw from the generator alone.

The name is a setting (:class:`talaria.types.Recipe`), so that it travels in a run's manifest and every device
means the same by it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from talaria.errors import ConfigError, DataError

if TYPE_CHECKING:
    from torch import Generator, Tensor

Augmentation = Callable[["Tensor", "Generator"], "Tensor"]
"""``(x, draws) -> x``: float32 (N, ...) to a tensor of the same shape and dtype; the input stays untouched."""

_ANGLE = math.radians(15)
_SCALE = 0.1
_JITTER = 0.05
_SHIFT = 0.1


def none(x: Tensor, draws: Generator) -> Tensor:
    """``x`` as it is; draws nothing."""
    del draws
    return x


def imu(x: Tensor, draws: Generator) -> Tensor:
    """Another way of wearing the same sensor: ``x`` (N, 3k, T) holds k sensors of three axes each.

    Per sample: one rotation of up to 15 degrees for all its sensors (they sit on one rigid body), a gain of
    1 ± 0.1 per sensor, a shift by up to a tenth of the window (the edge value fills the gap), and noise of 0.05.
    Angles and noise are in the units of ``x``; on z-scored axes the rotation is that of the scaled space.
    After Um et al. 2017, arXiv:1706.00527.
    """
    if x.dim() != 3 or x.shape[1] % 3:
        raise DataError(f"augment 'imu': x has shape {tuple(x.shape)}, need (N, 3k, time); use augment='none'")
    import torch

    count, channels, time = x.shape
    sensors = x.reshape(count, channels // 3, 3, time)
    turned = torch.einsum("nij,nsjt->nsit", _rotations(count, draws), sensors)
    gain = 1 + _SCALE * torch.randn(count, channels // 3, 1, 1, generator=draws)
    out = (turned * gain).reshape(count, channels, time)
    reach = int(_SHIFT * time)
    shift = torch.randint(-reach, reach + 1, (count, 1), generator=draws)
    at = (torch.arange(time) + shift).clamp_(0, time - 1)
    out = out.gather(2, at[:, None, :].expand_as(out))
    return out + _JITTER * torch.randn(x.shape, generator=draws)


def _rotations(count: int, draws: Generator) -> Tensor:
    """(N, 3, 3) rotations about random axes by an angle uniform in ±15 degrees (Rodrigues' formula)."""
    import torch
    from torch.nn import functional as F

    axis = F.normalize(torch.randn(count, 3, generator=draws), dim=1)
    angle = (2 * torch.rand(count, 1, 1, generator=draws) - 1) * _ANGLE
    x, y, z = axis.unbind(1)
    o = torch.zeros_like(x)
    cross = torch.stack([o, -z, y, z, o, -x, -y, x, o], dim=1).view(count, 3, 3)
    return torch.eye(3) + angle.sin() * cross + (1 - angle.cos()) * (cross @ cross)


def crop_flip(x: Tensor, draws: Generator) -> Tensor:
    """Images ``x`` (N, C, H, W): shifted by up to an eighth of each side, mirrored left to right half the time.

    The edge pixels fill the gap, because zero is not black in a normalized image.
    """
    if x.dim() != 4:
        raise DataError(f"augment 'crop_flip': x has shape {tuple(x.shape)}, need (N, C, H, W); use augment='none'")
    import torch

    count, _, height, width = x.shape
    rows = _shifted(count, height, draws)
    columns = _shifted(count, width, draws)
    mirrored = torch.rand(count, 1, generator=draws) < 0.5
    columns = torch.where(mirrored, columns.flip(1), columns)
    sample = torch.arange(count)[:, None, None]
    return x.permute(0, 2, 3, 1)[sample, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()


def _shifted(count: int, size: int, draws: Generator) -> Tensor:
    import torch

    reach = size // 8
    shift = torch.randint(-reach, reach + 1, (count, 1), generator=draws)
    return (torch.arange(size) + shift).clamp_(0, size - 1)


AUGMENTATIONS: dict[str, Augmentation] = {"none": none, "imu": imu, "crop_flip": crop_flip}


def get(name: str) -> Augmentation:
    """The augmentation called ``name``; :class:`ConfigError` lists the valid names."""
    try:
        return AUGMENTATIONS[name]
    except KeyError:
        raise ConfigError(f"augment={name!r} is unknown; use one of {', '.join(AUGMENTATIONS)}") from None
