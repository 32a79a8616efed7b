"""Adversarial inputs by projected gradient ascent (Madry et al. 2018), in the space where they are bounded: pixels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from talaria.errors import ConfigError

if TYPE_CHECKING:
    from torch import Generator, Tensor
    from torch.nn import Module


@dataclass(frozen=True)
class Normalization:
    """How inputs were made from pixels in [0, 1]: ``x = (pixel − mean) / std``, per channel (or one for all)."""

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std) or not self.mean or not all(s > 0 for s in self.std):
            raise ConfigError(f"normalization: mean={self.mean} and std={self.std} need one length, and std above 0")

    def pixels(self, x: Tensor) -> Tensor:
        """Inputs (N, C, ...) to pixels in [0, 1]."""
        return x * self._line(self.std, x) + self._line(self.mean, x)

    def inputs(self, pixels: Tensor) -> Tensor:
        """Pixels (N, C, ...) to inputs."""
        return (pixels - self._line(self.mean, pixels)) / self._line(self.std, pixels)

    def _line(self, values: tuple[float, ...], x: Tensor) -> Tensor:
        return x.new_tensor(values).view(1, -1, *[1] * (x.dim() - 2))


@dataclass(frozen=True)
class Attack:
    """L∞ projected gradient ascent in pixel space; ``steps=0`` leaves the adversarial half out."""

    eps: float = 8 / 255
    step: float = 2 / 255
    steps: int = 20
    random_start: bool = True

    def __post_init__(self) -> None:
        if not (self.eps > 0 and self.step > 0 and self.steps >= 0):
            raise ConfigError(f"attack: eps={self.eps} and step={self.step} must be above 0, steps={self.steps} >= 0")


def adversarial(module: Module, x: Tensor, y: Tensor, attack: Attack, scale: Normalization, draws: Generator) -> Tensor:
    """``x`` (N, C, ...) moved by at most ``eps`` per pixel, inside [0, 1], to raise the cross-entropy with ``y``.

    The module's modes, parameters, gradients and buffers stay as they are; it should be in eval mode.
    """
    import torch
    from torch.func import functional_call
    from torch.nn import functional as F

    clean = scale.pixels(x).clamp(0, 1)
    moved = clean.clone()
    if attack.random_start:
        noise = torch.rand(x.shape, generator=draws, dtype=x.dtype).to(x.device)
        moved = (clean + (2 * noise - 1) * attack.eps).clamp(0, 1)
    state = {k: v.detach() for k, v in (*module.named_parameters(), *module.named_buffers())}
    for _ in range(attack.steps):
        moved.requires_grad_(True)
        loss = F.cross_entropy(functional_call(module, state, (scale.inputs(moved),)), y, reduction="sum")
        (slope,) = torch.autograd.grad(loss, moved)
        with torch.no_grad():
            moved = moved + attack.step * slope.sign()
            moved = torch.minimum(torch.maximum(moved, clean - attack.eps), clean + attack.eps).clamp(0, 1)
    return scale.inputs(moved.detach())
