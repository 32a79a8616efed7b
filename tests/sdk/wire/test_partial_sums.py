"""Partial sums: folded they are what the flat fleet is, within the roundings that they add; and no lie gets through.

A site's mean is rounded once to the tensor's own dtype (half a unit in the last place), sites are then averaged, which
adds up to no more, and both ways round their result once: three half roundings at the size of the largest value.
"""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerance import roundings

from talaria import tensors
from talaria.aggregate import registry
from talaria.aggregate.masked import MaskedMean
from talaria.aggregate.partial_sum import PartialSum, partial_sum, require_summable
from talaria.errors import AggregationError, ConfigError, TooLarge, WireError
from talaria.model.masks import ChannelLayout, ChannelMask, gathered
from talaria.types import Update
from talaria.wire import strict_safetensors
from talaria.wire.codec import Limits, decode_update, encode_update, schema_of
from talaria.wire.partial_sums import Bounds, decode_partial_sum, encode_partial_sum

LAYOUT = ChannelLayout(
    {"a": 6, "b": 4},
    {"c1": ((("a", 1),), (), ()), "c2": ((("b", 1),), (("a", 1),), ()), "bn.running_var": ((("b", 1),),)},
)
SHAPES = {"c1": (6, 3, 3), "c2": (4, 6, 3), "bn.running_var": (4,), "out": (5,)}
MOST = Bounds(clients=12)


def shared():
    rng = np.random.default_rng(1)
    found = {name: rng.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}
    found["bn.running_var"] = np.abs(found["bn.running_var"])
    return {**found, "seen": np.array(3, np.int64)}


def some_mask(rng):
    kept = {g: tuple(np.flatnonzero(rng.random(n) < 0.6).tolist()) or (n - 1,) for g, n in LAYOUT.sizes.items()}
    return ChannelMask(LAYOUT, kept)


def fleet_of(seed, count, kind="value"):
    """Devices of which some share a mask and some have none."""
    rng = np.random.default_rng(seed)
    choices = [None, some_mask(rng), some_mask(rng), LAYOUT.full()]
    found = []
    for n in range(count):
        mask = choices[rng.integers(len(choices))]
        dense = {k: rng.standard_normal(s, np.float32) for k, s in SHAPES.items()}
        dense["bn.running_var"] = np.abs(dense["bn.running_var"])
        dense["seen"] = np.array(rng.integers(9), np.int64)
        own = gathered(dense, dense, mask)
        found.append(Update(own, float(rng.random() * 50 + 1), f"d{n:02}", 4, kind, mask))
    return found


def travelled(partial):
    data = encode_partial_sum(partial, LAYOUT)
    return decode_partial_sum(data, schema=schema_of(shared()), bounds=MOST, layout=LAYOUT, client=partial.client)


def sites_of(updates, cuts):
    parts = np.split(np.arange(len(updates)), sorted(cuts))
    return [[updates[i] for i in part] for part in parts if len(part)]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    count=st.integers(1, 12),
    cuts=st.sets(st.integers(1, 11), max_size=3),
    kind=st.sampled_from(["value", "delta"]),
    blend=st.booleans(),
)
def test_sites_give_what_the_flat_fleet_gives(seed, count, cuts, kind, blend):
    updates, rule = fleet_of(seed, count, kind), MaskedMean(blend=blend)
    flat, _ = rule.apply(shared(), {}, updates)
    sites = sites_of(updates, {cut for cut in cuts if cut < count})
    partials = [travelled(partial_sum(shared(), site, f"site{n}")) for n, site in enumerate(sites)]
    found, _ = rule.apply(shared(), {}, [update for partial in partials for update in partial.updates()])

    assert sum(partial.clients for partial in partials) == count
    for name in flat:
        sizes = [np.abs(u.tensors[name]).max(initial=0) for u in updates]
        assert roundings(found[name], flat[name], scale=np.abs(shared()[name]).max() + max(sizes)) <= 1.5 + 1e-6, name
    assert found["seen"] == flat["seen"]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), count=st.integers(1, 6))
