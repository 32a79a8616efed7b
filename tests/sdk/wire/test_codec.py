"""Codecs: what goes in comes out, as near as the codec promises, in bytes that never vary."""

from __future__ import annotations

import hashlib
from dataclasses import replace

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
from talaria.wire.codec import (
    Limits,
    as_decoded,
    decode_tensors,
    decode_update,
    encode_tensors,
    encode_update,
    schema_of,
)
from talaria.wire.compression import MAGIC, squeeze, unsqueeze, zstd
from talaria.wire.tensor_codecs import Codec, bfloat16_of, float32_of, to_planes

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


def dense(seed: int = 0) -> tree.Tensors:
    shapes = {"conv.weight": (10, 6, 5), "conv.bias": (10,), "fc.weight": (3, 40), "scale": ()}
    return normal(shapes, seed)


def normal(shapes, seed: int = 0) -> tree.Tensors:
    draw = np.random.default_rng(seed)
    return {name: np.asarray(draw.standard_normal(shape), np.float32) for name, shape in shapes.items()}


def compact(tensors, mask=MASK):
    found = {}
    for name, value in tensors.items():
        found[name] = value
        for dim, at in enumerate(mask.indices.get(name, ())):
            found[name] = found[name] if at is None else found[name].take(at, dim)
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
        assert np.all(np.abs(got.tensors[name] - value) <= error * np.abs(value) + 1e-7)
        assert got.tensors[name].dtype == value.dtype


def test_int8_is_within_half_a_step_of_each_channels_own_scale():
    value = np.float32([[1.0, -2.0, 0.5], [1000.0, 0.0, -127.0]])
    sent = an_update(tensors={"w": value}, mask=None)
    got = decode_update(encode_update(sent, "int8"), schema=schema_of({"w": value})).tensors["w"]
    steps = np.array([[2.0], [1000.0]]) / 127
    assert np.all(np.abs(got - value) <= steps / 2 * 1.0001)
    assert got[1, 0] == 1000.0
    assert got[1, 1] == 0.0


def test_int8_of_zeros_and_of_the_smallest_numbers_stays_finite():
    value = np.float32([[0.0, 0.0], [1e-44, -1e-44]])
    sent = an_update(tensors={"w": value}, mask=None)
    got = decode_update(encode_update(sent, "int8"), schema=schema_of({"w": value})).tensors["w"]
    assert np.array_equal(got, np.zeros((2, 2)))


def test_topk_keeps_the_largest_and_only_them():
    value = np.float32([0.5, -3.0, 0.25, 2.0, 0.0, -0.125, 1.0, 0.75, 0.0, 0.0])
    sent = an_update(tensors={"w": value}, mask=None)
    got = decode_update(encode_update(sent, "topk:0.2"), schema=schema_of({"w": value})).tensors["w"]
    assert got.tolist() == [0, -3.0, 0, 2.0, 0, 0, 0, 0, 0, 0]
    with pytest.raises(ConfigError, match="delta"):
        encode_update(sent.but(kind="value"), "topk")


def test_integers_and_truths_are_never_rounded():
    tensors = {"mask/conv": np.arange(300).astype(np.uint8), "n": np.array([2**40]), "t": np.array([True])}
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
    tensors = normal(shapes, seed)
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
@example(tensors={"|q": ((2, 3), np.float32), "head|i": ((), np.int64)})
@given(
    tensors=st.dictionaries(
        st.text(min_size=1, max_size=20).filter(lambda n: n != "__metadata__" and n.isprintable()),
        st.tuples(SHAPES, st.sampled_from([np.float32, np.float64, np.uint16, np.int64, np.uint8])),
        max_size=5,
    )
)
def test_a_state_comes_back_from_flash_and_opens_in_safetensors(tensors):
    draw = np.random.default_rng(0)
    state = {n: np.asarray(draw.random(shape) * 100, dtype) for n, (shape, dtype) in tensors.items()}
    data = encode_tensors(state)
    assert tree.equal(decode_tensors(data, schema=None), state)
    assert tree.equal(decode_tensors(data, schema=schema_of(state)), state)
    opened = safetensors.torch.load(data)
    assert {n for n, v in opened.items() if v.dtype == torch.bfloat16} == {n for n in state if state[n].dtype == "u2"}
    bits = {n: v.view(torch.uint16) if v.dtype == torch.bfloat16 else v for n, v in opened.items()}
    assert tree.equal({n: v.numpy() for n, v in bits.items()}, state)


