import json
import os
import pwd
import time
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from tolerance import roundings

from talaria import plugins
from talaria.errors import ConfigError, StateError
from talaria.model.spec import ModelSpec
from talaria.planning import cpu_timer, machine, measured, microbenchmarks, onnx_runtime
from talaria.planning import profile as profiles
from talaria.planning.budget import Budget
from talaria.planning.latency_model import Cost
from talaria.planning.profile import Profile


def test_a_profile_survives_json(profile: Profile) -> None:
    full = replace(profile, simd=("avx2", "fma"), layers_ms={"linear": 0.01}, watts=5.0)
    assert Profile.from_json(json.loads(json.dumps(full.to_json()))) == full
    odd = {
        "odd": 1,
        "cores": 0,
        "block": 8.5,
        "train_rate": inf,
        "seconds": "1",
        "watts": inf,
        "machine": None,
        "simd": [1],
    }
    for wrong in ({}, *(full.to_json() | {name: value} for name, value in odd.items())):
        with pytest.raises(ConfigError, match="profile"):
            Profile.from_json(wrong)
    for layers in (None, {"linear": "fast"}):
        with pytest.raises(ConfigError, match="measure the device again"):
            Profile.from_json({**full.to_json(), "layers_ms": layers})


def test_this_machine_is_measured_once_and_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = profiles.cached(folder=tmp_path)
    assert first.machine == profiles.fingerprint()
    assert first.block in (8, 16, 32)
    assert first.seconds < 60
    assert {"pointwise", "depthwise", "convolution", "linear"} == set(first.layers_ms)
    monkeypatch.setattr(profiles, "measure", lambda folder: pytest.fail("measured again"))
    assert profiles.cached(folder=tmp_path) == first
    assert not list(tmp_path.glob("probe-*"))


def test_a_damaged_cache_is_measured_again(tmp_path: Path, profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "measure", lambda folder: profile)
    for text in ("", "{", "[]", "{}", '{"cores": 1}'):
        path = next(tmp_path.glob("*.json"), tmp_path / f"profile-{profiles.VERSION}-{profiles.fingerprint()}.json")
        path.write_text(text)
        assert profiles.cached(folder=tmp_path) == profile
        assert profiles.read(path) == profile.to_json() | {"simd": [], "layers_ms": {}}


def test_where_nothing_can_be_written_it_says_so(tmp_path: Path, profile: Profile) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match="XDG_CACHE_HOME"):
        profiles.write(tmp_path / "file" / "x.json", {})
    with pytest.raises(StateError, match="XDG_CACHE_HOME"):
        microbenchmarks.disk_mbs(tmp_path / "file")


def test_a_user_without_home_is_told_where_measurements_could_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    with pytest.raises(StateError, match=r"HOME is not set, and user .* set XDG_CACHE_HOME to a folder of yours"):
        profiles.cached()


def test_a_machine_that_does_not_tell_of_itself_is_measured_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*_: object) -> None:
        raise FileNotFoundError("as of a container without /proc, or a kernel without power supplies")

    for name in ("virtual_memory", "sensors_battery"):
        monkeypatch.setattr(psutil, name, closed)
    monkeypatch.setattr(os, "getloadavg", closed)
    assert microbenchmarks.memory_mb() > 0
    assert {machine.load()[name] for name in ("load", "battery", "charging")} == {None}


def test_an_app_that_infers_may_measure_how_fast_it_learns() -> None:
    with torch.inference_mode():
        assert microbenchmarks.train_rate() > 0


def test_the_block_is_one_that_keeps_convolutions_blocked() -> None:
    block = microbenchmarks.block()
    for number in (1, 3):
        blocked, every = onnx_runtime.convolutions(microbenchmarks._net(block * number, 14))
        assert blocked == every == 3


def test_an_odd_width_loses_the_blocked_form() -> None:
    blocked, every = onnx_runtime.convolutions(onnx_runtime.chain(16, [(13, 1, 1), (13, 3, 13), (13, 1, 1)], 14))
    assert blocked < every == 3


def test_one_layer_computes_what_it_says() -> None:
    out = onnx_runtime.Session(onnx_runtime.chain(2, [(3, 1, 1)], 4))(np.ones((1, 2, 4, 4), np.float32))
    assert roundings(out, np.full((1, 3, 4, 4), 0.02)) <= 16
    assert onnx_runtime.Session(onnx_runtime.product(4))(np.ones((1, 4), np.float32)).shape == (1, 4)


def test_the_clock_tells_more_work_from_less() -> None:
    took = cpu_timer.interleaved(
        {"one": lambda: sum(range(2000)), "ten": lambda: sum(range(20000))}, rounds=5, burst=1e-3
    )
    assert 3 < cpu_timer.ratios(took, "one")["ten"] < 30
    assert all(len(times) == 5 and min(times) > 0 for times in took.values())


def test_each_burst_follows_untimed_calls_in_an_order_that_changes() -> None:
    said: list[str] = []
    cpu_timer.interleaved({name: partial(said.append, name) for name in "abcd"}, rounds=5, burst=0, warm=2)
    bursts = ["".join(said[at : at + 3]) for at in range(12, len(said), 3)]
    rounds = ["".join(burst[0] for burst in bursts[at : at + 4]) for at in range(0, len(bursts), 4)]
    assert all(len(set(burst)) == 1 for burst in bursts)
    assert len(rounds) == 5
    assert all(sorted(order) == list("abcd") for order in rounds)
    assert len(set(rounds)) > 2


def test_long_calls_warm_up_once() -> None:
    said: list[str] = []

    def slow() -> None:
        said.append("slow")
        begin = time.thread_time()
        while time.thread_time() - begin < cpu_timer.WARM_SECONDS:
            pass

    cpu_timer.interleaved({"slow": slow}, rounds=1)
    assert len(said) == 3 + 2


def test_a_cost_is_measured_once_for_a_machine_and_family(
    tmp_path: Path, profile: Profile, cost: Cost, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[ModelSpec] = []

    def measure(spec: ModelSpec, block: int, *, export: object = None) -> Cost:
        calls.append(spec)
        return cost

    monkeypatch.setattr(measured.latency_model, "measure", measure)
    spec = ModelSpec("imu_cnn", (6, 100), 7)
    for other in (spec, replace(spec, seed=3)):
        assert measured.costed(other, profile, folder=tmp_path) == cost
    assert len(calls) == 1
    measured.costed(replace(spec, classes=8), profile, folder=tmp_path)
    measured.costed(spec, replace(profile, machine="other"), folder=tmp_path)
    measured.costed(spec, profile, folder=tmp_path, fresh=True)
    assert len(calls) == 4


def test_a_plan_without_a_latency_limit_measures_no_model(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured.latency_model, "measure", lambda *_, **__: pytest.fail("measured"))
    made = measured.plan(ModelSpec("imu_cnn", (6, 100), 7), Budget(upload_mb=0.05), profile=profile)
    assert made.predicted["upload_mb"] <= 0.05


def test_without_an_exporter_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "entry_points", lambda group: ())
    with pytest.raises(ConfigError, match=r"talaria\[export\]"):
        onnx_runtime.exporter()


def test_the_machine_tells_what_it_can() -> None:
    now = machine.load()
    assert set(now) == {"load", "battery", "charging", "celsius"}
    assert machine.cores() >= 1
    assert microbenchmarks.memory_mb() > 0