def test_clients_who_agree_give_back_their_values(seed, count):
    rng = np.random.default_rng(seed)
    value = {k: rng.standard_normal(s, np.float32) for k, s in SHAPES.items()}
    value["bn.running_var"] = np.abs(value["bn.running_var"])
    holders = [None if n % 2 else some_mask(rng) for n in range(count)]
    updates = [
        Update(gathered(value, value, mask), float(rng.random() + 0.1), f"d{n}", mask=mask)
        for n, mask in enumerate([None, *holders])
    ]
    partial = travelled(partial_sum(shared(), updates, "site"))
    new, _ = MaskedMean().apply(shared(), {}, partial.updates())
    assert tensors.equal({k: new[k] for k in SHAPES}, value)


def test_what_a_site_says_has_the_size_of_one_update_and_the_same_bytes_each_time():
    updates = [u.but(mask=None, tensors=fleet_of(9, 1)[0].tensors) for u in fleet_of(3, 8)]
    updates = [u.but(tensors={k: np.resize(v, shared()[k].shape) for k, v in u.tensors.items()}) for u in updates]
    one = encode_partial_sum(partial_sum(shared(), updates, "site"), LAYOUT, compress=False)
    assert one == encode_partial_sum(partial_sum(shared(), updates, "site"), LAYOUT, compress=False)
    assert len(one) < len(encode_update(updates[0], compress=False)) + 512


def test_devices_that_send_as_much_as_each_may_shut_their_site_out_of_nothing():
    """The masks are apart, so that the mean holds all that either sent."""
    halves = [ChannelMask(LAYOUT, {"a": a, "b": b}) for a, b in (((0, 1, 2), (0, 1)), ((3, 4, 5), (2, 3)))]
    found = []
    for n, mask in enumerate(halves):
        own = {name: np.zeros_like(value) for name, value in gathered(shared(), shared(), mask).items()}
        own["c1"][0, 0, 0] = 1e6  # the largest norm that an update may have
        update = Update(own, 8.0, f"d{n}", 4, mask=mask)
        found.append(decode_update(encode_update(update), schema=schema_of(shared()), layout=LAYOUT, client=f"d{n}"))
    assert sorted(travelled(partial_sum(shared(), found, "site")).means["c1"].ravel())[-2:] == [1e6, 1e6]


def test_updates_of_two_versions_and_no_update_at_all_make_no_sum():
    first, second = fleet_of(3, 2)
    with pytest.raises(AggregationError, match="from version 5"):
        partial_sum(shared(), [first, second.but(base_version=5)], "site")
    with pytest.raises(AggregationError, match="no update"):
        partial_sum(shared(), [], "site")


@pytest.mark.parametrize("name", ["median", {"name": "clipped", "norm": 1.0, "inner": "mean"}, "fedbuff",
                                  {"name": "mean", "mode": "intersection"}, {"name": "mean", "weighting": "uniform"},
                                  {"name": "mean", "min_holders": 2}])  # fmt: skip
def test_a_rule_that_needs_single_updates_is_refused(name):
    with pytest.raises(ConfigError, match="gateway: "):
        require_summable(registry.load(name))


@pytest.mark.parametrize("name", ["mean", {"name": "server_adam", "inner": {"name": "mean", "blend": True}}])
def test_a_rule_of_sums_is_taken(name):
    require_summable(registry.load(name))


# -- what is refused on arrival


def planes():
    """A sound partial sum, taken apart: three classes of six clients."""
    entries, meta = strict_safetensors.unpack(encode_partial_sum(a_sum(), LAYOUT), most=4)
    return {name: entry.array() for name, entry in entries.items()}, meta


def a_sum():
    rng = np.random.default_rng(8)
    masks = [None, some_mask(rng), some_mask(rng)]
    own = shared()
    updates = [Update(gathered(own, own, masks[n % 3]), 10.0, f"d{n}", 4, mask=masks[n % 3]) for n in range(6)]
    return partial_sum(own, updates, "site")