def test_a_body_in_a_lossy_codec_keeps_its_schema():
    model = dense()
    got = decode_tensors(encode_tensors(model, codec="bf16", compress=True), schema=SCHEMA)
    assert schema_of(got) == SCHEMA
    rounded = torch.from_numpy(model["conv.weight"]).to(torch.bfloat16).float()
    assert np.array_equal(got["conv.weight"], rounded.numpy())
    with pytest.raises(ConfigError, match="topk"):
        encode_tensors(model, codec="topk")


def test_a_tensor_that_is_a_strided_view_is_stored_by_value():
    value = np.arange(12.0).reshape(3, 4).T
    assert np.array_equal(decode_tensors(encode_tensors({"w": value}), schema=None)["w"], value)


# ---- bytes that stay -------------------------------------------------------------------------------------

NEGATIVE_ZERO, LEAST, TINY = -0.0, 2.0**-149, 2.0**-126


def bits(dtype, *values):
    """Their bytes as whole numbers."""
    return np.array(values, dtype).view(f"u{np.dtype(dtype).itemsize}").tolist()


# What version 0.1 wrote, with torch's arithmetic: a fleet's devices are not updated on the same day.
@pytest.mark.parametrize(
    ("dtype", "values", "half", "upper"),
    [
        ("f4", [0.0, NEGATIVE_ZERO, 1.0, -2.5], [0, 0x8000, 0x3C00, 0xC100], [0, 0x8000, 0x3F80, 0xC020]),
        ("f4", [LEAST, -LEAST, TINY, 2.0**-24], [0, 0x8000, 0, 1], [0, 0x8000, 0x0080, 0x3380]),
        # Halfway goes to even; a little above goes up.
        ("f4", [1 + 2**-11, 1 + 3 * 2**-11], [0x3C00, 0x3C02], [0x3F80, 0x3F80]),
        ("f4", [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20], [0x3C04, 0x3C0C, 0x3C04], [0x3F80, 0x3F82, 0x3F81]),
        ("f4", [65504.0, -65519.0, 2.0**-25, 2.0**-25 + 2.0**-40], [0x7BFF, 0xFBFF, 0, 1], None),
        # float64 is rounded to float32 first: what lies a little above halfway may then lie on it.
        ("f8", [1 + 2**-11 + 2**-40, 1 + 2**-8 + 2**-40], [0x3C00, 0x3C04], [0x3F80, 0x3F80]),
        ("f2", [1.0, 2.0**-24, 65504.0], [0x3C00, 1, 0x7BFF], [0x3F80, 0x3380, 0x4780]),
    ],
)
def test_half_precision_is_rounded_as_it_always_was(dtype, values, half, upper):
    value = np.array(values, dtype)
    assert to_planes("w", value, Codec.parse("fp16"))["w|h"].view(np.uint16).tolist() == half
    if upper is not None:
        assert to_planes("w", value, Codec.parse("bf16"))["w|b"].tolist() == upper


def test_bfloat16_is_torchs_to_the_bit():
    found = np.random.default_rng(5).integers(0, 2**32, 100_000, np.uint32).view(np.float32)
    special = [np.nan, np.inf, -np.inf, np.finfo(np.float32).max, 3.3895314e38, 3.39e38, 0.0, NEGATIVE_ZERO]
    other_nans = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001], np.uint32).view(np.float32)
    value = np.concatenate([np.array(special, np.float32), other_nans, found])
    want = torch.from_numpy(value).to(torch.bfloat16)
    got, nan = bfloat16_of(value), np.isnan(value)
    assert np.array_equal(got[~nan], want.view(torch.uint16).numpy()[~nan])
    assert np.isnan(float32_of(got)[nan]).all()
    assert np.array_equal(float32_of(got)[~nan], want.float().numpy()[~nan])


