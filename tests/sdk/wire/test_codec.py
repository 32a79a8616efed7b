"""Codecs: what goes in comes out, as near as the codec promises, in bytes that never vary."""

from __future__ import annotations

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from talaria import tensors as tree
from talaria.errors import ConfigError, TooLarge, WireError
from talaria.model.masks import ChannelLayout, ChannelMask
from talaria.types import Update
from talaria.wire.codec import Limits, decode_tensors, decode_update, encode_tensors, encode_update, schema_of
from talaria.wire.compression import MAGIC, squeeze, unsqueeze

LAYOUT = ChannelLayout(
    sizes={"conv": 10, "fc": 3},
    axes={
        "conv.weight": ((("conv", 1),), (), ()),
        "conv.bias": ((("conv", 1),),),
        "fc.weight": ((("fc", 1),), (("conv", 4),)),
    },
)
KEPT = {"conv": (0, 3, 9), "fc": (0, 1, 2)}
MASK = ChannelMask(LAYOUT, KEPT)


def dense(seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "conv.weight": torch.randn(10, 6, 5, generator=g),
        "conv.bias": torch.randn(10, generator=g),
        "fc.weight": torch.randn(3, 40, generator=g),
        "scale": torch.randn((), generator=g),
    }


def compact(tensors, mask=MASK):
    found = {}
    for name, value in tensors.items():
        found[name] = value
        for dim, at in enumerate(mask.indices.get(name, ())):
            found[name] = found[name] if at is None else found[name].index_select(dim, at)
    return found


SCHEMA = schema_of(dense())


def an_update(**changes) -> Update:
    base = Update(
        tensors=compact(dense()),
        weight=37.0,
        client="dev-1",
        base_version=4,
        kind="delta",
        mask=MASK,
        metrics={"loss": 0.25},
    )
    return base.but(**changes)


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_a_raw_update_comes_back_bit_by_bit(masked, compress):
    sent = an_update() if masked else an_update(tensors=dense(), mask=None)
    data = encode_update(sent, compress=compress)
    got = decode_update(data, schema=SCHEMA, layout=LAYOUT, client="dev-1")
    assert tree.equal(got.tensors, sent.tensors)
    assert (got.weight, got.client, got.base_version, got.kind, got.metrics) == (
        37.0,
        "dev-1",
        4,
        "delta",
        {"loss": 0.25},
    )
    assert (got.mask is None) == (not masked)
    if masked:
        assert got.mask.kept == KEPT
    assert encode_update(got, compress=compress) == data


@pytest.mark.parametrize(("codec", "error"), [("fp16", 2**-11), ("bf16", 2**-8)])
def test_half_precision_is_within_half_a_unit_of_the_last_place(codec, error):
    sent = an_update()
    got = decode_update(encode_update(sent, codec), schema=SCHEMA, layout=LAYOUT)
    for name, value in sent.tensors.items():
        assert torch.all((got.tensors[name] - value).abs() <= error * value.abs() + 1e-7)
        assert got.tensors[name].dtype == value.dtype


def test_int8_is_within_half_a_step_of_each_channels_own_scale():
    value = torch.tensor([[1.0, -2.0, 0.5], [1000.0, 0.0, -127.0]])
    sent = an_update(tensors={"w": value}, mask=None)
    got = decode_update(encode_update(sent, "int8"), schema=schema_of({"w": value})).tensors["w"]
    steps = torch.tensor([[2.0], [1000.0]]) / 127
    assert torch.all((got - value).abs() <= steps / 2 * 1.0001)
    assert got[1, 0] == 1000.0
    assert got[1, 1] == 0.0


def test_int8_of_zeros_and_of_the_smallest_numbers_stays_finite():
    value = torch.tensor([[0.0, 0.0], [1e-44, -1e-44]])
    sent = an_update(tensors={"w": value}, mask=None)
    got = decode_update(encode_update(sent, "int8"), schema=schema_of({"w": value})).tensors["w"]
    assert torch.equal(got, torch.zeros(2, 2))


def test_topk_keeps_the_largest_and_only_them():
    value = torch.tensor([0.5, -3.0, 0.25, 2.0, 0.0, -0.125, 1.0, 0.75, 0.0, 0.0])
    sent = an_update(tensors={"w": value}, mask=None)
    got = decode_update(encode_update(sent, "topk:0.2"), schema=schema_of({"w": value})).tensors["w"]
    assert got.tolist() == [0, -3.0, 0, 2.0, 0, 0, 0, 0, 0, 0]
    with pytest.raises(ConfigError, match="delta"):
        encode_update(sent.but(kind="value"), "topk")


def test_integers_and_truths_are_never_rounded():
    tensors = {"mask/conv": torch.arange(300).to(torch.uint8), "n": torch.tensor([2**40]), "t": torch.tensor([True])}
    sent = an_update(tensors=tensors, mask=None)
    got = decode_update(encode_update(sent, "int8"), schema=schema_of(tensors))
    assert tree.equal(got.tensors, tensors)


SHAPES = st.lists(st.integers(1, 5), max_size=3).map(tuple)


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.dictionaries(st.text("abc.", min_size=1, max_size=6), SHAPES, max_size=4),
    codec=st.sampled_from(["raw", "fp16", "bf16", "int8", "topk:0.3"]),
    seed=st.integers(0, 100),
    compress=st.booleans(),
)
def test_any_update_comes_back_and_its_bytes_do_not_vary(shapes, codec, seed, compress):
    g = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}
    sent = Update(tensors=tensors, weight=1.5, kind="delta")
    data = encode_update(sent, codec, compress=compress)
    reordered = sent.but(tensors=dict(reversed(tensors.items())))
    assert encode_update(reordered, codec, compress=compress) == data
    got = decode_update(data, schema=schema_of(tensors))
    assert schema_of(got.tensors) == schema_of(tensors)
    again = decode_update(encode_update(got, "raw"), schema=schema_of(tensors))
    assert tree.equal(again.tensors, got.tensors)
    if codec == "raw":
        assert tree.equal(got.tensors, tensors)


