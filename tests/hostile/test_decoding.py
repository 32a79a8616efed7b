"""Attacks on the decoder: each one is refused, by a clear error, before it costs anything."""

from __future__ import annotations

import io
import json
import math
import pickle
import random
import struct
import time
import zipfile
import zlib

import msgpack
import numpy as np
import pytest
import torch

from talaria.errors import TooLarge, WireError
from talaria.model.masks import ChannelLayout, ChannelMask
from talaria.tensors import equal
from talaria.types import Update
from talaria.wire.codec import decode_tensors, decode_update, encode_update, schema_of
from talaria.wire.compression import MAGIC, MAX_WINDOW, unsqueeze, zstd
from talaria.wire.frames import Header, decode_frame, encode_frame
from talaria.wire.messages import decode_message
from talaria.wire.strict_safetensors import pack, unpack
from talaria.wire.tensor_codecs import bfloat16_of

TENSORS = {"body.w": np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6), "body.b": np.zeros(4, np.float32)}
SCHEMA = schema_of(TENSORS)
GOOD = encode_update(Update(tensors=TENSORS, weight=5.0), compress=False)


def decode(data):
    return decode_update(data, schema=SCHEMA)


def header_of(data):
    (size,) = struct.unpack_from("<Q", data)
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def file_of(header, content):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content


def changed(change, content=None):
    """The good update with its header changed in place."""
    header, good = header_of(GOOD)
    result = change(header)
    return file_of(header if result is None else result, good if content is None else content)


def test_the_good_one_passes():
    assert np.array_equal(decode(GOOD).tensors["body.w"], TENSORS["body.w"])
    assert np.array_equal(decode(changed(lambda h: None)).tensors["body.w"], TENSORS["body.w"])


# 1
class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was opened",))


def torch_zip():
    data = io.BytesIO()
    torch.save({"body.w": torch.zeros(4, 6)}, data)
    return data.getvalue()


def npz():
    data = io.BytesIO()
    np.savez(data, a=np.zeros(3))
    return data.getvalue()


@pytest.mark.parametrize(
    ("data", "what"),
    [
        *[(pickle.dumps(Bomb(), protocol), "pickle" if protocol > 1 else "") for protocol in range(6)],
        (torch_zip(), "zip"),
        (npz(), "zip"),
        (b"\x93NUMPY\x01\x00" + bytes(100), "numpy"),
    ],
)
def test_01_pickles_zips_and_torch_files_are_never_opened(refused, data, what):
    assert what in refused(lambda: decode(data))
    assert what in refused(lambda: decode_tensors(data, schema=None))


# 2, 3, 4
def test_02_a_zstd_bomb_that_states_its_size(refused):
    bomb = zstd.compress(bytes(256 * 2**20), 1)
    assert len(bomb) < 20_000
    assert "declares 268435456 bytes" in refused(lambda: decode(bomb))


def test_02_a_zstd_bomb_that_lies_about_its_size(refused):
    bomb = bytearray(zstd.compress(bytes(256 * 2**20), 1))
    assert zstd.get_frame_info(bytes(bomb)).decompressed_size == 256 * 2**20
    at = bomb.index(struct.pack("<I", 256 * 2**20))
    bomb[at : at + 4] = struct.pack("<I", 100_000)
    refused(lambda: unsqueeze(bytes(bomb), 2**20))


def test_03_a_zstd_bomb_that_does_not_state_its_size(refused):
    bomb = zstd.compress(bytes(256 * 2**20), options={zstd.CompressionParameter.content_size_flag: 0})
    assert "does not state its size" in refused(lambda: decode(bomb))


def test_04_a_zstd_window_of_128_mib(refused):
    assert "declares a window of 134217728 bytes" in refused(lambda: unsqueeze(windowed(27, 0), 2**20))


@pytest.mark.parametrize(("log", "eighths", "window"), [(10, 0, 1024), (23, 0, 2**23), (23, 1, 2**23 + 2**20)])
def test_04_a_window_is_read_as_the_format_says(log, eighths, window):
    """An empty block of 1,000 bytes that are not there: refused for that alone where its window is small enough."""
    with pytest.raises((WireError, TooLarge), match="damaged|holds 0" if window <= MAX_WINDOW else str(window)):
        unsqueeze(windowed(log, eighths), 2**20)


