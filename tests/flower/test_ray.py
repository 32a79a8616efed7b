"""Clients on a real Ray cluster of two nodes: the bytes of workers. `make flower` has Ray in its venv."""

import os
from collections.abc import Iterator

import numpy as np
import pytest
from ray.cluster_utils import Cluster

import talaria
from talaria.data import Federated
from talaria.errors import ConfigError, DataError, StateError
from talaria.simulation.ray_crew import RayCrew
from talaria.simulation.run import crew_of
from talaria.tensors import equal


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Two nodes of one CPU each."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    yield cluster.address
    cluster.shutdown()


def people() -> Federated:
    draw = np.random.default_rng(3)
    y = np.tile(np.arange(3), 40)
    x = draw.normal(size=(120, 6, 32)) + y[:, None, None]
    return Federated.from_arrays(x, y, np.repeat(["anna", "bela", "cara", "dora"], 30))


def test_two_nodes_come_to_the_bytes_of_workers(address: str, tmp_path) -> None:
    asked = {"rounds": 2, "evaluate_every": 1, "options": {"tune_epochs": 1}}
    expected = talaria.simulate("hermes", people(), "imu_cnn", workers=1, **asked)
    found = talaria.simulate("hermes", people(), "imu_cnn", ray=address, save=tmp_path / "run", **asked)
    assert equal(found.learned.shared, expected.learned.shared)
    for name, private in expected.learned.private.items():
        assert equal(found.learned.private[name], private)
    assert found.curve == expected.curve
    assert found.clients == expected.clients
    assert equal(talaria.resume(tmp_path / "run", data=people(), ray=address).learned.shared, expected.learned.shared)


def test_both_nodes_work_and_what_one_raises_is_raised_here(address: str) -> None:
    import ray

    def work(asked, shared, private):
        if asked["number"] == 9:
            raise DataError("x: holds NaN; clean it")
        return {"node": ray.get_runtime_context().get_node_id()}, shared, b"whole"

    shared = {"b": np.zeros((0, 3), np.float32), "a": np.arange(3, dtype=np.int64)}
    with RayCrew(address, work) as crew:
        assert crew.count == 2
        ray.wait(list(crew._starting), num_returns=2)  # else the first may have done all before the other begins
        told = list(crew.answers(shared, [({"number": n}, None) for n in range(6)]))
        assert len({facts["node"] for facts, _, _ in told}) == 2
        assert all(list(tensors) == ["b", "a"] and equal(tensors, shared) for _, tensors, _ in told)
        with pytest.raises(DataError, match="clean it"):
            list(crew.answers(shared, [({"number": n}, None) for n in range(8, 11)]))
        assert next(crew.answers(shared, [({"number": 1}, None)]))[2] == b"whole"


def test_who_uses_ray_already_goes_on_with_it_and_a_cpu_that_is_taken_is_not_waited_for(address: str) -> None:
    import ray

    ray.init(address, log_to_driver=False)
    try:
        other = ray.remote(num_cpus=1)(Held).remote()
        kept = ray.put(np.arange(3))
        assert ray.get(other.name.remote()) == "another job"
        found = talaria.simulate("fedavg", people(), "imu_cnn", rounds=2, recipe={"steps": 1}, ray=address)
        assert len(found.learned.history) == 2
        assert ray.get(other.name.remote()) == "another job"
        assert ray.get(kept).tolist() == [0, 1, 2]
    finally:
        ray.shutdown()


class Held:
    def name(self) -> str:
        return "another job"


def test_an_actor_that_ends_is_told_with_what_can_be_done(address: str) -> None:
    told = pytest.raises(StateError, match=r"Ray actors ended .*the last round that --save kept, or begin anew")
    with RayCrew(address, lambda asked, shared, private: os._exit(1)) as crew, told:
        list(crew.answers({}, [({}, None)]))


def test_what_a_cluster_cannot_do_is_refused_by_name() -> None:
    data = people()
    run = talaria.simulate("fedavg", data, rounds=1, recipe={"steps": 1}).learned.run
    with pytest.raises(ConfigError, match="leave workers=2 at 0"):
        crew_of(run, {}, data, 2, "auto")
    with pytest.raises(ConfigError, match="ray=''"):
        RayCrew("", lambda asked, shared, private: ({}, {}, b""))
