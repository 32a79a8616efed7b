"""Networks as people write them train by programs as they do with torch, in whole rounds."""

import math

import numpy as np
import pytest
import torch
from networks import networks
from tolerance import roundings

import talaria
from talaria.data import Client, Federated
from talaria.errors import ModelError
from talaria.model import zoo
from talaria.programs.build import build
from talaria.programs.program import Program
from talaria.types import Samples

tutorials = networks("tutorials")

IMAGE = tutorials.IMAGE
STEPS = 8


def samples(shape, seed):
    """Maps and sequences of numbers; of one dimension, words."""
    rng = np.random.default_rng(seed)
    numbers = rng.standard_normal((12, *shape), np.float32)
    return Samples(
        numbers if len(shape) > 1 else rng.integers(0, 3, (12, *shape)).astype(np.float32), np.arange(12) % 4
    )


def fleet(shape, labels):
    """Two clients of twelve samples, of the first four labels."""
    clients = {n: Client(*(samples(shape, 3 * i + j) for j in range(3))) for i, n in enumerate(("anna", "ben"))}
    return Federated("mine", clients, tuple(labels), shape)


def learned(algorithm, shape, net, engine, labels="abcd", **more):
    """What two rounds of two steps each come to; a small rate, so that both engines' roundings stay roundings."""
    recipe = {"epochs": 1, "batch": 6, "lr": 0.01}
    return talaria.simulate(
        algorithm, fleet(shape, labels), net, rounds=2, recipe=recipe, engine=engine, **more
    ).learned


def assert_both_engines_agree(algorithm, shape, net, **more):
    found, wanted = (learned(algorithm, shape, net, engine, **more) for engine in ("onnx", "torch"))
    most = STEPS * max(math.prod(p.shape[1:]) * 100 for p in net.parameters() if p.dim() > 1)
    for mine, theirs in (
        (found.shared, wanted.shared),
        *((found.private[n], wanted.private[n]) for n in found.private),
    ):
        assert list(mine) == list(theirs)
        for key, value in theirs.items():
            assert mine[key].shape == value.shape
            scale = max(1.0, float(np.abs(value).max(initial=0)))
            assert roundings(mine[key], value, scale=scale) <= most, key
    return found


@pytest.mark.parametrize("how", ["expand", "len", "sizes", "repeat", "longer"])
def test_a_class_token_and_learned_positions_are_written_in_several_ways(how):
    torch.manual_seed(0)
    program = Program(build(zoo.keep(tutorials.ViT(how), IMAGE, 4)))
    assert {"cls_token", "pos_embed"} <= {*program.trained}
    assert program.manifest.parity["program"] <= program.manifest.allowed


@pytest.mark.parametrize(
    ("algorithm", "more"),
    [
        ("fedper", {}),
        ("fedrep", {}),
        ("hermes", {"options": {"threshold": 0.0, "block": 1, "tune_epochs": 1}}),
        ("fedper", {"adapters": "lowrank:rank=2"}),
    ],
    ids=["fedper", "fedrep", "hermes", "adapters"],
)
def test_a_vision_transformer_learns_alike_on_both_engines(algorithm, more):
    torch.manual_seed(0)
    net = tutorials.ViT()
    found = assert_both_engines_agree(algorithm, IMAGE, net, **more)
    masks = [value for name, value in found.private["anna"].items() if name.startswith("mask/")]
    assert any((mask == 0).any() for mask in masks) == (algorithm == "hermes")


@pytest.mark.parametrize(
    ("algorithm", "more"),
    [("fedper", {}), ("hermes", {"options": {"threshold": 0.0, "block": 1, "tune_epochs": 1}})],
    ids=["fedper", "hermes"],
)
def test_long_sums_of_slopes_that_are_alike_learn_alike_on_both_engines(algorithm, more):
    """Their sum over the batch and all places errs by a few roundings more than torch's: each of these was refused."""
    torch.manual_seed(0)
    assert_both_engines_agree(algorithm, (3, 128), tutorials.FullyConvolutional(), labels="abcde", **more)


def test_heads_that_a_mask_leaves_look_back_alike_on_both_engines():
    torch.manual_seed(0)
    options = {"threshold": 0.0, "block": 1, "tune_epochs": 1}
    found = assert_both_engines_agree("hermes", (3, 12), tutorials.LooksBack(), options=options)
    assert any((one == 0).any() for name, one in found.private["anna"].items() if name.endswith("self_attn"))


@pytest.mark.parametrize("name", tutorials.NETS)
def test_an_ordinary_network_learns_alike_on_both_engines(name):
    torch.manual_seed(0)
    shape, make = tutorials.NETS[name]
    assert_both_engines_agree("fedper", shape, make())


@pytest.mark.parametrize(
    ("algorithm", "make"), [("fedrep", tutorials.Compared), ("heart_pfl", tutorials.Level)], ids=["fedrep", "heart_pfl"]
)
def test_a_head_of_functions_learns_alone_and_a_normalized_sequence_is_looked_at(algorithm, make):
    torch.manual_seed(0)
    assert_both_engines_agree(algorithm, (3, 12), make())


def test_attention_is_differentiated_twice_alike_on_both_engines():
    """Torch's fast one is not, so that it is computed by plain operators there."""
    torch.manual_seed(0)
    assert_both_engines_agree("perfedavg", IMAGE, tutorials.ViT(), options={"form": "exact"})


@pytest.mark.parametrize("engine", ["torch", "onnx"])
@pytest.mark.parametrize(
    ("algorithm", "make", "layer"), [("heart_pfl", tutorials.Leftovers, "rest"), ("pfedgm", tutorials.Read, "fc")]
)
def test_a_layer_that_is_looked_at_and_never_called_is_named(algorithm, make, layer, engine):
    with pytest.raises(
        ModelError, match=f"layer '{layer}' is looked at, but no pass calls it; call it, or take it out"
    ):
        learned(algorithm, (3, 12), make(), engine)
