from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx
import pytest
from tolerance import roundings

from talaria.errors import ConfigError, ModelError
from talaria.model import pruning, zoo
from talaria.model.masks import ChannelMask
from talaria.model.spec import AdapterSpec, ModelSpec
from talaria.planning import latency_model
from talaria.planning.anatomy import FEATURES
from talaria.planning.cost import prices
from talaria.planning.latency_model import DRIFT, Cost
from talaria.planning.layer_stats import anatomy
from talaria.planning.onnx_runtime import Resizer, Session, convolutions, exporter

IMU = ModelSpec("imu_cnn", (6, 100), 7)
MOBILE = ModelSpec("mobilenet_v3_small", (3, 64, 64), 10)


def shapes(file: bytes) -> list[tuple[str, tuple[int, ...]]]:
    """Operators with the shape of their weights, in order."""
    graph = onnx.load_from_string(file).graph
    dims = {t.name: tuple(t.dims) for t in graph.initializer}
    return [(n.op_type, dims.get(n.input[1], ())) for n in graph.node if n.op_type in ("Conv", "Gemm")]


def test_a_resized_graph_is_the_export_of_the_compact_model(exported: Callable[[ModelSpec], bytes]) -> None:
    parts = anatomy(IMU)
    widths = {**parts.full(), "conv1": 8, "conv3": 24}
    mask = ChannelMask(parts.layout, {g: tuple(range(w)) for g, w in widths.items()})
    real = exporter()(pruning.compact(latency_model.lively(zoo.build(IMU)), mask), zoo.example(IMU, 2))
    resized = Resizer(exported(IMU), parts).at(widths)
    assert shapes(resized) == shapes(real)
    assert Session(resized)(zoo.example(IMU, 3).numpy()).shape == (3, IMU.classes)


@pytest.mark.parametrize("spec", [IMU, MOBILE], ids=lambda s: s.name)
@pytest.mark.parametrize("keep", [1.0, 0.7, 0.5, 0.3, 1e-6])
def test_every_convolution_of_a_planned_model_keeps_the_blocked_form(
    spec: ModelSpec, keep: float, exported: Callable[[ModelSpec], bytes]
) -> None:
    """Read from the graph as ONNX Runtime rewrote it: no clock, so no noise. As exported, 1D becomes 2D."""
    parts = anatomy(spec)
    widths = {g: min(n, pruning.aligned(keep * n, 8)) for g, n in parts.layout.sizes.items()}
    blocked, every = convolutions(Resizer(exported(spec), parts).at(widths))
    assert every == sum(not layer.linear for layer in parts.layers)
    assert blocked == every


def test_a_graph_without_names_is_refused(exported: Callable[[ModelSpec], bytes]) -> None:
    proto = onnx.load_from_string(exported(IMU))
    for node in proto.graph.node:
        for at, name in enumerate(node.input):
            node.input[at] = name.replace("conv2", "lost")
    for tensor in proto.graph.initializer:
        tensor.name = tensor.name.replace("conv2", "lost")
    with pytest.raises(ModelError, match=r"conv2\.weight"):
        Resizer(proto.SerializeToString(), anatomy(IMU))


def test_prices_are_found_again_and_never_negative() -> None:
    parts = anatomy(MOBILE)
    widths = latency_model.samples(parts, 15, 8)
    rows = np.array([parts.features(w, 8) for w in widths])
    true = np.array([0.02, 0.1, 0.0, 0.0, 0.3, 0.01, 0.2, 0.0, 0.0, 0.0, 0.0, 0.05])
    assert len(true) == len(FEATURES)
    found = prices(rows, rows @ true)
    assert roundings(rows @ found, rows @ true) <= 10_000
    noise = np.random.default_rng(0).uniform(0.8, 1.2, len(rows))
    assert prices(rows, rows @ true * noise).min() >= 0


@pytest.mark.parametrize("seed", range(20))
def test_the_fit_is_no_worse_than_scipy(seed: int) -> None:
    from scipy.optimize import nnls

    draws = np.random.default_rng(seed)
    rows = draws.uniform(0, 1, (15, 9))
    rows[:, 3] = rows[:, 4]
    taken = rows @ np.maximum(draws.normal(size=9), 0) * draws.uniform(0.9, 1.1, 15) + 0.01
    ours = np.linalg.norm(rows @ prices(rows, taken) / taken - 1)
    theirs = nnls(rows / taken[:, None], np.ones(15))[1]
    assert ours <= theirs * (1 + 1e-6)


def test_probes_are_few_fixed_and_in_blocks() -> None:
    parts = anatomy(MOBILE)
    widths = latency_model.samples(parts, latency_model.PROBES, 8)
    assert len(widths) == latency_model.PROBES <= 15
    assert widths == latency_model.samples(parts, latency_model.PROBES, 8)
    assert widths[0] == parts.full()
    for one in widths:
        assert all(w % 8 == 0 or w == parts.layout.sizes[g] for g, w in one.items())


def test_a_family_shares_its_cost_whatever_its_seed_and_adapters() -> None:
    spec = ModelSpec("imu_cnn", (6, 100), 7, adapters=AdapterSpec("lowrank", 2), seed=5)
    assert zoo.plain(spec) == IMU


