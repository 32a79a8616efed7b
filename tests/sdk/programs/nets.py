"""One small network for each layer that a program may hold."""

import torch
from torch import nn
from torchvision.ops import StochasticDepth


class Residual(nn.Module):
    """Two branches that meet twice, by operator and by function."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv1d(3, 3, 3, padding=1), nn.BatchNorm1d(3)
        self.flatten, self.head = nn.Flatten(), nn.Linear(36, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.two(self.one(x)) + x
        y = torch.add(torch.relu(y), y)
        return self.head(torch.flatten(y, 1))


class Gated(nn.Module):
    """A gate for each channel, as in squeeze-and-excitation, before a product of two whole maps."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.pool, self.gate = nn.Conv2d(3, 3, 1), nn.AdaptiveAvgPool2d(1), nn.Hardsigmoid()
        self.flatten, self.head = nn.Flatten(), nn.Linear(216, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.one(x)
        y = self.gate(self.pool(y)) * y
        return self.head(self.flatten(torch.mul(y, torch.relu(y))))


def maps(*layers: nn.Module, wide: int, classes: int = 4) -> nn.Module:
    """``layers`` over maps, and a head over the ``wide`` values that come out."""
    net = nn.Sequential(*layers, nn.Flatten())
    net.add_module("head", nn.Linear(wide, classes))
    return net


LINE, PLANE = (3, 12), (3, 9, 8)
NETS = {
    "linear": ((5,), lambda: maps(nn.Linear(5, 6), nn.Linear(6, 6, bias=False), wide=6)),
    "batch_norm_of_features": ((5,), lambda: maps(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), wide=6)),
    "conv1d": (LINE, lambda: maps(nn.Conv1d(3, 4, 5, 2, 2), nn.Conv1d(4, 5, 3), wide=20)),
    "conv1d_wide_stride": (LINE, lambda: maps(nn.Conv1d(3, 4, 1), nn.Conv1d(4, 5, 1, 3), wide=20)),
    "conv1d_uneven": ((3, 13), lambda: maps(nn.Conv1d(3, 4, 1), nn.Conv1d(4, 5, 3, 2), wide=30)),
    "conv2d": (PLANE, lambda: maps(nn.Conv2d(3, 4, 3, 1, 1), nn.Conv2d(4, 5, (3, 2), (2, 3), (1, 0)), wide=75)),
    "conv2d_large": (PLANE, lambda: maps(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 5, (5, 4), padding=(2, 1)), wide=315)),
    "depthwise": (PLANE, lambda: maps(nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 3, 2, 1, groups=3), wide=60)),
    "depthwise_even": (PLANE, lambda: maps(nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, (2, 5), (1, 3), (1, 2), 1, 3), wide=90)),
    "depthwise1d": (LINE, lambda: maps(nn.Conv1d(3, 3, 1), nn.Conv1d(3, 3, 5, 1, 2, groups=3), wide=36)),
    "depthwise_wide": ((3, 16, 12), lambda: maps(nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 3, 2, 1, groups=3), wide=144)),
    "one_place": (PLANE, lambda: maps(nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Hardswish(), wide=4)),
    "grouped": (PLANE, lambda: maps(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 6, 3, 2, 1, groups=2, bias=False), wide=120)),
    "multiplier": (PLANE, lambda: maps(nn.Conv2d(3, 3, 1), nn.Conv2d(3, 6, 3, groups=3), wide=252)),
    "batch_norm": (PLANE, lambda: maps(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), wide=168)),
    "plain_norm": (LINE, lambda: maps(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4, affine=False), wide=40)),
    "max_pool": (PLANE, lambda: maps(nn.Conv2d(3, 4, 1), nn.MaxPool2d(2), wide=64)),
    "max_pool_overlapping": (PLANE, lambda: maps(nn.Conv2d(3, 4, 1), nn.MaxPool2d(3, 2, 1), wide=80)),
    "max_pool1d": (LINE, lambda: maps(nn.Conv1d(3, 4, 1), nn.MaxPool1d(5), wide=8)),
    "average_pool": (PLANE, lambda: maps(nn.Conv2d(3, 4, 1), nn.AvgPool2d(3, 2, 1), wide=80)),
    "average_pool1d": (LINE, lambda: maps(nn.Conv1d(3, 4, 1), nn.AvgPool1d(12), wide=4)),
    "global_average": (PLANE, lambda: maps(nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d(1), wide=4)),
    "dropout": (LINE, lambda: maps(nn.Conv1d(3, 4, 3), nn.Dropout(0.3), nn.Identity(), wide=40)),
    "residual": (LINE, Residual),
    "gated": (PLANE, Gated),
    "zero_pad": (PLANE, lambda: maps(nn.Conv2d(3, 4, 1), nn.ZeroPad2d((1, 0, 2, 1)), nn.Conv2d(4, 2, 3, 2), wide=40)),
    "stochastic_depth": (PLANE, lambda: maps(nn.Conv2d(3, 4, 1), StochasticDepth(0.4, "row"), wide=288)),
    "stochastic_depth_of_features": ((5,), lambda: maps(nn.Linear(5, 6), StochasticDepth(0.4, "row"), wide=6)),
    **{
        type(layer).__name__: (LINE, lambda layer=layer: maps(nn.Conv1d(3, 4, 1), layer, wide=48))
        for layer in (
            nn.ReLU6(), nn.Hardtanh(-0.5, 0.7), nn.LeakyReLU(0.1), nn.Sigmoid(), nn.Tanh(), nn.SiLU(), nn.GELU(),
            nn.Hardswish(), nn.Hardsigmoid(), nn.ReLU(inplace=True),
        )
    },
}  # fmt: skip
