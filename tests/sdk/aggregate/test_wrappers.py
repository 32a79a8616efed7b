"""Server optimizers and wrappers: closed forms, what stays, what is refused."""

import math

import numpy as np
import pytest
from tolerance import roundings

from talaria import tensors
from talaria.aggregate.fedopt import ServerAdam, ServerMomentum
from talaria.aggregate.masked import MaskedMean
from talaria.aggregate.partial_sum import partial_sum
from talaria.aggregate.robust.median import Median
from talaria.aggregate.wrappers import Clipped, clipped, innermost
from talaria.errors import AggregationError, ConfigError
from talaria.model.masks import ChannelLayout, ChannelMask
from talaria.tensors import Array, Tensors, equal
from talaria.types import Update, as_delta


def array(values: object) -> Array:
    return np.array(values, np.float32)


def step(value: float, *, weight: float = 1.0, client: str = "a", base_version: int = 0) -> Update:
    return Update({"w": array([value, 0.0])}, weight=weight, client=client, base_version=base_version, kind="delta")


@pytest.fixture
def shared() -> Tensors:
    return {"w": array([1.0, -0.0])}


def test_momentum_by_hand(shared: Tensors) -> None:
    rule = ServerMomentum(inner=MaskedMean(), beta=0.5, lr=0.1)
    state = rule.init(shared)
    seen = []
    for _ in range(3):
        shared, state = rule.apply(shared, state, [step(1.0)])
        seen.append(shared["w"][0].item())
    # The momentum is 1, then 1.5, then 1.75.
    assert seen == pytest.approx([1.1, 1.25, 1.425])
    assert state["momentum/w"][0].item() == pytest.approx(1.75)


def test_adam_by_hand(shared: Tensors) -> None:
    rule = ServerAdam(inner=MaskedMean(), lr=0.1, beta1=0.9, beta2=0.99, tau=0.01)
    state = rule.init(shared)
    assert state["variance/w"].tolist() == pytest.approx([1e-4, 1e-4])
    m, v, x = 0.0, 1e-4, 1.0
    for delta in (1.0, -0.5, 0.25):
        shared, state = rule.apply(shared, state, [step(delta)])
        m, v = 0.9 * m + 0.1 * delta, 0.99 * v + 0.01 * delta**2
        x += 0.1 * m / (math.sqrt(v) + 0.01)
        assert shared["w"][0].item() == pytest.approx(x, rel=1e-5)
    assert state["momentum/w"][0].item() == pytest.approx(m, rel=1e-5)


@pytest.mark.parametrize("rule", [ServerMomentum(inner=MaskedMean()), ServerAdam(inner=MaskedMean())])
def test_what_nobody_moves_keeps_its_bits_and_moments(rule: ServerMomentum | ServerAdam) -> None:
    layout = ChannelLayout({"g": 3}, {"w": ((("g", 1),),)})
    shared = {"w": array([1.0, 1e-42, -0.0])}
    state = rule.init(shared)
    whole = [Update({"w": np.ones(3, np.float32)}, weight=1, kind="delta")]
    shared, state = rule.apply(shared, state, whole)
    part = [Update({"w": np.ones(1, np.float32)}, weight=1, kind="delta", mask=ChannelMask(layout, {"g": (0,)}))]
    new, after = rule.apply(shared, state, part)
    assert tensors.equal({"w": new["w"][1:]}, {"w": shared["w"][1:]})
    assert np.array_equal(after["momentum/w"][1:], state["momentum/w"][1:])
    assert new["w"][0] != shared["w"][0]
    still, same = rule.apply(shared, state, [])
    assert tensors.equal(still, shared)
    assert tensors.equal(same, state)


def test_server_steps_leave_statistics_and_counters_to_inner() -> None:
    """Momentum on a shrinking variance would carry it below zero."""
    shared = {"w": np.ones(1, np.float32), "bn.running_var": array([1.0]), "seen": np.array(3)}
    rule = ServerMomentum(inner=MaskedMean(), beta=0.99)
    state = rule.init(shared)
    assert "momentum/bn.running_var" not in state
    for var in (0.5, 0.01, 0.01, 0.01):
        sent = {"w": np.zeros(1, np.float32), "bn.running_var": array([var]), "seen": np.array(9)}
        shared, state = rule.apply(shared, state, [Update(sent, weight=1)])
        assert shared["bn.running_var"].item() == pytest.approx(var)
    assert shared["seen"].item() == 9


