"""A coarse global model is exactly what its bytes give back, and what it leaves out reaches a later one."""

from dataclasses import replace

import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from talaria.errors import ConfigError
from talaria.federated import global_model, rounds, warm_start
from talaria.federated.run import Member, Run
from talaria.model.spec import ModelSpec
from talaria.simulation.run import simulate
from talaria.tensors import equal
from talaria.types import Recipe, Samples
from talaria.wire import download
from talaria.wire.codec import decode_tensors, schema_of
from talaria.wire.download import CODECS, encoded, rounded, settled

RUN = Run(spec=ModelSpec("imu_cnn", (3, 16), 3), algorithm="fedavg", recipe=Recipe(epochs=1, batch=4), rounds=3)
NUMBERS = st.floats(width=32, allow_nan=False, allow_infinity=False)
WEIGHTS = arrays.arrays(np.float32, arrays.array_shapes(min_dims=1, max_dims=3, max_side=5), elements=NUMBERS)


@pytest.mark.parametrize("codec", CODECS)
@given(weights=WEIGHTS)
def test_what_is_published_is_what_is_read_back_to_the_bit(codec, weights):
    shared = {"w": weights, "bn.running_var": np.abs(weights), "n": np.array(3), "frozen/h": weights}
    published = rounded(shared, codec)
    assert equal(decode_tensors(encoded(published, codec), schema=schema_of(shared)), published)
    assert equal(rounded(published, codec), published)
    assert all(published[name] is shared[name] for name in ("bn.running_var", "n", "frozen/h"))


@given(weights=arrays.arrays(np.float32, (3, 7), elements=st.floats(-1e3, 1e3, width=32)))
def test_int8_is_off_by_half_a_level_at_most(weights):
    level = np.abs(weights).max(1, keepdims=True).astype(np.float64) / 127 * (1 + 2**-16)
    off = np.abs(rounded({"w": weights}, "int8")["w"].astype(np.float64) - weights)
    assert (off <= level / 2 * (1 + 2**-20) + np.finfo(np.float32).tiny * 128).all()


def test_a_vector_takes_bfloat16_where_weights_take_int8():
    shared = {"w": np.ones((2, 3), np.float32), "b": np.ones(3, np.float32), "d": np.ones((2, 2))}
    assert {name: download.codec_of(name, v, "int8") for name, v in shared.items()} == {
        "w": "int8",
        "b": "bf16",
        "d": "int8",
    }
    assert rounded(shared, "int8")["d"].dtype == np.float64


@pytest.mark.parametrize("codec", ["fp16", "bf16"])
def test_what_is_beyond_half_precision_is_the_largest_there_is_and_comes_later(codec):
    published, state = settled({"w": np.array([3.4e38, -1.0], np.float32)}, {}, {}, codec)
    assert np.isfinite(published["w"]).all()
    assert published["w"][0] + state["download/w"][0] == np.float32(3.4e38)


@pytest.mark.parametrize("codec", ["fp16", "bf16", "int8"])
def test_steps_too_small_to_be_published_add_up(codec):
    """Forty steps, each a fiftieth of what rounding leaves out, are not lost."""
    draw = np.random.default_rng(5)
    exact = draw.standard_normal((4, 9), np.float32)
    shared, state = settled({"w": exact}, {}, {}, codec)
    grain = float(np.abs(state["download/w"]).max())
    for _ in range(40):
        step = np.full((4, 9), grain / 50, np.float32)
        exact = exact + step
        shared, state = settled({"w": shared["w"] + step}, {"w": state["download/w"]}, {}, codec)
    np.testing.assert_allclose(shared["w"] + state["download/w"], exact, rtol=0, atol=40 * 2**-23 * 8)
    assert np.abs(shared["w"] - exact).max() <= 2 * grain


def members() -> dict[str, Member]:
    draw = np.random.default_rng(4)
    found = {}
    for name in ("anna", "bela"):
        x = draw.standard_normal((8, 3, 16))
        found[name] = Member(name, Samples.of(x, np.arange(8) % 3), Samples.of(x[:1], [0]))
    return found


@pytest.mark.parametrize("codec", ["fp16", "int8"])
def test_a_run_learns_from_what_travels(codec):
    run = replace(RUN, download=codec)
    learned = simulate(run, members())
    data = global_model.encode_model(learned.shared, codec)
    assert equal(global_model.decode_model(run, data), learned.shared)
    whole = global_model.encode_model(simulate(RUN, members()).shared)
    assert len(data) < len(whole) * (0.6 if codec == "fp16" else 0.45)
    assert any(name.startswith("download/") for name in learned.server)


def test_a_run_that_follows_begins_with_what_travels():
    old = simulate(RUN, members())
    new = warm_start.following(RUN, replace(RUN, download="int8"))
    carried = warm_start.carried(RUN, new, old.shared).tensors
    assert equal(carried, rounded(old.shared, "int8"))
    assert not equal(carried, old.shared)


def test_the_run_is_named_as_ever_where_its_model_travels_whole():
    assert '"download"' not in RUN.to_json()
    assert Run.from_json(replace(RUN, download="bf16").to_json()).download == "bf16"
    assert rounds.start(RUN)[1] == {}


def test_a_way_down_that_there_is_not_is_refused():
    with pytest.raises(ConfigError, match="download='topk' is unknown; use 'raw' or 'fp16' or 'bf16' or 'int8'"):
        replace(RUN, download="topk")