def windowed(log, eighths):
    """A frame of 1,000 bytes, of which it has none, with a window of its own (RFC 8878, section 3.1.1.1)."""
    about = bytes([0x40, (log - 10) << 3 | eighths]) + struct.pack("<H", 1000 - 256)
    return MAGIC + about + bytes([1, 0, 0])


# 5, 6
def test_05_a_header_of_one_tib(refused):
    assert "declares a header" in refused(lambda: decode(struct.pack("<Q", 2**40) + bytes(1000)))
    assert "declares a header" in refused(lambda: decode(struct.pack("<Q", 2**64 - 1) + bytes(1000)))


@pytest.mark.parametrize("count", [15_000, 400_000])
def test_06_hundreds_of_thousands_of_empty_tensors(refused, count):
    one = '"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    text = ("{" + ",".join(one % i for i in range(count)) + "}").encode()
    message = refused(lambda: decode(file_of(text, b"")))
    assert "above" in message


# 7, 8, 9, 10, 11
def entry(h, name, **fields):
    h[name] |= fields


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda h: entry(h, "body.w", data_offsets=[0, 96]) or entry(h, "body.b", data_offsets=[0, 16]), "overlap"),
        (lambda h: entry(h, "body.b", data_offsets=[4, 20]), "hole or an overlap|follow"),
        (lambda h: entry(h, "body.w", data_offsets=[96, 0]), "do not hold"),
        (lambda h: entry(h, "body.w", data_offsets=[-96, 0]), "do not hold"),
        (lambda h: entry(h, "body.w", data_offsets=[0, 2**62]), "do not hold"),
        (lambda h: entry(h, "body.w", data_offsets=[0]), "two numbers"),
        (lambda h: entry(h, "body.w", data_offsets=["0", "96"]), "two numbers"),
        (lambda h: entry(h, "body.w", data_offsets=[False, 96]), "two numbers"),
    ],
)
def test_07_offsets_that_overlap_leave_holes_or_lie(refused, change, what):
    message = refused(lambda: decode(changed(change)))
    assert any(word in message for word in what.split("|"))


@pytest.mark.parametrize(
    "shape", [[2**32, 2**32], [2**62, 4], [2**63, 2, 0], [10**300], [65536] * 4, [1] * 9, [2**31, 2**31, 2**31]]
)
def test_08_shapes_whose_product_overflows(refused, shape):
    assert "shape" in refused(lambda: decode(changed(lambda h: entry(h, "body.w", shape=shape))))


@pytest.mark.parametrize("shape", [[-4, -6], [-1], [0, 6], [4.0, 6.0], [True, 24], "46", None, [[4, 6]]])
def test_09_dimensions_that_are_negative_zero_or_no_numbers(refused, shape):
    refused(lambda: decode(changed(lambda h: entry(h, "body.w", shape=shape))))


@pytest.mark.parametrize("name", ["head.weight", "../../etc/passwd", "body.w ", "", "body.w|zz", "x" * 300])
def test_10_a_name_that_is_not_in_the_schema(refused, name):
    refused(lambda: decode(changed(lambda h: h.update({name: h.pop("body.b")}))))


def test_10_a_name_that_stands_twice(refused):
    header, content = header_of(GOOD)
    text = json.dumps(header)
    twice = text[:-1] + ',"body.b":' + json.dumps(header["body.b"]) + "}"
    assert "stands twice" in refused(lambda: decode(file_of(twice.encode(), content)))
    many = ("{" + ",".join(f'"{i}":1' for i in range(60_000)) + ',"0":1}').encode()
    assert "stands twice" in refused(lambda: decode_tensors(file_of(many, b""), schema=None))


def test_10_a_missing_tensor(refused):
    data = encode_update(Update(tensors={"body.w": TENSORS["body.w"]}, weight=1.0))
    assert "'body.b' is missing" in refused(lambda: decode(data))


@pytest.mark.parametrize("dtype", ["F64", "I32", "F16", "float32", "C64", "", None, 3, ["F32"]])
def test_11_another_dtype(refused, dtype):
    refused(lambda: decode(changed(lambda h: entry(h, "body.w", dtype=dtype))))


