"""Networks that Talaria does not have."""

import torch
from torch import Tensor, nn

from talaria.model.several import Several


class Recurrent(nn.Module):
    """A GRU over (channels, time), and a linear layer called ``answer``."""

    def __init__(self, input_shape, classes, width=12):
        super().__init__()
        self.gru = nn.GRU(input_shape[0], width, batch_first=True)
        self.answer = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.gru(x.transpose(1, 2))
        return self.answer(states.mean(1))


class Block(nn.Module):
    """Two convolutions beside a shortcut, over time."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.first = nn.Conv1d(inputs, outputs, 5, 2, padding=2, bias=False)
        self.norm = nn.BatchNorm1d(outputs)
        self.second = nn.Conv1d(outputs, outputs, 3, padding=1)
        self.shortcut = nn.Conv1d(inputs, outputs, 1, 2)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.second(self.act(self.norm(self.first(x)))) + self.shortcut(x))


class Residual(nn.Module):
    """Two blocks, their mean over time, and a head."""

    def __init__(self, input_shape, classes, width=16):
        super().__init__()
        self.one, self.two = Block(input_shape[0], width), Block(width, 2 * width)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.two(self.one(x)).mean(-1))


class Gated(nn.Module):
    """A convolution, a GRU over what it sees, and two linear layers on its last state."""

    def __init__(self, input_shape, classes, width=16):
        super().__init__()
        self.stem = nn.Conv1d(input_shape[0], width, 5, 2, padding=2)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.between = nn.Linear(width, 32)
        self.act = nn.ReLU()
        self.head = nn.Linear(32, classes)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.gru(self.act(self.stem(x)).transpose(1, 2))
        return self.head(self.act(self.between(states[:, -1])))


class BothWays(nn.Module):
    """Two layers of a GRU over patches of time in both directions, and a head over the last states of the second."""

    kind: type[nn.RNNBase] = nn.GRU

    def __init__(self, input_shape, classes, width=10):
        super().__init__()
        self.patch = nn.Conv1d(input_shape[0], 6, 4, 4)
        self.rnn = self.kind(6, width, 2, batch_first=True, dropout=0.2, bidirectional=True)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        _, last = self.rnn(self.patch(x).transpose(1, 2))
        return self.head(torch.cat((last[-2], last[-1]), dim=1))


class PlainBothWays(BothWays):
    """The same, of a layer without gates."""

    kind = nn.RNN


class LongBothWays(nn.Module):
    """An LSTM over patches of time in both directions, and two linear layers on its mean state and the last ones."""

    def __init__(self, input_shape, classes, width=10):
        super().__init__()
        self.patch = nn.Conv1d(input_shape[0], 6, 4, 4)
        self.rnn = nn.LSTM(6, width, batch_first=True, bidirectional=True)
        self.between, self.act = nn.Linear(2 * width, 12), nn.ReLU()
        self.head = nn.Linear(12, classes)

    def forward(self, x: Tensor) -> Tensor:
        states, (last, _) = self.rnn(self.patch(x).transpose(1, 2))
        return self.head(self.act(self.between(states.mean(1) + torch.cat([last[-2, :, :], last[-1, :, :]], dim=1))))


class Causal(nn.Module):
    """Convolutions that look back alone, and one that goes round."""

    def __init__(self, input_shape, classes, width=16):
        super().__init__()
        self.one, self.two = nn.Conv1d(input_shape[0], width, 3), nn.Conv1d(width, width, 2, dilation=4)
        self.even = nn.Conv1d(width, width, 3, padding="same")
        self.around = nn.Conv1d(width, width, 3, padding=1, padding_mode="circular")
        self.edge, self.act, self.head = nn.ReflectionPad1d((1, 0)), nn.ReLU(), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.one(nn.functional.pad(x, (2, 0))))
        x = self.act(self.even(self.act(self.two(nn.functional.pad(x, (4, 0))))))
        return self.head(self.act(self.around(self.edge(x))).mean(-1))


class Listed(nn.Module):
    """Dilated convolutions, each beside a shortcut, in a list."""

    def __init__(self, input_shape, classes, width=16):
        super().__init__()
        self.inward = nn.Conv1d(input_shape[0], width, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv1d(width, width, 3, padding=2**i, dilation=2**i), nn.GroupNorm(4, width), nn.ReLU())
            for i in range(3)
        )
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inward(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean(-1))


class Attentive(nn.Module):
    """A small transformer over patches of time."""

    def __init__(self, input_shape, classes, width=16):
        super().__init__()
        channels, steps = input_shape
        self.patch = nn.Conv1d(channels, width, 4, 4)
        self.place = nn.Parameter(torch.zeros(1, steps // 4, width))
        self.layer = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.patch(x).transpose(1, 2) + self.place).mean(1))


class Steps(nn.Module):
    """Two convolutions over time, and classes for each step: (N, steps, classes)."""

    def __init__(self, input_shape, classes, width=16):
        super().__init__()
        self.one = nn.Conv1d(input_shape[0], width, 5, padding=2)
        self.norm = nn.BatchNorm1d(width)
        self.two = nn.Conv1d(width, width, 3, padding=1)
        self.act = nn.ReLU()
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act(self.two(self.act(self.norm(self.one(x))))).transpose(1, 2))


class TwoHeads(nn.Module):
    """Two heads over one body, averaged: the second one is the last layer that answers."""

    def __init__(self, input_shape, classes):
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(input_shape[0], 16, 3, padding=1), nn.BatchNorm1d(16), nn.ReLU())
        self.one = nn.Linear(16, classes)
        self.two = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, classes))

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        return (self.one(h.mean(-1)) + self.two(h.amax(-1))) / 2


class Masked(nn.Module):
    """Two convolutions over a recording, their mean over the steps that a mask leaves, and a table beside it."""

    def __init__(self, classes, width=16):
        super().__init__()
        self.one, self.two = nn.Conv1d(6, width, 5, padding=2), nn.Conv1d(width, width, 1)
        self.act = nn.ReLU()
        self.mix = nn.Linear(width + 4, width)
        self.head = nn.Linear(width, classes)

    def forward(self, imu: Tensor, about: Tensor, mask: Tensor) -> Tensor:
        kept = mask.unsqueeze(1)
        seen = self.two(self.act(self.one(imu * kept))) * kept
        mean = seen.sum(-1) / kept.sum(-1).clamp(min=1)
        return self.head(self.act(self.mix(torch.cat([mean, about], 1))))


def masked(input_shape, classes, *, width: int = 16):
    """Three named inputs, one of them a padding mask."""
    return Several(Masked(classes, width), imu=(6, 32), about=(4,), mask=(32,))


def bare(input_shape, classes):
    """The same, but nobody says how its inputs stand side by side."""
    return Masked(classes)


def plain(input_shape, classes, *, width: int = 8):
    """A perceptron of one hidden layer, for tables."""
    return nn.Sequential(nn.Linear(input_shape[0], width), nn.ReLU(), nn.Linear(width, classes))


def headless(input_shape, classes):
    """Its last layer is no linear one."""
    return nn.Sequential(
        nn.Linear(input_shape[0], 8), nn.ReLU(), nn.Unflatten(1, (8, 1)), nn.Conv1d(8, classes, 1), nn.Flatten()
    )


class AnswerFirst(nn.Module):
    """Its head is made first, and it keeps tables of its own: a scale, and places as whole numbers."""

    def __init__(self, input_shape, classes):
        super().__init__()
        self.answer = nn.Linear(8, classes)
        self.one, self.two = nn.Linear(input_shape[0], 8), nn.Linear(8, 8)
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("places", torch.arange(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.answer(torch.relu(self.two(torch.relu(self.one(x)))) * (self.places >= 0)) / self.scale


class TwoAnswers(AnswerFirst):
    """Gives two answers at once."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), x


class Summed(AnswerFirst):
    """Gives one number where three are asked for."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sum(1, keepdim=True)


def text(input_shape, classes):
    """No network at all."""
    return "a network"


def angry(input_shape, classes):
    raise ValueError("not today")


MADE = nn.Linear(4, 3)


def worded(input_shape, classes, kind="wide", what=8):
    """Two linear layers, by options whose names are words that Talaria uses itself."""
    return plain(input_shape, classes, width=what if kind == "wide" else 2)
