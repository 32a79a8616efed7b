from collections.abc import Callable

import pytest

from talaria.model import zoo
from talaria.model.spec import ModelSpec
from talaria.planning.anatomy import FEATURES
from talaria.planning.latency_model import Cost, lively
from talaria.planning.onnx_runtime import exporter
from talaria.planning.profile import Profile

IMU = ModelSpec("imu_cnn", (6, 100), 7)
MOBILE = ModelSpec("mobilenet_v3_small", (3, 64, 64), 10)


@pytest.fixture(scope="session")
def profile() -> Profile:
    """A device of fixed figures."""
    return Profile(
        machine="0" * 16,
        cpu="a test",
        cores=2,
        memory_mb=1000,
        block=8,
        train_rate=1e9,
        matrix_rate=1e10,
        bandwidth_mbs=1e4,
        disk_mbs=100,
    )


@pytest.fixture(scope="session")
def cost() -> Cost:
    """A latency model of fixed prices, whose unpruned model takes as long as it predicts for :data:`IMU`."""
    from talaria.planning.layer_stats import anatomy

    prices = dict.fromkeys(FEATURES, 0.0) | {"convolution": 0.01, "stem": 0.02, "moved": 0.1, "fixed": 0.005}
    raw = Cost(tuple(prices.values()), 1.0, 0.02, 8, 3000, 15, 1.0)
    parts = anatomy(IMU)
    return Cost(raw.milliseconds, raw.latency_ms(parts, parts.full()), 0.02, 8, 3000, 15, 1.0)


@pytest.fixture(scope="session")
def exported() -> Callable[[ModelSpec], bytes]:
    """The exported unpruned model of a spec's family, once per session."""
    done: dict[ModelSpec, bytes] = {}

    def of(spec: ModelSpec) -> bytes:
        family = zoo.plain(spec)
        if family not in done:
            done[family] = exporter()(lively(zoo.build(family)), zoo.example(family, 2))
        return done[family]

    return of
