"""Clients in processes of their own: the same bytes for every number of them, and no silence where one ends."""

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.process import BaseProcess

import numpy as np
import pytest
import torch

import talaria
from talaria.data.federated import Federated
from talaria.errors import ConfigError, DataError, StateError
from talaria.seeds import ALONE
from talaria.simulation.workers import Crew


def fleet() -> Federated:
    draw = np.random.default_rng(3)
    y = np.tile(np.arange(3), 40)
    x = draw.normal(size=(120, 6, 32)) + y[:, None, None]
    return Federated.from_arrays(x, y, np.repeat(["anna", "bela", "cara", "dora"], 30))


def same(one: talaria.Result, other: talaria.Result) -> bool:
    """All bytes, and what was measured."""

    def told(result: talaria.Result) -> list[object]:
        states = [result.learned.shared, *(v for _, v in sorted(result.learned.private.items()))]
        return [[(k, v.dtype, v.tobytes()) for k, v in sorted(state.items())] for state in states] + [
            result.curve,
            {name: vars(found) for name, found in result.clients.items()},
        ]

    return told(one) == told(other)


@pytest.mark.parametrize("algorithm", ["fedper", "hermes"])
def test_the_bytes_do_not_depend_on_the_number_of_workers(algorithm: str, tmp_path) -> None:
    options = {"tune_epochs": 1} if algorithm == "hermes" else None
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        alone = talaria.simulate(algorithm, fleet(), "imu_cnn", rounds=2, options=options, evaluate_every=1)
    finally:
        torch.set_num_threads(before)
    for workers in (1, 3):
        found = talaria.simulate(
            algorithm, fleet(), "imu_cnn", rounds=2, options=options, evaluate_every=1, workers=workers
        )
        assert same(alone, found), workers
    kept = tmp_path / "run"
    talaria.simulate(algorithm, fleet(), "imu_cnn", rounds=2, options=options, evaluate_every=1, save=kept, workers=2)
    assert same(alone, talaria.resume(kept, data=fleet(), workers=2))


LEARNING = """
import numpy as np, torch, talaria
{before}
y = np.tile(np.arange(3), 20)
x = np.random.default_rng(3).normal(size=(60, 4)) + y[:, None]
data = talaria.Federated.from_arrays(x, y, np.repeat(["anna", "bela"], 30))
print(talaria.simulate("fedavg", data, "mlp", rounds=1, workers=2).accuracy.mean)
"""
EXPORTED = """
from talaria_export.convert.onnx import export_onnx
export_onnx(torch.nn.Linear(4, 3), torch.zeros(2, 4))
torch.ones(1, requires_grad=True).sum().backward()  # as whoever trains here does
"""
FOREIGN = """
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    torch.ones(1, requires_grad=True).sum().backward()
"""


def learned_after(before: str) -> subprocess.CompletedProcess[str]:
    script = LEARNING.format(before=before)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=300)


def test_workers_learn_in_a_process_that_has_exported_a_model_and_trained() -> None:
    done = learned_after(EXPORTED)
    assert done.returncode == 0, done.stderr
    assert 0 < float(done.stdout.split()[-1]) <= 1


def test_workers_that_can_take_no_gradients_say_why() -> None:
    done = learned_after(FOREIGN)
    assert done.returncode == 1
    assert "ConfigError: simulate: workers cannot learn here" in done.stderr
    assert "take workers=0" in done.stderr


def test_what_a_worker_raises_is_raised_here() -> None:
    def work(asked, shared, private):
        if asked["number"] == 2:
            raise DataError("x: holds NaN; clean it")
        return {"number": asked["number"]}, shared, b"whole"

    shared = {"b": np.zeros(()), "a": np.arange(3)}
    with Crew(2, work) as crew:
        with pytest.raises(DataError, match="x: holds NaN; clean it"):
            list(crew.answers(shared, [({"number": n}, None) for n in range(5)]))
        answers = list(crew.answers(shared, [({"number": n}, None) for n in (5, 6, 7)]))
    assert [facts["number"] for facts, _, _ in answers] == [5, 6, 7]
    assert all(list(tensors) == ["b", "a"] and data == b"whole" for _, tensors, data in answers)


def test_what_own_code_raises_in_a_worker_is_told_once_with_its_lines(capfd) -> None:
    def work(asked, shared, private):
        if asked["number"] < 2:
            raise KeyError("weight")
        return asked, {}, b""

    with Crew(2, work) as crew:
        with pytest.raises(RuntimeError, match="a worker failed with KeyError: 'weight'") as raised:
            list(crew.answers({}, [({"number": n}, None) for n in range(2)]))
        assert 'raise KeyError("weight")' in "".join(raised.value.__notes__)
        assert [facts["number"] for facts, _, _ in crew.answers({}, [({"number": 2}, None)])] == [2]
    assert "Traceback" not in capfd.readouterr().err