def test_server_steps_pass_the_intersection_on() -> None:
    layout = ChannelLayout({"g": 2}, {"w": ((("g", 1),),)})
    rule = ServerMomentum(inner=MaskedMean(mode="intersection"))
    shared = {"w": np.zeros(2, np.float32)}
    new, _ = rule.apply(
        shared,
        rule.init(shared),
        [Update({"w": np.ones(1, np.float32)}, weight=1, mask=ChannelMask(layout, {"g": (1,)}))],
    )
    assert new["mask/g"].tolist() == [0, 1]
    assert new["w"].tolist() == [0, 1]


def test_a_step_out_of_range_is_refused() -> None:
    rule, shared = ServerMomentum(inner=MaskedMean(), lr=1e3), {"w": np.zeros(1, np.float32)}
    with pytest.raises(AggregationError, match="lower lr"):
        rule.apply(shared, rule.init(shared), [Update({"w": array([1e38])}, weight=1)])


def test_clipping_shortens_long_steps_only() -> None:
    shared = {"a": array([1.0, 0.0]), "b": array([1.0])}
    far = Update({"a": array([4.0, 0.0]), "b": array([5.0])}, weight=1)
    near = clipped(shared, far, 1.0)
    assert roundings(near.tensors["a"], array([1.6, 0.0])) <= 16
    assert roundings(near.tensors["b"], array([1.8])) <= 16
    assert clipped(shared, far, 5.0) is far
    delta = Update(tensors.minus(far.tensors, shared), weight=1, kind="delta")
    short = clipped(shared, delta, 1.0)
    assert math.hypot(*short.tensors["a"].tolist(), *short.tensors["b"].tolist()) == pytest.approx(1.0)
    new, _ = Clipped(inner=MaskedMean(), norm=1.0).apply(shared, {}, [far])
    assert roundings(new["b"], array([1.8])) <= 16


def test_clipping_measures_against_the_masked_shared_state() -> None:
    layout = ChannelLayout({"g": 3}, {"w": ((("g", 1),),)})
    mask = ChannelMask(layout, {"g": (0, 2)})
    shared = {"w": array([10.0, 99.0, 20.0])}
    new, _ = Clipped(inner=MaskedMean(), norm=1.0).apply(
        shared, {}, [Update({"w": array([10.0, 22.0])}, weight=1, mask=mask)]
    )
    assert new["w"].tolist() == [10.0, 99.0, 21.0]


def test_as_delta_is_the_difference_to_the_download() -> None:
    update = Update({"w": array([3.0])}, weight=1)
    assert as_delta(update, {"w": array([1.0])}).tensors["w"].item() == 2.0
    assert as_delta(update, {"w": array([1.0])}).kind == "delta"
    delta = update.but(kind="delta")
    assert as_delta(delta, {"w": array([1.0])}) is delta


def test_innermost() -> None:
    rule = Median(f=1)
    assert innermost(Clipped(inner=ServerMomentum(inner=rule), norm=1)) is rule


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ServerMomentum(inner=MaskedMean(), beta=0.0), "beta=0.0"),
        (lambda: ServerMomentum(inner=MaskedMean(), beta=1.0), "beta=1.0"),
        (lambda: ServerMomentum(inner=MaskedMean(), lr=0), "lr=0"),
        (lambda: ServerMomentum(inner=MaskedMean), "is not an aggregator"),
        (lambda: ServerMomentum(inner="mean"), "is not an aggregator"),
        (lambda: ServerAdam(inner=MaskedMean(), tau=0), "tau=0"),
        (lambda: ServerAdam(inner=MaskedMean(), beta2=1.0), "beta2=1.0"),
        (lambda: ServerAdam(inner=MaskedMean(), lr=math.inf), "lr=inf"),
        (lambda: Clipped(inner=MaskedMean(), norm=0.0), "norm=0.0"),
        (lambda: Clipped(inner=MaskedMean(), norm=math.inf), "norm=inf"),
    ],
)
def test_options_out_of_range_are_refused(make: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()  # type: ignore[operator]


def test_truth_values_that_an_own_algorithm_shares_travel_as_differences_too() -> None:
    """As a network's mask of inputs does where all of its state is shared: where one says true, it is true."""
    shared = {"w": array([1.0]), "mask": np.array([True, True, False, False])}
    sent = Update({"w": array([3.0]), "mask": np.array([True, False, True, False])}, 1.0)
    whole, _ = MaskedMean().apply(shared, {}, [sent])
    delta = as_delta(sent, shared)
    for updates in ([delta], partial_sum(shared, [delta], "site").updates()):
        assert equal(MaskedMean().apply(shared, {}, updates)[0], whole)