def test_11_another_dtype_of_the_right_size(refused):
    other = Update(tensors={"body.w": TENSORS["body.w"].view(np.int32), "body.b": TENSORS["body.b"]}, weight=1.0)
    assert "expected float32" in refused(lambda: decode(encode_update(other)))


# 12, 13
@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1a"])
def test_12_deep_nesting_in_a_message(refused, opening):
    deep = opening * 50_000 + b"\x90"
    refused(lambda: decode_message(decode_frame(encode_frame(Header("work", "f"), deep))))


def test_12_deep_nesting_in_a_header(refused):
    deep = b"[" * 400_000 + b"]" * 400_000
    refused(lambda: decode(file_of(deep, b"")))
    refused(lambda: decode(changed(lambda h: {**h, "__metadata__": {"talaria": "[" * 200_000}})))


@pytest.mark.parametrize(
    "declared",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x01",
    ],
)
def test_13_four_billion_entries_declared(refused, declared):
    refused(lambda: decode_message(decode_frame(encode_frame(Header("work", "f"), declared + bytes(100)))))
    refused(lambda: decode_frame(sealed(declared)))


def sealed(head: bytes) -> bytes:
    whole = b"FLF1" + struct.pack("<H", len(head)) + head
    return whole + struct.pack("<I", zlib.crc32(whole))


# 14
def test_14_truncated_or_with_something_behind(refused):
    frame = encode_frame(Header("chunk", "watch", "device"), b"model" * 10)
    for cut in range(len(frame)):
        with pytest.raises(WireError):
            decode_frame(frame[:cut])
    refused(lambda: decode_frame(frame + b"\x00"))
    packed = encode_update(Update(tensors={name: np.zeros_like(v) for name, v in TENSORS.items()}, weight=1.0))
    assert packed.startswith(b"\x28\xb5\x2f\xfd")
    for data in (GOOD, packed):
        for cut in range(len(data)):
            with pytest.raises(WireError):
                decode(data[:cut])
        refused(lambda data=data: decode(data + b"\x00"))
        refused(lambda data=data: decode(data + data))


# 15
def test_15_fuzzed_bytes_never_raise_anything_else():
    rng = random.Random(15)
    packed = encode_update(Update(tensors=TENSORS, weight=5.0, kind="delta"), "int8")
    frame = encode_frame(Header("work", "watch", "device", boot=3), msgpack.packb({"attempt": 1, "model": bytes(32)}))
    end = time.thread_time() + 2
    runs = 0
    while time.thread_time() < end:
        data = bytearray(rng.choice([GOOD, packed, frame]))
        for _ in range(rng.randint(1, 8)):
            at = rng.randrange(len(data))
            match rng.randrange(4):
                case 0:
                    data[at] = rng.randrange(256)
                case 1:
                    del data[at : at + rng.randint(1, 9)]
                case 2:
                    data[at:at] = rng.randbytes(rng.randint(1, 9))
                case _:
                    data[at : at + 4] = rng.choice([b"\xff\xff\xff\xff", bytes(4), b"\x7f\xff\xff\xff"])
            if not data:
                break
        for call in (decode, lambda d: decode_tensors(d, schema=SCHEMA), lambda d: decode_message(decode_frame(d))):
            try:
                call(bytes(data))
            except WireError:
                continue
        runs += 1
    assert runs > 100


# 16, 17, 18
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30, -1e30])
@pytest.mark.parametrize("codec", ["raw", "bf16"])
def test_16_17_18_a_value_that_is_not_finite_or_far_too_large(refused, value, codec):
    planes = {"body.w": np.full((4, 6), 0.5, np.float32), "body.b": np.zeros(4, np.float32)}
    planes["body.w"][2, 3] = value
    if codec == "bf16":
        planes = {name + "|b": bfloat16_of(v) for name, v in planes.items()}
    data = pack(planes, unpack(GOOD, most=9)[1])
    message = refused(lambda: decode(data))
    assert "'body.w' holds" in message


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 2e6, 3e38])
@pytest.mark.parametrize("place", [0, 200_000, -1])
def test_18_one_value_among_many(refused, value, place):
    big = np.zeros(300_001, np.float32)
    big[place] = value
    _, meta = unpack(encode_update(Update(tensors={"w": np.zeros_like(big)}, weight=1.0), compress=False), most=9)
    data = pack({"w": big}, meta)
    what = "a value of magnitude" if np.isfinite(value) else "NaN or infinity"
    assert what in refused(lambda: decode_update(data, schema=schema_of({"w": big})))


