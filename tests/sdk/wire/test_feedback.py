"""What a coarse codec leaves out of an update is private state, and reaches the fleet with a later one."""

from dataclasses import replace

import numpy as np
import pytest

from talaria.errors import ConfigError
from talaria.federated import rounds, run_model
from talaria.federated.run import Member, Run
from talaria.model.masks import ChannelLayout, ChannelMask
from talaria.model.spec import ModelSpec
from talaria.planning.plan import Plan
from talaria.simulation.run import simulate
from talaria.tensors import Tensors, is_float
from talaria.types import Recipe, Samples, Update
from talaria.wire import feedback
from talaria.wire.codec import decode_update, encode_update, schema_of

RUN = Run(
    spec=ModelSpec("imu_cnn", (3, 16), 3), algorithm="fedavg", recipe=Recipe(epochs=1, batch=4), rounds=3, codec="int8"
)


def member(plan: Plan | None = None) -> Member:
    x = np.random.default_rng(4).standard_normal((8, 3, 16))
    return Member("anna", Samples.of(x, np.arange(8) % 3), SAMPLE, plan)


SAMPLE = Samples.of(np.zeros((1, 3, 16)), [0])


@pytest.mark.parametrize("codec", ["int8", "topk:0.25", "fp16"])
def test_the_sum_of_what_is_sent_tracks_the_sum_of_what_was_meant(codec):
    draw = np.random.default_rng(3)
    left: Tensors = {}
    meant, arrived = np.zeros(40), np.zeros(40)
    for _ in range(30):
        update = Update(tensors={"w": draw.standard_normal(40, np.float32)}, weight=1.0, kind="delta")
        meant += update.tensors["w"]
        told = feedback.compensate(update, left)
        arrived += decode_update(encode_update(told, codec), schema=schema_of(told.tensors)).tensors["w"]
        left = feedback.remainder(told, codec)
    np.testing.assert_allclose(arrived + left["w"], meant, rtol=0, atol=30 * 2**-23 * (np.abs(meant).max() + 4))


def test_whole_values_are_not_compensated():
    with pytest.raises(ConfigError, match="delta"):
        feedback.compensate(Update(tensors={"w": np.ones(3)}, weight=1.0), {})


@pytest.mark.parametrize("codec", ["int8", "topk:0.1"])
@pytest.mark.parametrize("widths", [None, "half"])
def test_a_round_sends_what_the_last_one_left_out(codec, widths):
    """The second update is what the device learned plus what the codec left out of the first, to the bit."""
    run = replace(RUN, codec=codec)
    layout = run_model.layout_of(run.spec)
    plan = None if widths is None else Plan(widths={g: max(1, n // 2) for g, n in layout.sizes.items()})
    shared, _ = rounds.start(run)
    first, private = rounds.participate(run, member(plan), shared, None, 1)
    left = {k: v for k, v in private.items() if k.startswith(feedback.PREFIX)}
    assert {k[len(feedback.PREFIX) :] for k in left} == {
        k for k, v in first.tensors.items() if is_float(v) and "running" not in k
    }
    assert any(bool(v.any()) for v in left.values())
    assert not any(k.startswith(feedback.PREFIX) for k in first.tensors)

    second, _ = rounds.participate(run, member(plan), shared, private, 2)
    without = {k: v for k, v in private.items() if k not in left}
    plain, _ = rounds.participate(run, member(plan), shared, without, 2)
    for name, value in plain.tensors.items():
        want = value + left[feedback.PREFIX + name] if feedback.PREFIX + name in left else value
        assert np.array_equal(second.tensors[name], want)


@pytest.mark.parametrize("codec", ["raw", "fp16", "bf16"])
def test_fine_codecs_keep_nothing(codec):
    run = replace(RUN, codec=codec)
    _, private = rounds.participate(run, member(), rounds.start(run)[0], None, 1)
    assert not any(k.startswith(feedback.PREFIX) for k in private)


@pytest.mark.parametrize("codec", ["fp16", "bf16", "int8", "topk:0.05"])
def test_statistics_arrive_as_they_were_sent(codec):
    """Nothing is fed back of them: a twentieth of BatchNorm's would be right, and devices would count other samples."""
    run = replace(RUN, algorithm="pfedgm", codec=codec, buffers="aggregate")
    shared, _ = rounds.start(run)
    update, _ = rounds.participate(run, member(), shared, None, 1)
    schema = schema_of(shared)
    sent = {k: v for k, v in update.tensors.items() if k.startswith("stats/") or "running_" in k}
    found = decode_update(encode_update(update, codec), schema=schema, layout=run_model.layout_of(run.spec)).tensors
    assert len(sent) > 5
    assert all(np.array_equal(found[name], value) for name, value in sent.items())


def test_a_fleet_counts_the_samples_that_its_devices_have():
    run = replace(RUN, algorithm="pfedgm", codec="topk:0.1", rounds=1)
    result = simulate(run, {name: member() for name in ("anna", "bert", "carl")})
    assert result.shared["stats/count"].tolist() == [9, 9, 6]  # of 8 samples by turns


def test_a_variance_of_many_units_travels_as_fp16_does():
    tensors = {"bn.running_var": np.array([3e5], np.float32), "w": np.ones(2, np.float32)}
    data = encode_update(Update(tensors, 1.0, kind="delta"), "fp16")
    assert decode_update(data, schema=schema_of(tensors)).tensors["bn.running_var"].tolist() == [3e5]


def test_what_was_left_follows_the_channels_when_the_mask_changes():
    layout = ChannelLayout({"h": 4}, {"w": ((("h", 1),), ())})
    old, new = ChannelMask(layout, {"h": (0, 1, 3)}), ChannelMask(layout, {"h": (1, 2)})
    shared = {"w": np.zeros((4, 2)), "free": np.zeros(3)}
    left = {"w": np.arange(6.0).reshape(3, 2), "free": np.ones(3), "gone": np.ones(1)}
    moved = feedback.within(left, old, new, shared)
    assert moved["w"].tolist() == [[2, 3], [0, 0]]
    assert moved["free"].tolist() == [1, 1, 1]
    assert "gone" not in moved
    assert feedback.within(left, old, old, shared)["w"].tolist() == left["w"].tolist()


def test_small_changes_are_not_lost_to_a_coarse_codec():
    """Top-k sends one coordinate in a hundred: without feedback it is nearly the same ones in every round."""
    run = replace(RUN, codec="topk:0.01", rounds=6, recipe=Recipe(epochs=1, batch=8, lr=0.01))
    result = simulate(run, {"anna": member()})
    first, _ = rounds.start(run)
    moved = sum(int((result.shared[k] != v).sum()) for k, v in first.items() if is_float(v))
    values = sum(v.size for v in first.values() if is_float(v))
    assert moved > 3 * 0.01 * values, "six rounds of one in a hundred reach other coordinates each time"
