"""Small networks, one for each way in which channels are coupled."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn0 = nn.BatchNorm2d(8)
        self.conv1 = nn.Conv2d(8, 12, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(12)
        self.conv2 = nn.Conv2d(12, 8, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(8)
        self.down = nn.Conv2d(8, 16, 1, stride=2)
        self.conv3 = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn0(self.stem(x)))
        x = F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))
        x = F.relu(self.down(x) + self.conv3(x))
        return self.head(x.mean((2, 3)))


class SqueezeExcite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.bn = nn.BatchNorm2d(16)
        self.fc1 = nn.Conv2d(16, 6, 1)
        self.fc2 = nn.Conv2d(6, 16, 1)
        self.project = nn.Conv2d(16, 10, 1)
        self.head = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.hardswish(self.bn(self.conv(x)))
        x = x * torch.sigmoid(self.fc2(F.relu(self.fc1(F.adaptive_avg_pool2d(x, 1)))))
        return self.head(F.adaptive_avg_pool2d(self.project(x), 1).flatten(1))


class Depthwise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Conv2d(3, 12, 1)
        self.bn = nn.BatchNorm2d(12)
        self.depth = nn.Conv2d(12, 12, 3, padding=1, groups=12, bias=False)
        self.act = nn.PReLU(12)
        self.project = nn.Conv2d(12, 8, 1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.depth(F.relu6(self.bn(self.expand(x)))))
        return self.head(self.project(x).mean((2, 3)))


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 24, 3, padding=1, groups=4)
        self.bn2 = nn.BatchNorm2d(24)
        self.conv3 = nn.Conv2d(24, 8, 1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return self.head(self.conv3(x).mean((2, 3)))


class Concat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 8, 3, padding=1)
        self.b = nn.Conv2d(3, 12, 1)
        self.bn = nn.BatchNorm2d(20)
        self.c = nn.Conv2d(20, 10, 3, padding=1)
        self.d = nn.Conv2d(30, 8, 1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        both = F.relu(self.bn(torch.cat([self.a(x), self.b(x)], 1)))
        dense = torch.cat([F.relu(self.c(both)), both], 1)
        return self.head(self.d(dense).mean((2, 3)))


class Flattened(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(3, 8, 3, padding=1)
        self.bn1 = nn.BatchNorm1d(8)
        self.conv2 = nn.Conv1d(8, 10, 3, stride=2, padding=1)
        self.fc = nn.Linear(40, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return self.head(F.relu(self.fc(x.flatten(1))))


IMAGE = (3, 8, 8)
NETS: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "residual": (Residual, IMAGE),
    "squeeze_excite": (SqueezeExcite, IMAGE),
    "depthwise": (Depthwise, IMAGE),
    "grouped": (Grouped, IMAGE),
    "concat": (Concat, IMAGE),
    "flatten": (Flattened, (3, 8)),
}
