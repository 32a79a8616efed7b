"""Networks that Talaria does not have."""

from torch import Tensor, nn


class Recurrent(nn.Module):
    """A GRU over (channels, time), and a linear layer called ``answer``."""

    def __init__(self, input_shape, classes, width=12):
        super().__init__()
        self.gru = nn.GRU(input_shape[0], width, batch_first=True)
        self.answer = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.gru(x.transpose(1, 2))
        return self.answer(states.mean(1))


def plain(input_shape, classes, *, width: int = 8):
    """A perceptron of one hidden layer, for tables."""
    return nn.Sequential(nn.Linear(input_shape[0], width), nn.ReLU(), nn.Linear(width, classes))


def headless(input_shape, classes):
    """Its last layer is no linear one."""
    return nn.Sequential(nn.Linear(input_shape[0], 8), nn.ReLU(), nn.Conv1d(8, classes, 1))


def text(input_shape, classes):
    """No network at all."""
    return "a network"


def angry(input_shape, classes):
    raise ValueError("not today")


MADE = nn.Linear(4, 3)
