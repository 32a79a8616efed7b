"""What is done to raw recordings before the model, put inside the exported graph so that no app can get it wrong."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Module

from talaria.errors import ConfigError


class Normalized(Module):
    """``model((x - mean) / std)``: takes raw inputs where ``model`` was trained on normalized ones.

    ``mean`` and ``std`` are float32 and broadcast against one input: a number, or (channels, 1) for (channels, time).
    """

    mean: Tensor
    std: Tensor

    def __init__(self, model: Module, mean: Tensor | float, std: Tensor | float) -> None:
        super().__init__()
        mean, std = torch.as_tensor(mean, dtype=torch.float32), torch.as_tensor(std, dtype=torch.float32)
        if not bool(torch.isfinite(mean).all()) or not bool((torch.isfinite(std) & (std > 0)).all()):
            raise ConfigError("normalization: mean must be finite and std finite and above 0, for every channel")
        self.model = model
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.model((x - self.mean) / self.std)
        return out


class Windowed(Module):
    """Cuts one recording (time, channels) of any length into windows, and classifies each: (windows, classes).

    ``model`` takes (N, channels, ``size``); a window begins every ``stride`` steps, and a rest shorter than ``size``
    is left out, as in training. Export it with an example recording (time, channels); it takes no part in a bundle,
    whose inputs are single windows.
    """

    def __init__(self, model: Module, size: int, stride: int) -> None:
        super().__init__()
        if size < 1 or stride < 1:
            raise ConfigError(f"windows: size={size} and stride={stride} must be at least 1")
        self.model = model
        self.size = size
        self.stride = stride

    def forward(self, recording: Tensor) -> Tensor:
        count = (recording.shape[0] - self.size) // self.stride + 1
        begin = torch.arange(count, device=recording.device) * self.stride
        steps = begin[:, None] + torch.arange(self.size, device=recording.device)  # (windows, size)
        out: Tensor = self.model(recording[steps].transpose(1, 2))
        return out
