import json
import sys
from pathlib import Path

import numpy as np
import pytest

from talaria.cli import main
from talaria.planning import measured
from talaria.planning.latency_model import Cost
from talaria.planning.plan import Plan
from talaria.planning.profile import Profile


@pytest.fixture(autouse=True)
def known(profile: Profile, cost: Cost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device and a model that are measured already; the cache is this test's own."""
    from talaria.planning import profile as profiles

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(profiles, "measure", lambda folder: profile)
    monkeypatch.setattr(measured.latency_model, "measure", lambda spec, block, export=None: cost)


def talaria(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["talaria", *words])
    with pytest.raises(SystemExit) as end:
        main.main()
    return int(end.value.code or 0)


def test_profile_as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], profile: Profile) -> None:
    assert talaria(monkeypatch, "profile", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    now = found.pop("now")
    assert Profile.from_json(found) == profile
    assert "load" in now


def test_profile_for_people(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert talaria(monkeypatch, "profile") == 0
    assert "8 channels" in capsys.readouterr().out


def test_plan_as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert talaria(monkeypatch, "plan", "--budget", "latency_ratio=0.5", "--budget", "upload_kb=100", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    made = Plan.from_json(found["plan"])
    assert made.predicted["latency_ratio"] <= 0.5
    assert made.predicted["upload_mb"] <= 0.1
    assert found["model"]["name"] == "imu_cnn"


def test_a_plan_is_checked_on_samples_where_they_are_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    y = np.arange(60) % 3
    x = (np.random.default_rng(0).standard_normal((60, 20)) + 2 * y[:, None]).astype(np.float32)
    file = tmp_path / "mine.npz"
    np.savez(file, x=x, y=y, client=np.arange(60) % 2)
    words = ("plan", "-m", "mlp", "-b", "accuracy_drop=0.9", "-b", "bundle_kb=20", "--data", f"npz:{file}")
    assert talaria(monkeypatch, *words, "--epochs", "2", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    made = Plan.from_json(found)
    assert made.accuracy_drop == 0.9
    assert made.widths
    assert made.model == found["model"]
    assert found["model"]["input_shape"] == [20]
    assert found["checked"]["kept"] is True
    assert found["checked"]["samples"] > 0
    assert talaria(monkeypatch, *words, "--epochs", "2", "--by-worth", "--json") == 0
    weighed = json.loads(capsys.readouterr().out)
    assert "worth least" in weighed["plan"]["reasons"]["widths"]
    assert weighed["plan"]["predicted"]["bundle_mb"] <= 0.02
    assert weighed["plan"]["accuracy_drop"] == 0.9
    unlimited = (*words[:3], *words[5:], "--epochs", "2")
    assert talaria(monkeypatch, *unlimited) == 0
    told = capsys.readouterr().out
    assert "of the unpruned model" in told
    assert "accuracy_drop" not in told, "no limit was asked for"
    assert talaria(monkeypatch, "plan", "--epochs", "2") == 1
    assert "give --data as well" in capsys.readouterr().err
    assert weighed["checked"]["samples"] == found["checked"]["samples"]
    assert talaria(monkeypatch, *words, "--client", "nobody") == 1
    assert "'nobody'" in capsys.readouterr().err


@pytest.mark.parametrize(("task", "outputs"), [("regression", 2), ("multilabel", 3)])
def test_a_plan_is_checked_by_the_score_of_its_task(
    task: str, outputs: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    x = np.random.default_rng(0).standard_normal((90, 20)).astype(np.float32)
    y = 100 + 30 * x[:, :outputs] if task == "regression" else (x[:, :outputs] > 0).astype(int)
    np.savez(tmp_path / "mine.npz", x=x, y=y, client=np.arange(90) % 2)
    words = ("plan", "-m", "mlp", "-b", "accuracy_drop=0.9", "-b", "bundle_kb=20", "--data", f"npz:{tmp_path}/mine.npz")
    assert talaria(monkeypatch, *words, "--shape", "20", "--task", task, "--epochs", "12", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"]["classes"] == outputs
    assert found["plan"]["widths"]
    assert found["checked"]["dense"] > (0.0 if task == "regression" else 0.5)
    assert talaria(monkeypatch, *words, "--task", "per_step") == 1
    assert talaria(monkeypatch, "plan", "-m", "mlp", "--task", task, "--json") == 0
    bare = json.loads(capsys.readouterr().out)["model"]
    assert (bare["input_shape"], bare["classes"]) == ([64], 1 if task == "regression" else 10)


def test_plan_for_people(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert talaria(monkeypatch, "plan", "-m", "mlp", "--shape", "20", "-b", "bundle_kb=20") == 0
    out = capsys.readouterr().out
    assert "fc1 =" in out
    assert "blocks of 8" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--budget", "latency_ms=0.0001"), "nearest possible latency_ms="),
        (("--classes", "900", "--budget", "bundle_kb=1"), "(imu_cnn of 900 outputs with one block of 8 channels"),
        (("--budget", "speed=1"), "'speed' is unknown"),
        (("--model", "nonsense"), "'nonsense' is unknown"),
        (("--shape", "a,b"), "--shape"),
        (("--by-worth",), "--data"),
        (("--task", "sums"), "task='sums' is unknown"),
        (("--classes", "1"), "--classes 1: classification needs at least 2"),
    ],
)
def test_a_refusal_is_one_message(
    words: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talaria(monkeypatch, "plan", *words) == 1
    captured = capsys.readouterr()
    assert said in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""
    assert len(captured.err.strip().splitlines()) == 1
