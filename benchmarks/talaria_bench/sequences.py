"""Two small networks over windows (channels, length), as foreign modules: a transformer and a recurrent network."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

WIDE = 32


class Transformer(nn.Module):
    """Two layers of four heads over embedded moments with learned places, and the mean over them."""

    def __init__(self, channels: int, length: int, classes: int) -> None:
        super().__init__()
        self.embed = nn.Linear(channels, WIDE)
        self.places = nn.Parameter(0.02 * torch.randn(1, length, WIDE))
        layer = nn.TransformerEncoderLayer(WIDE, 4, 2 * WIDE, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDE), enable_nested_tensor=False)
        self.head = nn.Linear(WIDE, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, classes) of windows (N, channels, length)."""
        y: Tensor = self.head(self.encoder(self.embed(x.transpose(1, 2)) + self.places).mean(dim=1))
        return y


class Recurrent(nn.Module):
    """A GRU, whose last state is read."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(channels, WIDE, batch_first=True), nn.Linear(WIDE, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, classes) of windows (N, channels, length)."""
        states, _ = self.gru(x.transpose(1, 2))
        y: Tensor = self.head(states[:, -1])
        return y


def transformer(input_shape: Sequence[int], classes: int) -> nn.Module:
    """The transformer for windows of this shape."""
    channels, length = input_shape
    return Transformer(channels, length, classes)


def gru(input_shape: Sequence[int], classes: int) -> nn.Module:
    """The recurrent network for windows of this shape."""
    return Recurrent(input_shape[0], classes)
