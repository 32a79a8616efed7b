"""FedBuff: closed forms, and what no buffer would hold."""

import numpy as np
import pytest
from tolerance import roundings

from talaria import tensors
from talaria.aggregate.fedbuff import FedBuff, discount, least
from talaria.aggregate.fedopt import ServerMomentum
from talaria.aggregate.masked import MaskedMean
from talaria.aggregate.robust.bucketing import Bucketed
from talaria.aggregate.robust.centered_clipping import CenteredClip
from talaria.aggregate.robust.krum import Krum, MultiKrum
from talaria.aggregate.robust.median import Median, TrimmedMean
from talaria.errors import AggregationError, ConfigError
from talaria.model.masks import ChannelLayout, ChannelMask
from talaria.tensors import Tensors
from talaria.types import Update

LINE = ChannelLayout({"g": 3}, {"w": ((("g", 1),),)})


def delta(value: float | list[float], client: str, base_version: int = 0, weight: float = 1.0) -> Update:
    values = value if isinstance(value, list) else [value]
    return Update(
        {"w": np.array(values, np.float32)}, weight=weight, client=client, base_version=base_version, kind="delta"
    )


def at(version: int, rule: FedBuff, shared: Tensors) -> Tensors:
    return rule.init(shared) | {"version": np.array(version)}


def test_staleness_discounts() -> None:
    assert [discount(t, 0.5) for t in range(4)] == pytest.approx([1, 0.70711, 0.57735, 0.5], abs=1e-5)
    assert [discount(t, 0) for t in range(4)] == [1, 1, 1, 1]


@pytest.mark.parametrize(("normalise", "expected"), [("damped", 1.471405), ("convex", 2.0)])
def test_normalisations_by_hand(normalise: str, expected: float) -> None:
    """Deltas 1, 2, 4 that are 0, 1 and 3 versions late."""
    rule = FedBuff(capacity=3, normalise=normalise)
    shared = {"w": np.zeros(1, np.float32)}
    sent = [delta(1.0, "a", 3), delta(2.0, "b", 2), delta(4.0, "c", 0)]
    new, state = rule.apply(shared, at(3, rule, shared), sent)
    assert new["w"].item() == pytest.approx(expected, abs=5e-6)  # six digits on paper
    assert state["version"].item() == 4


def test_a_full_fresh_buffer_is_synchronous_averaging() -> None:
    g = np.random.default_rng(0)
    shared = {"w": g.standard_normal(50, np.float32)}
    sent = [delta(g.standard_normal(50).tolist(), c, 0, n) for c, n in (("a", 1), ("b", 7), ("c", 3))]
    rule = FedBuff(capacity=3)
    new, _ = rule.apply(shared, rule.init(shared), sent)
    want, _ = MaskedMean().apply(shared, {}, sent)
    assert tensors.equal(new, want)
    values = [u.but(tensors={"w": shared["w"] + u.tensors["w"]}, kind="value") for u in sent]
    new, _ = rule.apply(shared, rule.init(shared), values)
    assert roundings(new["w"], want["w"]) <= 32


def test_a_server_rate_scales_the_step() -> None:
    rule = FedBuff(capacity=1, lr=0.5)
    shared = {"w": np.zeros(1, np.float32)}
    shared, state = rule.apply(shared, rule.init(shared), [delta(2.0, "a", 0)])
    assert shared["w"].item() == 1.0
    shared, state = rule.apply(shared, state, [delta(2.0, "b", 1)])
    assert shared["w"].item() == 2.0
    assert state["version"].item() == 2


def test_what_is_as_old_as_it_may_be_counts() -> None:
    rule = FedBuff(capacity=1, max_staleness=2)
    shared = {"w": np.zeros(1, np.float32)}
    new, _ = rule.apply(shared, at(5, rule, shared), [delta(1.0, "a", 3)])
    assert new["w"].item() == pytest.approx(3**-0.5)


@pytest.mark.parametrize("base_version", [-1, 6])
def test_a_base_that_never_was_is_refused(base_version: int) -> None:
    rule = FedBuff(capacity=1)
    shared = {"w": np.zeros(1, np.float32)}
    with pytest.raises(AggregationError, match=rf"'eve': base_version={base_version} must be a version within 0..5"):
        rule.apply(shared, at(5, rule, shared), [delta(1.0, "eve", base_version)])