def inner(**changes):
    found: PartialSum = a_sum()
    values = {"tensors": found.means, "weight": found.weight, "client": "site", "base_version": 4} | changes
    return np.frombuffer(encode_update(Update(**values)), np.uint8)


def opened(found, meta, bounds=MOST, client="site"):
    data = strict_safetensors.pack(found, meta)
    return decode_partial_sum(data, schema=schema_of(shared()), bounds=bounds, layout=LAYOUT, client=client)


def test_the_sound_one_is_taken():
    assert opened(*planes()).clients == 6


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"clients": np.array([2, 0, 4])}, "at least 1 each"),
        ({"clients": np.array([2, -5, 9])}, "at least 1 each"),
        ({"clients": np.array([2, 2, 2**62])}, "at most 12 together"),
        ({"clients": np.array([2.0, 2.0, 2.0])}, "clients is float64"),
        ({"weights": np.array([20.0, 20.0, np.nan])}, "weighs nan"),
        ({"weights": np.array([20.0, 20.0, np.inf])}, "weighs inf"),
        ({"weights": np.array([20.0, 20.0, -20.0])}, "weighs -20"),
        ({"weights": np.array([20.0, 20.0, 1e9])}, r"weighs 1e\+09"),
        ({"weights": np.array([20.0, 20.0, 21.0])}, "says weight=60"),
        ({"weights": np.zeros((3, 1))}, "0 classes"),
        ({"masks": np.zeros((3, 2), np.uint8)}, "mask"),
        ({"masks": np.full((3, 2), 255, np.uint8)}, "mask"),
        ({"masks": np.zeros((3, 900), np.uint8)}, r"masks is uint8 \(3, 900\)"),
        ({"masks": np.array([[63, 15], [1, 1], [1, 1]], np.uint8)}, "two of its classes"),
        ({"update": np.zeros(9, np.uint8)}, "JSON"),
        ({"update": inner(tensors={**a_sum().means, "out": np.full(5, 2e6, np.float32)})}, "magnitude|norm"),
        ({"update": inner(tensors={**a_sum().means, "out": np.zeros(6, np.float32)})}, "out"),
        ({"update": inner(client="other")}, "other"),
        ({"update": inner(metrics={"a": 1.0})}, "weight=60"),
    ],
)
def test_a_lie_is_refused_with_its_reason(change, reason):
    found, meta = planes()
    with pytest.raises(WireError, match=reason):
        opened({**found, **change}, meta)


def test_it_may_speak_for_no_more_than_it_was_let():
    found, meta = planes()
    with pytest.raises(WireError, match="at most 5 together"):
        opened(found, meta, Bounds(clients=5))
    with pytest.raises(WireError, match="at most 59"):
        opened(found, meta, Bounds(clients=6, samples=59.0))
    with pytest.raises(TooLarge, match="3 classes; 1 to 2"):
        opened(found, meta, Bounds(clients=6, classes=2))
    with pytest.raises(WireError, match="weighs 20"):
        opened(found, meta, Bounds(clients=6, update=Limits(max_weight=9.0)))
    with pytest.raises(WireError, match="version"):
        opened(found, {"talaria-partial": json.dumps({"v": 2})})


def test_a_class_beyond_the_union_is_refused():
    rng = np.random.default_rng(2)
    masks = [some_mask(rng), some_mask(rng)]
    own = shared()
    partial = partial_sum(own, [Update(gathered(own, own, m), 1.0, f"d{n}", mask=m) for n, m in enumerate(masks)], "s")
    assert partial.union is not None
    entries, meta = strict_safetensors.unpack(encode_partial_sum(partial, LAYOUT), most=4)
    found = {name: entry.array() for name, entry in entries.items()}
    found["masks"] = np.array([[63, 15], found["masks"][1]], np.uint8)
    with pytest.raises(WireError, match="its union lacks"):
        opened(found, meta, client="s")
