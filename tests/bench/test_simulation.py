"""The benchmark of simulated rounds: its loop by hand learns what a simulation learns, and both are measured."""

from typing import Any

import pytest

from talaria_bench.simulation import Work, spent


def test_the_loop_and_the_simulation_do_the_same_work() -> None:
    plain: dict[str, Any] = {
        "model": "mlp",
        "rounds": 10,
        "batch": 16,
        "lr": 0.05,
        "momentum": 0.9,
        "clients": 4,
        "samples": 64,
    }
    loop = spent(Work(who="loop", **plain))
    both = [spent(Work(who="torch", workers=workers, **plain)) for workers in (0, 2)]
    for found in (loop, *both):
        assert found["cpu_s"] > 0
        assert found["wall_s"] > 0
        assert found["peak_mb"] > 50
        assert found["accuracy"] > 0.8  # classes lie far apart
    assert all(found["start_cpu_s"] > found["cpu_s"] for found in both)


def test_what_fails_is_told() -> None:
    with pytest.raises(RuntimeError, match="KeyError: 'nosuch'"):
        spent(Work(who="torch", model="nosuch", rounds=2, batch=16, lr=0.05, clients=2, samples=16))