@pytest.mark.parametrize(("share", "fits"), [(0.96, True), (0.999, True), (1.001, False)])
def test_18_a_norm_near_the_bound(refused, share, fits):
    many = np.full(1 << 18, share * 1e6 / 512, np.float32)
    data = encode_update(Update(tensors={"w": many}, weight=1.0))
    if fits:
        assert equal(decode_update(data, schema=schema_of({"w": many})).tensors, {"w": many})
    else:
        assert "norm" in refused(lambda: decode_update(data, schema=schema_of({"w": many})))


def test_18_a_norm_that_hides_in_many_values(refused):
    shape = {"w": np.full((1000, 1000), 9e5, np.float32)}
    data = encode_update(Update(tensors=shape, weight=1.0))
    assert "norm" in refused(lambda: decode_update(data, schema=schema_of(shape)))


# 19
@pytest.mark.parametrize("weight", ["0", "-1", "NaN", "Infinity", "1e9", "1e999", "null", '"5"', "true", "[5]"])
def test_19_weights_that_would_tilt_the_mean(refused, weight):
    def change(header):
        about = header["__metadata__"]["talaria"]
        assert '"weight":5.0' in about
        header["__metadata__"]["talaria"] = about.replace('"weight":5.0', f'"weight":{weight}')

    refused(lambda: decode(changed(change)))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"v":2', '"v":1'),
        ('"base_version":0', '"base_version":-1'),
        ('"base_version":0', '"base_version":1.5'),
        ('"kind":"value"', '"kind":"code"'),
        ('"metrics":{}', '"metrics":{"loss":NaN}'),
        ('"metrics":{}', '"metrics":{"loss":"low"}'),
        ('"metrics":{}', '"metrics":[1]'),
        ('"metrics":{}', '"metrics":{"loss":' + "9" * 400 + "}"),
        ('"metrics":{}', '"metrics":{"\\ud800":1}'),
        ('"metrics":{}', '"metrics":{"a\\nb":1}'),
        ('"metrics":{}', '"metrics":{"' + "m" * 65 + '":1}'),
        ('"mask":null', '"mask":"' + "\\ud800" * 64 + '"'),
        ('"mask":null', '"mask":"' + "F" * 64 + '"'),
        ('"client":"device"', '"client":""'),
        ('"client":"device"', '"client":"device","client":"other"'),
        ('"mask":null', '"mask":7'),
        ('"mask":null', '"more":null'),
        ('"mask":null', '"mask":"\ud800"'),
    ],
)
def test_19_other_facts_that_lie(refused, old, new):
    def change(header):
        assert old in header["__metadata__"]["talaria"]
        header["__metadata__"]["talaria"] = header["__metadata__"]["talaria"].replace(old, new)

    refused(lambda: decode(changed(change))).encode()


# 20
LAYOUT = ChannelLayout({"g": 4}, {"body.w": ((("g", 1),), ()), "body.b": ((("g", 1),),)})
HALF = ChannelMask(LAYOUT, {"g": (0, 2)})
MASKED = encode_update(
    Update(tensors={name: v[:2] for name, v in TENSORS.items()}, weight=1.0, mask=HALF), compress=False
)


def with_bitmap(byte):
    entries, meta = unpack(MASKED, most=9)
    planes = {name: e.array() for name, e in entries.items()}
    planes["mask|g"] = np.array(byte if isinstance(byte, list) else [byte], np.uint8)
    return pack(planes, meta)


@pytest.mark.parametrize(
    ("byte", "what"), [(0, "at least one"), (0b10001, "marks one beyond"), (0b11, "digest"), ([5, 0], "bytes")]
)
def test_20_a_mask_that_keeps_nothing_or_what_is_not_there(refused, byte, what):
    assert what in refused(lambda: decode_update(with_bitmap(byte), schema=SCHEMA, layout=LAYOUT))