def test_an_answer_is_given_while_others_work(tmp_path) -> None:
    read = tmp_path / "read"

    def work(asked, shared, private):
        end = time.monotonic() + 120
        while asked["number"] and not read.exists():
            if time.monotonic() > end:
                raise DataError("number: nobody has read the first answer; give it at once")
            time.sleep(0.01)
        return asked, {}, b""

    with Crew(2, work) as crew:
        answers = crew.answers({}, (({"number": n}, None) for n in range(3)))
        assert next(answers)[0] == {"number": 0}
        read.touch()
        assert [facts["number"] for facts, *_ in answers] == [1, 2]


def test_a_crew_is_gone_though_its_answers_were_not_read() -> None:
    def work(asked, shared, private):
        return {"pid": os.getpid()}, {}, b"whole" * 1_000_000

    with Crew(2, work) as crew:
        answers = crew.answers({}, [({}, None)] * 4)
        next(answers)
    answers.close()
    assert not multiprocessing.active_children()


def test_an_interrupt_does_not_wait_for_what_workers_are_at() -> None:
    def work(asked, shared, private):
        time.sleep(60)
        return asked, {}, b""

    def jobs():
        yield {}, None
        raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), Crew(2, work) as crew:
        list(crew.answers({}, jobs()))
    assert time.monotonic() - began < 50
    assert not multiprocessing.active_children()


def test_a_crew_ends_by_itself_though_another_was_forked_meanwhile(monkeypatch) -> None:
    killed, kill = [], BaseProcess.kill
    monkeypatch.setattr(BaseProcess, "kill", lambda one: (killed.append(one), kill(one)))

    def work(asked, shared, private):
        return asked, {}, b""

    with Crew(2, work) as later, Crew(2, work) as crew:
        for each in (crew, later):
            assert len(list(each.answers({}, [({}, None)]))) == 1
    assert not killed


def test_none_is_forked_while_a_thread_holds_what_torch_has_once() -> None:
    """Its lock on the global generator would be held in the worker for good."""
    held, found = threading.Event(), list[multiprocessing.Process]()

    def other() -> None:
        with ALONE:
            held.set()
            time.sleep(0.5)
            found.extend(multiprocessing.active_children())

    def work(asked, shared, private):
        return asked, {}, b""

    thread = threading.Thread(target=other)
    thread.start()
    held.wait()
    with Crew(1, work) as crew:
        assert len(list(crew.answers({}, [({}, None)]))) == 1
        thread.join()
    assert not found


def test_what_all_share_is_read_once() -> None:
    def work(asked, shared, private):
        return {"at": id(shared["a"]), "a": float(shared["a"])}, {}, b""

    with Crew(1, work) as crew:
        for value in (1.0, 2.0):
            told = [facts for facts, _, _ in crew.answers({"a": np.array(value)}, [({}, None)] * 3)]
            assert {facts["a"] for facts in told} == {value}
            assert len({facts["at"] for facts in told}) == 1


def test_a_worker_that_ends_is_told() -> None:
    def work(asked, shared, private):
        os.kill(os.getpid(), signal.SIGKILL)

    with Crew(2, work) as crew, pytest.raises(StateError, match="one of 2 workers ended"):
        next(crew.answers({}, [({}, None)]))


def test_processes_that_the_system_does_not_give_are_told(monkeypatch) -> None:
    real, given = os.fork, []

    def fork() -> int:
        if given:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        given.append(1)
        return real()

    monkeypatch.setattr(os, "fork", fork)
    told = r"workers=3: the system gives 1 \(Resource temporarily unavailable\); take fewer"
    with Crew(3, lambda asked, shared, private: ({}, {}, b"")) as crew, pytest.raises(StateError, match=told):
        next(crew.answers({}, [({}, None)]))


def test_a_process_that_may_start_none_says_so(monkeypatch) -> None:
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # as one of a multiprocessing.Pool
    with pytest.raises(ConfigError, match=r"workers=2: a process of a multiprocessing.Pool may start none"):
        talaria.simulate("fedavg", fleet(), "imu_cnn", rounds=1, workers=2)


def test_wrong_numbers_are_refused_and_so_is_an_asynchronous_run() -> None:
    for wrong in (-1, 257, True, "2"):
        with pytest.raises(ConfigError, match=r"workers=.* must be a whole number in 1\.\.256, or 0"):
            talaria.simulate("fedper", fleet(), "imu_cnn", rounds=1, workers=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="an asynchronous run trains one client after another"):
        talaria.simulate("fedavg", fleet(), "imu_cnn", rounds=1, asynchronous=True, workers=2)