@pytest.mark.parametrize("codec", ["fp16", "bf16"])
def test_what_half_precision_cannot_hold_is_refused(codec):
    with pytest.raises(ConfigError, match="beyond the range"):
        to_planes("w", np.array([1.0, 3.4e38], np.float32), Codec.parse(codec))


def test_levels_are_rounded_to_even_halves():
    value = np.array([[127, 0.5, 1.5, -2.5, 63.5], [-254, 1, 3, 5, 253]], np.float32)
    planes = to_planes("w", value, Codec.parse("int8"))
    assert planes["w|q"].tolist() == [[127, 0, 2, -2, 64], [-127, 0, 2, 2, 126]]
    assert planes["w|s"].tolist() == [1, 2]
    small = to_planes("w", np.array([[TINY, -TINY], [LEAST, 0], [NEGATIVE_ZERO, 0]], np.float32), Codec.parse("int8"))
    assert small["w|q"].tolist() == [[0, 0]] * 3
    assert small["w|s"].tolist() == [1, 1, 1]
    ends = to_planes("w", np.array(-3.4e38, np.float32), Codec.parse("int8"))
    assert (ends["w|q"].tolist(), ends["w|q"].shape, ends["w|s"].shape) == (-127, (), (1,))


def test_of_equal_magnitudes_the_first_are_kept():
    value = np.array([1, -2, 2, -1, 2, 1, -2, 0], np.float32)
    kept = [to_planes("w", value, Codec("topk", k / 8))["w|i"].tolist() for k in range(1, 9)]
    assert kept == [
        [1], [1, 2], [1, 2, 4], [1, 2, 4, 6], [0, 1, 2, 4, 6], [0, 1, 2, 3, 4, 6], [0, 1, 2, 3, 4, 5, 6], list(range(8))
    ]  # fmt: skip
    zeros = to_planes("w", np.array([0.0, NEGATIVE_ZERO, 0.0], np.float32), Codec("topk", 0.5))
    assert (zeros["w|i"].tolist(), bits(np.float16, *zeros["w|v"])) == ([0, 1], [0, 0x8000])


# sha256 of updates as version 0.1 wrote them.
@pytest.mark.parametrize(
    ("codec", "digest"),
    [
        ("raw", "312802e65d02875b6c434d4276d2cb905cfe0702846589e9c7bd8f4e21f30244"),
        ("fp16", "af882ed51fb052946d870fd90f1894d72f6a04b16554d7d0dbf20c3adef6637c"),
        ("bf16", "57824dcba06567a406f40a7fc4900ecd054e63d40439fa9366e56cb475d28507"),
        ("int8", "9549bc799967e80591c7374fee8c44af78dc3561b50e6eb2f581f779c3cdae50"),
        ("topk:0.1", "052e06ab10a724a8c7539eb6cd8a4d064392ad24fc90186df08662f089ea1a69"),
    ],
)
def test_an_update_has_the_bytes_that_it_always_had(codec, digest):
    whole = np.arange(240, dtype=np.float32)
    ties = {
        "conv.weight": np.sin(whole[:90].astype(np.float64)).round(3).astype(np.float32).reshape(3, 6, 5),
        "conv.bias": np.array([0.5, NEGATIVE_ZERO, LEAST], np.float32),
        "fc.weight": ((whole[:36] % 7 - 3) / 8).reshape(3, 12),
        "scale": np.array(1.5, np.float64),
        "count": np.array(7),
    }
    assert hashlib.sha256(encode_update(an_update(tensors=ties), codec, compress=False)).hexdigest() == digest


# ---- masks -----------------------------------------------------------------------------------------------


