"""torchvision's backbones, imported when asked for; the optional extra is ``talaria[vision]``."""

from collections.abc import Sequence
from typing import Any

from torch.nn import Module

from talaria.errors import ConfigError


def resnet18(input_shape: Sequence[int], classes: int) -> Module:
    """ResNet-18 (He et al. 2016)."""
    return _backbone("resnet18", input_shape, classes)


def mobilenet_v3_small(input_shape: Sequence[int], classes: int) -> Module:
    """MobileNetV3-small (Howard et al. 2019)."""
    return _backbone("mobilenet_v3_small", input_shape, classes)


def efficientnet_b0(input_shape: Sequence[int], classes: int) -> Module:
    """EfficientNet-B0 (Tan and Le 2019)."""
    return _backbone("efficientnet_b0", input_shape, classes)


def _backbone(name: str, input_shape: Sequence[int], classes: int) -> Module:
    """The torchvision network ``name`` with random weights and ``classes`` outputs, for (3, H, W) images."""
    if len(input_shape) != 3 or input_shape[0] != 3 or min(input_shape) < 1:
        raise ConfigError(f"{name}: input_shape={tuple(input_shape)} must be (3, height, width)")
    model: Module = getattr(_models(), name)(weights=None, num_classes=classes)
    return model


def _models() -> Any:
    try:
        from torchvision import models
    except ImportError as error:
        raise ConfigError(
            f"torchvision cannot be imported ({error}); install the extra: pip install 'talaria[vision]'"
        ) from error
    return models
