"""Small channel-masked states: a 5-channel vector (the hand table), and a two-layer net with a flattened head."""

import numpy as np
import pytest

from talaria.model.masks import ChannelLayout, ChannelMask
from talaria.tensors import Tensors


@pytest.fixture
def line() -> ChannelLayout:
    """One tensor ``w`` of five channels, one coordinate each."""
    return ChannelLayout({"g": 5}, {"w": ((("g", 1),),)})


@pytest.fixture
def net() -> tuple[Tensors, ChannelLayout]:
    """Conv 3->6->4 with bias and BatchNorm, a linear layer over the flattened 4x2 map, and an unmasked output bias."""
    g = np.random.default_rng(5)
    shapes = {
        "c1.weight": (6, 3, 3),
        "c1.bias": (6,),
        "c2.weight": (4, 6, 3),
        "bn.weight": (4,),
        "bn.running_var": (4,),
        "fc.weight": (2, 8),
        "fc.bias": (2,),
    }
    shared = {k: g.standard_normal(s, np.float32) for k, s in shapes.items()}
    shared["bn.running_var"] = np.abs(shared["bn.running_var"])
    a, b = (("a", 1),), (("b", 1),)
    layout = ChannelLayout(
        {"a": 6, "b": 4},
        {
            "c1.weight": (a, (), ()),
            "c1.bias": (a,),
            "c2.weight": (b, a, ()),
            "bn.weight": (b,),
            "bn.running_var": (b,),
            "fc.weight": ((), (("b", 2),)),
        },
    )
    return shared, layout


@pytest.fixture
def masks(net: tuple[Tensors, ChannelLayout]) -> list[ChannelMask | None]:
    """Five clients: three different masks, one repeated, one client without."""
    _, layout = net
    m1 = ChannelMask(layout, {"a": (0, 2, 5), "b": (1, 3)})
    m2 = ChannelMask(layout, {"a": (0, 1, 2, 3, 4, 5), "b": (0, 1)})
    m3 = ChannelMask(layout, {"a": (2,), "b": (0, 1, 2, 3)})
    return [m1, m2, None, m3, ChannelMask(layout, dict(m1.kept))]
