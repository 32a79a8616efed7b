"""Masks between their forms, and tensors between global and compact coordinates, by hand and at random."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from talaria import tensors
from talaria.bitmaps import indices_of
from talaria.errors import ModelError
from talaria.model import masks
from talaria.model.masks import ChannelLayout, ChannelMask

LAYOUT = ChannelLayout(
    sizes={"a": 3, "b": 10},
    axes={
        "a.weight": ((("a", 1),), ()),
        "a.bias": ((("a", 1),),),
        "b.weight": ((("b", 1),), (("a", 2),)),
        "c.weight": ((), (("a", 1), ("b", 1))),
    },
)


def _dense():
    return {
        "a.weight": np.arange(6.0).reshape(3, 2),
        "a.bias": np.arange(3.0),
        "b.weight": np.arange(60.0).reshape(10, 6),
        "c.weight": np.arange(26.0).reshape(2, 13),
        "free": np.ones(4),
    }


MASK = ChannelMask(LAYOUT, {"a": (0, 2), "b": (1, 9)})


@st.composite
def random_masks(draw):
    kept = {}
    for group, size in LAYOUT.sizes.items():
        kept[group] = tuple(sorted(draw(st.sets(st.integers(0, size - 1), min_size=1))))
    return ChannelMask(LAYOUT, kept)


def test_gather_by_hand():
    small = masks.gather(_dense(), MASK)
    assert small["a.weight"].tolist() == [[0, 1], [4, 5]]
    assert small["a.bias"].tolist() == [0, 2]
    # Each channel of a flattened map spans two neighbouring columns: channels 0 and 2 are columns 0, 1, 4, 5.
    assert small["b.weight"].tolist() == [[6, 7, 10, 11], [54, 55, 58, 59]]
    # A concatenation: a's columns 0..2, then b's 3..12.
    assert small["c.weight"].tolist() == [[0, 2, 4, 12], [13, 15, 17, 25]]
    assert small["free"].tolist() == [1, 1, 1, 1]


def test_scatter_by_hand_leaves_the_rest_bitwise():
    into = {"a.bias": np.array([-1.0, float("nan"), -3.0]), "free": np.zeros(4)}
    out = masks.scatter({"a.bias": np.array([5.0, 6.0])}, MASK, into)
    assert out["a.bias"][0] == 5
    assert np.isnan(out["a.bias"][1])
    assert out["a.bias"][2] == 6
    assert out["free"] is into["free"]
    assert into["a.bias"][0] == -1


def test_masked_dense_twin_by_hand():
    twin = masks.apply_dense(_dense(), MASK)
    assert twin["a.bias"].tolist() == [0, 0, 2]
    assert twin["a.weight"].tolist() == [[0, 1], [0, 0], [4, 5]]
    assert twin["b.weight"][1].tolist() == [6, 7, 0, 0, 10, 11]
    assert not twin["b.weight"][0].any()


@given(random_masks())
@settings(deadline=None)
def test_all_forms_of_a_mask_are_one(mask):
    data = masks.pack(mask)
    assert [indices_of(data[:1], LAYOUT.sizes["a"]), indices_of(data[1:], LAYOUT.sizes["b"])] == [
        set(mask.kept["a"]),
        set(mask.kept["b"]),
    ]
    forms = masks.as_tensors(mask)
    assert set(forms) == {"mask/a", "mask/b"}
    assert masks.from_tensors(LAYOUT, {**forms, "other": np.ones(1)}).digest == mask.digest


@given(random_masks(), random_masks())
@settings(deadline=None)
def test_shrink_is_gather_by_the_smaller_mask(first, second):
    kept = {g: tuple(sorted(set(first.kept[g]) & set(second.kept[g]))) for g in LAYOUT.sizes}
    both = ChannelMask(LAYOUT, {g: common or first.kept[g] for g, common in kept.items()})
    dense = _dense()
    small = masks.shrink(masks.gather(dense, first), first, both)
    assert tensors.equal(small, masks.gather(dense, both))
    assert both.within(first)


@given(random_masks())
@settings(deadline=None)
def test_the_full_mask_changes_nothing(mask):
    dense = _dense()
    full = LAYOUT.full()
    assert tensors.equal(masks.gather(dense, full), dense)
    assert tensors.equal(masks.apply_dense(dense, full), dense)
    assert mask.within(full)
    assert masks.key_of(full) == masks.key_of(None) == "", "who keeps all is of one class with who has no mask"
    assert (masks.key_of(mask) == "") == (mask == full)


@pytest.mark.parametrize(
    "change",
    [
        {"mask/a": np.array([1, 2, 0], np.uint8)},
        {"mask/a": np.array([1, 1, 0])},
        {"mask/a": np.ones(4, np.uint8)},
        {"mask/a": np.zeros(3, np.uint8)},
        {"mask/odd": np.ones(3, np.uint8)},
    ],
    ids=["not 0 or 1", "wrong dtype", "wrong length", "nothing kept", "unknown group"],
)
def test_damaged_mask_tensors_are_refused(change):
    with pytest.raises(ModelError):
        masks.from_tensors(LAYOUT, {**masks.as_tensors(MASK), **change})


def test_a_missing_group_is_refused():
    forms = masks.as_tensors(MASK)
    del forms["mask/b"]
    with pytest.raises(ModelError, match="'b'"):
        masks.from_tensors(LAYOUT, forms)


def test_wrong_shapes_and_names_are_refused():
    with pytest.raises(ModelError, match="unpruned"):
        masks.gather({"a.bias": np.ones(2)}, MASK)
    with pytest.raises(ModelError, match="unpruned"):
        masks.gather({"a.bias": np.ones((3, 1))}, MASK)
    with pytest.raises(ModelError, match="keeps"):
        masks.scatter({"a.bias": np.ones(3)}, MASK, _dense())
    with pytest.raises(ModelError, match="keeps"):
        masks.scatter({"free": np.ones(3)}, MASK, _dense())
    with pytest.raises(ModelError, match="no dense counterpart"):
        masks.scatter({"new": np.ones(3)}, MASK, _dense())


def test_growing_back_is_refused():
    with pytest.raises(ModelError, match="only shrink"):
        masks.shrink(masks.gather(_dense(), MASK), MASK, LAYOUT.full())


@pytest.mark.parametrize("kept", [(), (0, 0), (2, 1), (-1,), (3,)])
def test_a_mask_is_valid_from_birth(kept):
    with pytest.raises(ModelError, match="group 'a'"):
        ChannelMask(LAYOUT, {"a": kept, "b": (0,)})