def test_20_bitmaps_without_a_mask_and_masks_without_a_layout(refused):
    refused(lambda: decode_update(MASKED, schema=SCHEMA))
    other = ChannelLayout({"h": 4}, {"body.w": ((("h", 1),), ()), "body.b": ((("h", 1),),)})
    assert "other names" in refused(lambda: decode_update(MASKED, schema=SCHEMA, layout=other))
    alone = pack(
        {name: e.array() for name, e in unpack(MASKED, most=9)[0].items() if "|" not in name},
        unpack(MASKED, most=9)[1],
    )
    assert "0 groups" in refused(lambda: decode_update(alone, schema=SCHEMA, layout=LAYOUT))
    nothing = pack({**TENSORS, "mask|g": np.ones(1, np.uint8)}, unpack(GOOD, most=9)[1])
    refused(lambda: decode_update(nothing, schema=SCHEMA, layout=LAYOUT))


# 21, 22
def planes(**tensors):
    named = {name.replace("__", "|"): value for name, value in tensors.items()}
    return pack(named, unpack(GOOD, most=9)[1])


ONE = schema_of({"w": np.zeros(10, np.float32)})


@pytest.mark.parametrize(
    ("at", "values"),
    [
        ([3, 3], [1.0, 2.0]),
        ([3, 2], [1.0, 2.0]),
        ([3, 10], [1.0, 2.0]),
        ([-1, 3], [1.0, 2.0]),
        ([3, 2**31 - 1], [1.0, 2.0]),
        ([1, 2], [1.0]),
        (list(range(11)), [1.0] * 11),
        ([], []),
        ([1, 2], [1.0, math.nan]),
        ([1, 2], [math.inf, 1.0]),
    ],
)
def test_21_positions_out_of_range_or_repeated(refused, at, values):
    data = planes(w__i=np.array(at, np.int32), w__v=np.array(values, np.float16))
    refused(lambda: decode_update(data, schema=ONE))


@pytest.mark.parametrize("scale", [math.nan, 0.0, -1.0, math.inf, 1e30])
def test_22_a_scale_that_is_no_number_zero_or_huge(refused, scale):
    data = planes(w__q=np.ones(10, np.int8), w__s=np.array([scale], np.float32))
    assert "scale" in refused(lambda: decode_update(data, schema=ONE))


def test_22_scales_without_levels_and_two_codecs_at_once(refused):
    levels, scale = np.ones(10, np.int8), np.ones(1, np.float32)
    refused(lambda: decode_update(planes(w__q=levels), schema=ONE))
    refused(lambda: decode_update(planes(w=np.ones(10, np.float32), w__s=scale), schema=ONE))
    refused(lambda: decode_update(planes(w=np.ones(10, np.float32), w__q=levels, w__s=scale), schema=ONE))
    refused(lambda: decode_update(planes(w__q=levels, w__s=np.ones(2, np.float32)), schema=ONE))
    refused(lambda: decode_update(planes(w__q=np.full(10, -128, np.int8), w__s=scale), schema=ONE))


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_levels_of_a_tensor_without_values(shape):
    """Nobody sends them in levels; who does, does no harm."""
    empty = schema_of({"w": np.zeros(shape, np.float32)})
    data = planes(w__q=np.ones(shape, np.int8), w__s=np.ones(shape[0], np.float32))
    assert decode_update(data, schema=empty).tensors["w"].shape == shape


def test_a_signalling_nan_is_refused_without_a_word_to_the_log(refused):
    """Arithmetic on one raises a flag that numpy warns of, and warnings are errors in these tests."""
    signalling = np.full(10, 0x7F800001, np.uint32).view(np.float32)
    assert "NaN" in refused(lambda: decode_update(planes(w=signalling), schema=ONE))
    assert "scale" in refused(lambda: decode_update(planes(w__q=np.ones(10, np.int8), w__s=signalling[:1]), schema=ONE))
    half = np.full(10, 0x7C01, np.uint16).view(np.float16)
    assert "NaN" in refused(lambda: decode_update(planes(w__h=half), schema=ONE))


def test_a_zip_slip_in_a_name_is_only_a_name(refused, tmp_path):
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("../../escaped", "x")
    assert "zip" in refused(lambda: decode(data.getvalue()))
    assert list(tmp_path.iterdir()) == []
