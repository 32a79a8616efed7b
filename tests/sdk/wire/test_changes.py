"""What changed from one file of tensors to the next: to the byte, few bytes, and nothing is trusted."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from talaria.errors import TooLarge, WireError
from talaria.wire import changes as changes_of
from talaria.wire import strict_safetensors
from talaria.wire.changes import MAGIC, applied, are_changes, changes
from talaria.wire.compression import framed
from talaria.wire.strict_safetensors import DTYPES, pack

HEAD = len(MAGIC) + 64


def model(seed, step=0.0, size=3000):
    rng, later = np.random.default_rng(seed), np.random.default_rng(seed + 1)
    w = rng.standard_normal((size, 3)).astype(np.float32)
    moved = (w + step * later.standard_normal(w.shape)).astype(np.float32)
    return pack({"w": moved, "h": moved[:, 0].astype(np.float16), "n": np.array(seed, np.int64)})


@st.composite
def files(draw):
    """Two files of tensors of the same names, shapes and dtypes, with any bytes for values."""
    shapes = draw(
        st.dictionaries(
            st.text("abw|.", min_size=1, max_size=5),
            st.tuples(st.sampled_from(sorted(set(DTYPES) - {"BOOL"})), st.lists(st.integers(0, 9), max_size=3)),
            max_size=4,
        )
    )
    pair = []
    for _ in range(2):
        tensors = {}
        for name, (dtype, shape) in shapes.items():
            kind = DTYPES[dtype]
            raw = draw(
                st.binary(min_size=int(np.prod(shape)) * kind.itemsize, max_size=int(np.prod(shape)) * kind.itemsize)
            )
            tensors[name] = np.frombuffer(raw, kind).reshape(shape)
        pair.append(pack(tensors, {"said": draw(st.text("0123456789abcdef", min_size=8, max_size=8))}))
    return pair


@settings(deadline=None)
@given(files(), st.sampled_from([1, 7, 1 << 18]))
def test_the_newer_file_comes_back_to_the_byte_whatever_the_values_are(pair, block):
    before, after = pair
    kept = changes_of._PAYS, changes_of._BLOCK
    changes_of._PAYS, changes_of._BLOCK = 1e9, block
    try:
        found = changes(before, after)
        assert found is not None
        assert are_changes(found)
        assert applied(found, before) == after
    finally:
        changes_of._PAYS, changes_of._BLOCK = kept


@pytest.mark.parametrize(("step", "most"), [(0.0, 0.02), (1e-4, 0.6), (1e-2, 0.8)])
def test_near_models_are_few_bytes(step, most):
    before, after = model(3), model(3, step)
    found = changes(before, after)
    assert len(found) < most * len(after)
    assert applied(found, before) == after
    assert changes(before, after) == found, "equal files give equal changes"


def test_not_a_number_and_both_zeros_come_back_as_they_were():
    values = np.array([np.nan, -0.0, 0.0, np.inf, -np.inf, 1e-45] * 500, np.float32)
    before, after = pack({"w": np.zeros_like(values)}), pack({"w": values})
    assert applied(changes(before, after), before) == after


def test_there_are_none_where_they_would_not_pay_or_the_files_are_of_two_forms():
    rng = np.random.default_rng(0)
    noise = [pack({"w": rng.integers(0, 1 << 32, 5000, np.uint32).view(np.int32)}) for _ in range(2)]
    assert changes(*noise) is None
    noise = rng.integers(0, 1 << 32, (2, 320_000), np.uint32)
    noise[:, 150_000:170_000] = 0
    alike = [pack({"w": one.view(np.int32)}) for one in noise]
    assert changes_of.pays(*alike), "the words in the midst, which are looked at first, are the same"
    assert changes(*alike) is None
    assert changes(model(1), model(1, size=3001)) is None
    longer = strict_safetensors.pack({"w": np.zeros(3000, np.float32)}), pack({"w": np.zeros(6000, np.float16)})
    assert changes(*longer) is None


def test_they_are_for_the_one_file_that_they_were_made_for():
    found = changes(model(1), model(1, 1e-4))
    with pytest.raises(WireError, match="another global model than the one that is here"):
        applied(found, model(2))


@settings(deadline=None)
@given(st.data())
def test_damage_is_seen_wherever_it_is(data):
    before = model(1, size=200)
    found = bytearray(changes(before, model(1, 1e-4, size=200)))
    what = data.draw(st.sampled_from(("flip", "cut", "more")))
    if what == "flip":
        found[data.draw(st.integers(0, len(found) - 1))] ^= data.draw(st.integers(1, 255))
    elif what == "cut":
        del found[data.draw(st.integers(0, len(found) - 1)) :]
    else:
        found += data.draw(st.binary(min_size=1, max_size=9))
    with pytest.raises(WireError):
        applied(bytes(found), before)


def test_a_frame_that_declares_more_is_refused_before_more_is_made():
    before = model(1, size=200)
    bomb = framed(bytes(1 << 30)[: 64 << 20])
    with pytest.raises(TooLarge, match="above the limit of"):
        applied(MAGIC + hashlib.sha256(before).digest() + bytes(32) + bomb, before)
    short = framed(b"1234567")
    with pytest.raises(WireError, match="declares 7 bytes, not"):
        applied(MAGIC + hashlib.sha256(before).digest() + bytes(32) + short, before)
    with pytest.raises(WireError, match="a zstd frame is missing"):
        applied(MAGIC + hashlib.sha256(before).digest() + bytes(32), before)
    for few in (b"", MAGIC, MAGIC + bytes(63), before):
        with pytest.raises(WireError, match="no changes"):
            applied(few, before)


def test_a_file_as_anybody_else_writes_it_has_changes_too():
    """Its values need not begin where words of their size do, nor stand in the order of their sizes."""
    head = b'{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},'
    head += b'"w":{"dtype":"F32","shape":[2000],"data_offsets":[3,8003]}}'
    before = len(head).to_bytes(8, "little") + head + bytes(3) + np.arange(2000, dtype=np.float32).tobytes()
    after = before[:-8000] + (np.arange(2000, dtype=np.float32) * np.float32(1.0001)).tobytes()
    assert applied(changes(before, after), before) == after
