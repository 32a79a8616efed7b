"""The benchmark of simulated rounds: its loop by hand learns what a simulation learns, and both are measured."""

from typing import Any

import pytest

from talaria_bench.simulation import Work, spent


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loop_and_the_simulation_do_the_same_work(workers: int) -> None:
    plain: dict[str, Any] = {
        "model": "mlp",
        "rounds": 10,
        "batch": 16,
        "lr": 0.05,
        "momentum": 0.9,
        "clients": 4,
        "samples": 64,
    }
    loop, simulated = spent(Work(who="loop", **plain)), spent(Work(who="torch", workers=workers, **plain))
    for found in (loop, simulated):
        assert found["cpu_s"] > 0
        assert found["wall_s"] > 0
        assert found["peak_mb"] > 50
        assert found["accuracy"] > 0.8  # classes lie far apart
    assert simulated["start_cpu_s"] > simulated["cpu_s"]


def test_what_fails_is_told() -> None:
    with pytest.raises(RuntimeError, match="KeyError: 'nosuch'"):
        spent(Work(who="torch", model="nosuch", rounds=2, batch=16, lr=0.05, clients=2, samples=16))