@given(st.sets(st.integers(0, 9), min_size=1), st.sets(st.integers(0, 2), min_size=1), st.sampled_from(["raw", "int8"]))
@settings(max_examples=40, deadline=None)
def test_any_mask_comes_back_as_its_bitmaps(conv, fc, codec):
    mask = ChannelMask(LAYOUT, {"conv": tuple(sorted(conv)), "fc": tuple(sorted(fc))})
    sent = an_update(tensors=compact(dense(), mask), mask=mask)
    got = decode_update(encode_update(sent, codec), schema=SCHEMA, layout=LAYOUT)
    assert got.mask.kept == mask.kept
    assert schema_of(got.tensors) == schema_of(sent.tensors)


@pytest.mark.parametrize("mask", [None, MASK])
@pytest.mark.parametrize("codec", ["raw", "fp16", "bf16", "int8", "topk:0.5"])
def test_a_tensor_may_be_called_mask(codec, mask):
    """Its planes look like bitmaps of layers that are called b, h, q, s, i or v."""
    tensors = {**dense(), "mask": np.ones(4, np.float32)}
    own = tensors if mask is None else compact(tensors)
    update = Update(tensors=own, weight=1.0, client="a", base_version=0, kind="delta", mask=mask, metrics={})
    found = decode_update(encode_update(update, codec), schema=schema_of(tensors), layout=LAYOUT)
    assert found.mask == mask
    assert np.allclose(found.tensors["mask"], 1) or codec.startswith("topk")


def test_a_tensor_called_mask_beside_a_layer_of_one_letter_is_refused_with_the_mend():
    layout = ChannelLayout(sizes={"b": 3}, axes={"b.weight": ((("b", 1),), ())})
    own = {"b.weight": np.ones((2, 2), np.float32), "mask": np.ones(4, np.float32)}
    mask = ChannelMask(layout, {"b": (0, 2)})
    update = Update(tensors=own, weight=1.0, client="a", base_version=0, kind="delta", mask=mask, metrics={})
    with pytest.raises(ConfigError, match=r"tensor 'mask' and the mask of layer 'b'.*another name"):
        encode_update(update)


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


def test_what_the_probe_holds_whole_is_packed_once(monkeypatch):
    packed = []

    def counted(data, word):
        packed.append(len(data))
        return zstd.compress(data, 1)

    wanted = squeeze(bytes(40_000))
    monkeypatch.setattr("talaria.wire.compression.framed", counted)
    assert squeeze(bytes(40_000)) == wanted
    assert packed == [40_000]


@example(piece=MAGIC, times=1, word=1)
@example(piece=MAGIC + b"\x00", times=3, word=4)
@given(piece=st.binary(max_size=2000), times=st.integers(1, 200), word=st.sampled_from([1, 2, 4]))
def test_squeezed_bytes_come_back(piece, times, word):
    data = piece * times
    assert unsqueeze(squeeze(data, word), len(data)) == data


@pytest.mark.parametrize(("codec", "word"), [("raw", 4), ("fp16", 2), ("bf16", 2)])
def test_numbers_are_fewer_bytes_than_in_a_frame_of_all_and_come_back(codec, word):
    weights = {"w": np.random.default_rng(0).normal(0, 0.1, (300, 301)).astype(np.float32)}
    sent = Update(tensors=weights, weight=1.0, client="a", base_version=0, kind="delta", mask=None, metrics={})
    plain, packed = encode_update(sent, codec, compress=False), encode_update(sent, codec)
    assert len(packed) < 0.95 * min(len(plain), len(zstd.compress(plain, 1)))
    assert unsqueeze(packed, len(plain)) == plain
    assert unsqueeze(squeeze(plain + b"end", word), len(plain) + 3) == plain + b"end"


def test_what_is_mostly_zero_is_no_more_than_in_a_frame_of_all():
    weights = np.zeros(100_000, np.float32)
    weights[::5] = np.random.default_rng(0).normal(0, 0.1, 20_000)
    data = weights.tobytes()
    assert len(squeeze(data, 4)) == len(zstd.compress(data, 1))


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


@pytest.mark.parametrize(("more", "right"), [(0, True), (99, False), (100, True), (101, True), (102, False)])
def test_behind_a_frame_are_the_other_bytes_of_words_or_nothing(more, right):
    data = zstd.compress(bytes(100)) + bytes(more)
    if right:
        assert unsqueeze(data, 1000) == bytes(100 + more)
    else:
        with pytest.raises(WireError, match=f"{more} bytes follow the zstd frame of 100"):
            unsqueeze(data, 1000)