@settings(max_examples=60, deadline=None)
@example(tensors={"|q": ((2, 3), torch.float32), "head|i": ((), torch.int64)})
@given(
    tensors=st.dictionaries(
        st.text(min_size=1, max_size=20).filter(lambda n: n != "__metadata__" and n.isprintable()),
        st.tuples(SHAPES, st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8])),
        max_size=5,
    )
)
def test_a_state_comes_back_from_flash_and_opens_in_safetensors(tensors):
    state = {n: (torch.rand(shape) * 100).to(dtype) for n, (shape, dtype) in tensors.items()}
    data = encode_tensors(state)
    assert tree.equal(decode_tensors(data, schema=None), state)
    assert tree.equal(decode_tensors(data, schema=schema_of(state)), state)
    assert tree.equal(safetensors.torch.load(data), state)


def test_a_body_in_a_lossy_codec_keeps_its_schema():
    model = dense()
    got = decode_tensors(encode_tensors(model, codec="bf16", compress=True), schema=SCHEMA)
    assert schema_of(got) == SCHEMA
    assert torch.equal(got["conv.weight"], model["conv.weight"].to(torch.bfloat16).float())
    with pytest.raises(ConfigError, match="topk"):
        encode_tensors(model, codec="topk")


def test_a_tensor_that_is_a_strided_view_is_stored_by_value():
    value = torch.arange(12.0).reshape(3, 4).t()
    assert torch.equal(decode_tensors(encode_tensors({"w": value}), schema=None)["w"], value)


# ---- masks -----------------------------------------------------------------------------------------------


@given(st.sets(st.integers(0, 9), min_size=1), st.sets(st.integers(0, 2), min_size=1), st.sampled_from(["raw", "int8"]))
@settings(max_examples=40, deadline=None)
def test_any_mask_comes_back_as_its_bitmaps(conv, fc, codec):
    mask = ChannelMask(LAYOUT, {"conv": tuple(sorted(conv)), "fc": tuple(sorted(fc))})
    sent = an_update(tensors=compact(dense(), mask), mask=mask)
    got = decode_update(encode_update(sent, codec), schema=SCHEMA, layout=LAYOUT)
    assert got.mask.kept == mask.kept
    assert schema_of(got.tensors) == schema_of(sent.tensors)


def test_a_mask_that_does_not_fit_its_tensors_is_refused():
    wrong = an_update(tensors=compact(dense(), ChannelMask(LAYOUT, {"conv": (0, 1), "fc": (0, 1, 2)})))
    with pytest.raises(WireError, match=r"conv\.weight"):
        decode_update(encode_update(wrong), schema=SCHEMA, layout=LAYOUT)


# ---- compression -----------------------------------------------------------------------------------------


def test_what_does_not_shrink_is_left_as_it_is():
    noise = np.random.default_rng(0).bytes(200_000)
    assert squeeze(noise) is noise
    assert len(squeeze(bytes(200_000))) < 1000
    assert unsqueeze(squeeze(bytes(200_000)), 200_000) == bytes(200_000)
    assert squeeze(b"") == b""


@example(piece=MAGIC, times=1)
@example(piece=MAGIC + b"\x00", times=3)
@given(piece=st.binary(max_size=2000), times=st.integers(1, 200))
def test_squeezed_bytes_come_back(piece, times):
    data = piece * times
    assert unsqueeze(squeeze(data), len(data)) == data


def test_the_cap_counts_what_comes_out():
    packed = squeeze(bytes(100_000))
    with pytest.raises(TooLarge, match="99999"):
        unsqueeze(packed, 99_999)
    with pytest.raises(TooLarge):
        unsqueeze(bytes(100), 99)


@pytest.mark.parametrize("hurt", [lambda d: d[:-1], lambda d: d + b"x", lambda d: d[:8], lambda d: MAGIC + d[:3]])
def test_a_damaged_frame_is_refused(hurt):
    with pytest.raises(WireError):
        unsqueeze(hurt(squeeze(bytes(range(256)) * 500)), 10**6)


# ---- refused before sending ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "codec", "what"),
    [
        ({"tensors": {"w": torch.tensor([float("nan")])}, "mask": None}, "raw", "NaN"),
        ({"tensors": {"w": torch.tensor([1e6])}, "mask": None}, "fp16", "bf16"),
        ({"tensors": {"a|b": torch.ones(1)}, "mask": None}, "raw", r"\|"),
        ({"tensors": {"w": torch.ones(1, dtype=torch.complex64)}, "mask": None}, "raw", "complex64"),
        ({"metrics": {"loss": float("inf")}}, "raw", "finite"),
        ({}, "zip", "unknown"),
        ({}, "topk:0.0", "unknown"),
        ({}, "int8:0.5", "unknown"),
    ],
)
def test_what_cannot_be_sent_is_refused_by_the_sender(change, codec, what):
    with pytest.raises(ConfigError, match=what):
        encode_update(an_update(**change), codec)


def test_the_limits_of_an_update_hold():
    data = encode_update(an_update())
    with pytest.raises(TooLarge):
        decode_update(data, schema=SCHEMA, layout=LAYOUT, limits=Limits(total=1000))
    with pytest.raises(WireError, match="weight"):
        decode_update(data, schema=SCHEMA, layout=LAYOUT, limits=Limits(max_weight=36))
    with pytest.raises(WireError, match="came from 'dev-2'"):
        decode_update(data, schema=SCHEMA, layout=LAYOUT, client="dev-2")