def test_old_values_are_refused() -> None:
    """A delta against the current version instead of the downloaded one would undo the others' work."""
    rule = FedBuff(capacity=1)
    shared = {"w": np.zeros(1, np.float32)}
    with pytest.raises(AggregationError, match="values of version 4 cannot be compared with version 5"):
        rule.apply(shared, at(5, rule, shared), [delta(1.0, "a", 4).but(kind="value")])


def masked(client: str, kept: tuple[int, ...], values: list[float], base_version: int = 0) -> Update:
    return delta(values, client, base_version).but(mask=ChannelMask(LINE, {"g": kept}))


def test_masked_deltas_by_hand() -> None:
    shared = {"w": np.full(3, 10.0, np.float32)}
    sent = [masked("a", (0, 1), [1.0, 1.0], 3), masked("b", (1,), [5.0], 0)]
    damped = FedBuff(capacity=2)
    new, _ = damped.apply(shared, at(3, damped, shared), sent)
    assert new["w"].tolist() == [11.0, 10 + (1 + 0.5 * 5) / 2, 10.0]
    convex = FedBuff(capacity=2, normalise="convex")
    new, _ = convex.apply(shared, at(3, convex, shared), sent)
    assert new["w"].tolist() == pytest.approx([11.0, 10 + (1 + 2.5) / 1.5, 10.0])


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ([], "no update to fold"),
        ([delta(1.0, "b", 5), delta(1.0, "a", 5)], "'a' came after 'b'"),
        ([delta(1.0, "a", 4), delta(1.0, "a", 5)], "'a' came after 'a'; sort them, one of each client"),
        ([delta(1.0, "a", 2)], "'a': 3 versions behind; at most 2 count"),
        ([delta(1.0, "a", 6)], "base_version=6 must be a version within 0..5"),
        ([delta(1.0, "a", 4).but(kind="value")], "values of version 4 cannot be compared"),
    ],
)
def test_a_fold_refuses_what_no_buffer_would_hold(sent: list[Update], message: str) -> None:
    rule, shared = FedBuff(max_staleness=2), {"w": np.zeros(1, np.float32)}
    with pytest.raises(AggregationError, match=message):
        rule.apply(shared, at(5, rule, shared), sent)


def test_a_robust_inner_sees_through_an_attacker_in_the_buffer() -> None:
    shared = {"w": np.zeros(1, np.float32)}
    sent = [delta(1.0, "a"), delta(1.1, "b"), delta(0.9, "c"), delta(1.05, "d"), delta(1e6, "x")]
    for inner in (Median(f=1), TrimmedMean(f=1), MultiKrum(f=1, m=3), CenteredClip(f=1)):
        rule = FedBuff(capacity=5, inner=inner)
        new, _ = rule.apply(shared, rule.init(shared), sent)
        assert 0.9 <= new["w"].item() <= 1.2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FedBuff(capacity=0), "capacity=0"),
        (lambda: FedBuff(a=-0.1), "a=-0.1"),
        (lambda: FedBuff(lr=0), "lr=0"),
        (lambda: FedBuff(max_staleness=-1), "max_staleness=-1"),
        (lambda: FedBuff(normalise="sum"), "normalise='sum'"),
        (lambda: FedBuff(capacity=6, inner=Krum(f=2)), "capacity=6 must be at least 7"),
        (lambda: FedBuff(capacity=4, inner=Bucketed(inner=Median(f=1))), "capacity=4 must be at least 5"),
        (lambda: FedBuff(capacity=2, inner=ServerMomentum(inner=Median(f=1))), "capacity=2 must be at least 3"),
        (lambda: FedBuff(inner=TrimmedMean(), normalise="convex"), "TrimmedMean ignores weights"),
    ],
)
def test_options_out_of_range_are_refused(make: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()  # type: ignore[operator]


def test_least() -> None:
    assert [least(r) for r in (MaskedMean(), Median(f=2), Krum(f=2), FedBuff())] == [1, 5, 7, 1]