def test_measuring_here_gives_a_cost_that_orders_widths(exported: Callable[[ModelSpec], bytes]) -> None:
    """Coarse on purpose: a model of a quarter of the products is faster than the whole, on any machine."""
    parts = anatomy(MOBILE)
    found = latency_model.fit(
        parts, exported(MOBILE), zoo.example(MOBILE), latency_model.samples(parts, 6, 16), 16, rounds=6
    )
    assert found.probes == 6
    small = {g: min(n, pruning.aligned(0.25 * n, 16)) for g, n in parts.layout.sizes.items()}
    assert 0 < found.latency_ms(parts, small) < found.latency_ms(parts, parts.full())
    assert Cost.from_json(found.to_json()) == found
    assert found.seconds < 10


def test_damaged_figures_are_refused() -> None:
    good = Cost((0.1,) * len(FEATURES), 1.0, 0.01, 8, 1000, 15, 1.0).to_json()
    unpriced = {**good["milliseconds"], "fixed": float("nan")}
    odd = {
        "dense_ms": 0.0,
        "odd": 1,
        "milliseconds": unpriced,
        "error": float("nan"),
        "block": 8.5,
        "graph_bytes": None,
    }
    for wrong in ({}, {"milliseconds": {}}, *({**good, name: value} for name, value in odd.items())):
        with pytest.raises(ConfigError, match="cost"):
            Cost.from_json(wrong)


def test_two_probes_are_too_few(exported: Callable[[ModelSpec], bytes]) -> None:
    parts = anatomy(IMU)
    with pytest.raises(ModelError, match="at least 3"):
        latency_model.fit(parts, exported(IMU), zoo.example(IMU), latency_model.samples(parts, 2, 8), 8, rounds=3)


def test_the_margin_covers_the_fit_and_the_drift_of_the_machine(cost: Cost) -> None:
    assert replace(cost, error=0.0).margin == DRIFT > 0
    assert replace(cost, error=0.02).margin == pytest.approx(DRIFT + 0.04)
    assert replace(cost, error=5.0).margin == 0.25


def rounds_of(shares: dict[str, tuple[float, float]], turns: int = 12, busy: float = 1.0) -> dict[str, list[float]]:
    """Seconds in each round of a dense model and of others at ``shares`` of it in either half; the whole machine is
    ``busy`` times slower in the second half."""
    base = [0.01 * (1 + 0.001 * (i % 3)) * (busy if i >= turns // 2 else 1.0) for i in range(turns)]
    took = {"dense": base}
    for name, (before, after) in shares.items():
        took[name] = [b * (after if i >= turns // 2 else before) for i, b in enumerate(base)]
    return took


def test_noise_is_what_shares_of_the_dense_time_change_not_what_slows_all_alike() -> None:
    calm = {"a": (0.5, 0.5), "b": (0.2, 0.2)}
    assert latency_model.changed(rounds_of(calm)) == pytest.approx(0.0, abs=1e-12)
    assert latency_model.changed(rounds_of(calm, busy=1.5)) == pytest.approx(0.0, abs=1e-12)
    assert latency_model.changed(rounds_of({"a": (0.5, 0.5), "b": (0.2, 0.22)})) == pytest.approx(0.1 / 2**0.5)
    assert latency_model.changed({"dense": [1.0, 1.0]}) == 0.0


def test_one_slow_burst_is_no_noise() -> None:
    took = rounds_of({"a": (0.5, 0.5)})
    took["a"][2] *= 3
    assert latency_model.changed(took) == pytest.approx(0.0, abs=1e-12)
    assert latency_model.milliseconds(took)["a"] == pytest.approx(0.5 * latency_model.milliseconds(took)["dense"])


def test_what_is_kept_in_hand_follows_the_noise_measured_and_says_so(cost: Cost) -> None:
    quiet, busy, wild = (replace(cost, error=0.02, noise=noise) for noise in (0.005, 0.05, 0.5))
    assert quiet.margin == pytest.approx(DRIFT + 0.04)
    assert busy.margin == pytest.approx(2 * 0.05 + 0.04)
    assert wild.margin == 0.25
    assert (
        quiet.why_margin
        == "7.0% to spare (4.0% for what the prediction may miss, 3.0% for what this machine may change)"
    )
    assert "14.0% to spare (4.0% for what the prediction may miss, 10.0% for what" in busy.why_margin
    assert busy.why_margin.endswith("because times changed by 5.0% while they were measured: the machine is busy")
    assert wild.why_margin.startswith("25.0% to spare, the most that is kept, because times changed by 50.0%")


def test_bursts_of_a_busy_machine_give_a_cost_with_more_in_hand(exported: Callable[[ModelSpec], bytes]) -> None:
    """The same architectures, once on a calm machine and once where small models become 8 % slower half way through, as
    beside a neighbour: from the same rounds that the fit sees."""
    parts = anatomy(IMU)
    resizer, widths = Resizer(exported(IMU), parts), latency_model.samples(parts, 15, 8)
    sizes = [parts.products(w) / parts.products(parts.full()) for w in widths]
    made = []
    for slower in (0.0, 0.08):
        shares = {str(i): (0.1 + 0.9 * s, (0.1 + 0.9 * s) * (1 + slower * (1 - s))) for i, s in enumerate(sizes)}
        took = rounds_of({k: v for k, v in shares.items() if k != "0"})
        found = latency_model.milliseconds(took)
        made.append(latency_model.explained(resizer, widths, list(found.values()), 8, 1.0, latency_model.changed(took)))
    calm, busy = made
    assert calm.noise == pytest.approx(0.0, abs=1e-12)
    assert calm.drift == DRIFT
    assert 0.03 < busy.noise < 0.08
    assert busy.margin > calm.margin + 0.03
    assert Cost.from_json(busy.to_json()) == busy