@pytest.mark.parametrize("more", [1, 3, 100])
def test_nothing_follows_an_empty_frame(more):
    with pytest.raises(WireError, match=f"{more} bytes follow the zstd frame of 0"):
        unsqueeze(zstd.compress(b"") + bytes(more), 1000)


@pytest.mark.parametrize(
    ("more", "right"), [(200, False), (203, False), (299, False), (303, True), (304, False), (400, False)]
)
def test_words_have_two_bytes_or_four(more, right):
    data = zstd.compress(bytes(100)) + bytes(more)
    if right:
        assert unsqueeze(data, 100 + more) == bytes(100 + more)
        with pytest.raises(TooLarge, match=f"{100 + more} bytes, above {99 + more}"):
            unsqueeze(data, 99 + more)
    else:
        with pytest.raises(WireError, match=f"{more} bytes follow"):
            unsqueeze(data, 1000)


# ---- refused before sending ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "codec", "what"),
    [
        ({"tensors": {"w": np.array([float("nan")])}, "mask": None}, "raw", "NaN"),
        ({"tensors": {"w": np.array([1e6])}, "mask": None}, "fp16", "bf16"),
        ({"tensors": {"a|b": np.ones(1, np.float32)}, "mask": None}, "raw", r"may not hold '\|'"),
        ({"tensors": {"w": np.ones(1, np.complex64)}, "mask": None}, "raw", "complex64"),
        ({"metrics": {"loss": float("inf")}}, "raw", "finite"),
        ({"metrics": {"loss": "low"}}, "raw", "finite numbers"),
        ({}, "zip", "unknown"),
        ({}, "topk:0.0", "unknown"),
        ({}, "int8:0.5", "unknown"),
    ],
)
def test_what_cannot_be_sent_is_refused_by_the_sender(change, codec, what):
    with pytest.raises(ConfigError, match=what):
        encode_update(an_update(**change), codec)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"weight": 1e9},
        {"metrics": {f"m{i}": 1.0 for i in range(65)}},
        {"metrics": {"a\n": 1.0}},
        {"client": "c" * 65},
        {"tensors": {"stranger": np.ones(3, np.float32)}, "mask": None},
        {"tensors": {name: np.ones(2, np.float32) for name in SCHEMA}, "mask": None},
        {"tensors": {n: np.full(s.shape, 1e6).astype(s.dtype) for n, s in SCHEMA.items()}, "mask": None},
        {"tensors": {n: np.zeros(s.shape, np.float64) for n, s in SCHEMA.items()}, "mask": None},
    ],
    ids=["fine", "weight", "metrics", "name", "client", "stranger", "shape", "norm", "dtype"],
)
def test_without_its_bytes_an_update_is_what_they_say_or_refused_likewise(change, whole):
    own = {"tensors": dense(), "mask": None} if whole else {}
    update, how = an_update(**{**own, **change}), {"schema": SCHEMA, "layout": LAYOUT}
    if change:
        with pytest.raises(WireError) as wanted:
            decode_update(encode_update(update), **how)
        with pytest.raises(WireError) as found:
            as_decoded(update, **how)
        assert str(found.value) == str(wanted.value)
        return
    one, other = decode_update(encode_update(update), **how), as_decoded(update, **how)
    assert tree.equal(one.tensors, other.tensors)
    assert replace(one, tensors={}) == replace(other, tensors={})


def test_the_limits_of_an_update_hold():
    data = encode_update(an_update())
    with pytest.raises(TooLarge):
        decode_update(data, schema=SCHEMA, layout=LAYOUT, limits=Limits(total=1000))
    with pytest.raises(WireError, match="weight"):
        decode_update(data, schema=SCHEMA, layout=LAYOUT, limits=Limits(max_weight=36))
    with pytest.raises(WireError, match="came from 'dev-2'"):
        decode_update(data, schema=SCHEMA, layout=LAYOUT, client="dev-2")
