"""Small networks for sensors and thumbnails, in plain layers that export and prune cleanly.

Widths are multiples of 32, so that half of the channels is still a whole block of 8 or 16; poolings have fixed
kernels, worked out from the input's size, because an exported model wants static ones.
"""

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor
from torch.nn import (
    AvgPool1d,
    BatchNorm1d,
    Conv1d,
    Conv2d,
    Flatten,
    Linear,
    MaxPool2d,
    Module,
    ReLU,
    Sequential,
)

from talaria.errors import ConfigError

IMU_BLOCKS = ((64, 7, 2), (64, 5, 2), (128, 5, 1), (128, 3, 2))
"""Output channels, kernel and stride of each block of :func:`imu_cnn`."""


def imu_cnn(input_shape: Sequence[int], classes: int) -> Module:
    """A 1D CNN with BatchNorm for (channels, length) windows, such as (6, 100): six axes, two seconds at 50 Hz.

    Four blocks of convolution, BatchNorm and ReLU halve the time axis three times; their mean over time feeds
    ``head``. 114,951 parameters for (6, 100) and 7 classes.
    """
    channels, length = _dims("imu_cnn", input_shape, "(channels, length)", 2)
    if length < 8:
        raise ConfigError(f"imu_cnn: input_shape={tuple(input_shape)} is too short; give windows of 8 steps or more")
    layers: OrderedDict[str, Module] = OrderedDict()
    width = channels
    for number, (out, kernel, stride) in enumerate(IMU_BLOCKS, 1):
        layers[f"conv{number}"] = Conv1d(width, out, kernel, stride, padding=kernel // 2, bias=False)
        layers[f"bn{number}"] = BatchNorm1d(out)
        layers[f"relu{number}"] = ReLU()
        width = out
        length = (length - 1) // stride + 1
    layers["pool"] = AvgPool1d(length)
    layers["flatten"] = Flatten()
    layers["head"] = Linear(width, classes)
    return Sequential(layers)


STEP_BLOCKS = ((64, 7, 1), (64, 5, 2), (128, 5, 4), (128, 3, 8))
"""Output channels, kernel and dilation of each block of :func:`steps_cnn`."""


def steps_cnn(input_shape: Sequence[int], classes: int) -> Module:
    """Classes of each step of (channels, length) recordings: (N, length, classes).

    Four blocks of convolution, BatchNorm and ReLU with wider and wider holes keep the time axis, and see 23 steps to
    each side; ``head`` reads each step. 114,951 parameters for 6 channels and 7 classes.
    """
    width, _ = _dims("steps_cnn", input_shape, "(channels, length)", 2)
    layers: OrderedDict[str, Module] = OrderedDict()
    for number, (out, kernel, dilation) in enumerate(STEP_BLOCKS, 1):
        padding = dilation * (kernel // 2)
        layers[f"conv{number}"] = Conv1d(width, out, kernel, padding=padding, dilation=dilation, bias=False)
        layers[f"bn{number}"] = BatchNorm1d(out)
        layers[f"relu{number}"] = ReLU()
        width = out
    layers["turned"] = StepsFirst()
    layers["head"] = Linear(width, classes)
    return Sequential(layers)


class StepsFirst(Module):
    """(N, channels, length) as (N, length, channels)."""

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        return x.transpose(1, 2)


def fmnist_cnn(input_shape: Sequence[int], classes: int) -> Module:
    """Two 5x5 convolutions and two linear layers, as in McMahan et al. 2017 but without padding; 582,026 parameters
    for (1, 28, 28) and 10 classes."""
    channels, height, width = _dims("fmnist_cnn", input_shape, "(channels, height, width)", 3)
    if min(height, width) < 16:
        raise ConfigError(f"fmnist_cnn: input_shape={tuple(input_shape)} is too small; give maps of 16x16 or more")
    flat = 64 * _twice_pooled(height) * _twice_pooled(width)
    return Sequential(
        OrderedDict(
            conv1=Conv2d(channels, 32, 5),
            relu1=ReLU(),
            pool1=MaxPool2d(2),
            conv2=Conv2d(32, 64, 5),
            relu2=ReLU(),
            pool2=MaxPool2d(2),
            flatten=Flatten(),
            fc1=Linear(flat, 512),
            relu3=ReLU(),
            head=Linear(512, classes),
        )
    )


def mlp(input_shape: Sequence[int], classes: int) -> Module:
    """Two hidden layers of 128 and 64 over the flattened input of any shape."""
    features = 1
    for n in input_shape:
        features *= n
    return Sequential(
        OrderedDict(
            flatten=Flatten(),
            fc1=Linear(features, 128),
            relu1=ReLU(),
            fc2=Linear(128, 64),
            relu2=ReLU(),
            head=Linear(64, classes),
        )
    )


def _twice_pooled(size: int) -> int:
    return ((size - 4) // 2 - 4) // 2


def _dims(name: str, shape: Sequence[int], words: str, dims: int) -> tuple[int, ...]:
    if len(shape) != dims:
        raise ConfigError(f"{name}: input_shape={tuple(shape)} must be {words}; reshape the windows")
    return tuple(shape)
