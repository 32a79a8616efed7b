"""The benchmarks of private learning: curves hang together, cells are kept, and noise beyond numbers is told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from talaria.data import Federated
from talaria.errors import ConfigError
from talaria_bench.private import cells, secure
from talaria_bench.private.cells import Study, cell
from talaria_bench.private.epsilon import Cohort, measure
from talaria_bench.private.plot import draw

SMALL = Study(f"{__name__}:small", 2, recipe={"epochs": 1, "batch": 8, "lr": 0.1})


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six devices that learn two classes, in the place of a data set's name."""
    draws = np.random.default_rng(0)
    y = np.tile([0, 1], 120)
    x = (draws.normal(size=(240, 4)) + 3 * y[:, None]).astype(np.float32)
    data = Federated.from_arrays(x, y, np.repeat([f"d{i}" for i in range(6)], 40))
    import talaria

    simulate = talaria.simulate
    monkeypatch.setattr(
        talaria, "simulate", lambda algorithm, _, *rest, data_options, **more: simulate(algorithm, data, *rest, **more)
    )
    monkeypatch.setattr(talaria.data, "load", lambda name, **options: data)


def test_a_curve_has_a_row_for_each_budget_and_one_without_noise(tmp_path: Path) -> None:
    cohorts = {"small": Cohort(SMALL, epsilons=(1.0, 1e5), clips=(0.5, 5.0), alone=True)}
    said: list[str] = []
    found = measure(["small"], [0, 1], tmp_path, None, said.append, cohorts)
    (one,) = found
    assert len(one["alone"]) == 2
    usual, tight, loose = one["rows"]
    assert (usual["epsilon"], usual["lost"], usual["length"]) == (None, 0, 0)
    assert tight["length"] > loose["length"] > 0
    assert tight["clip"] in (0.5, 5.0)
    assert loose["mean"] > 0.9
    assert tight["mean"] < loose["mean"]
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.json")}
    assert measure(["small"], [0, 1], tmp_path, None, said.append, cohorts) == found
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.json")} == before
    draw(found, tmp_path / "curve.svg")
    assert "6 devices, fedavg" in (tmp_path / "curve.svg").read_text()


def test_noise_beyond_numbers_is_told_as_chance(tmp_path: Path) -> None:
    found = cell(SMALL, "fedavg", 0, {"clip": 1e12, "noise": 1e30}, tmp_path)
    assert found["diverged"]
    assert found["accuracy"] == 0.5
    with pytest.raises(ConfigError, match="need clip"):
        cell(SMALL, "fedavg", 0, {"noise": 1.0}, tmp_path)


def test_secure_sums_are_as_accurate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secure, "STUDIES", {"small": (SMALL, ("fedavg", "fedper"))})
    found = secure.measure(["small"], [0], tmp_path, None)
    assert [one["algorithm"] for one in found] == ["fedavg", "fedper"]
    assert all(one["kept"] for one in found)
    kept = [json.loads(path.read_text())["asked"]["privacy"] for path in tmp_path.glob("*.json")]
    assert kept.count(None) == 2
    assert kept.count({"secure": True}) == 2


def test_another_partition_of_the_same_name_is_learned_anew(tmp_path: Path) -> None:
    """What the file before it came to was told for it."""
    file, out = tmp_path / "partition.npz", tmp_path / "out"
    study = replace(SMALL, partition=True, rounds=1)
    for content in (b"one", b"two", b"one"):
        file.write_bytes(content)
        cell(study.at(file), "local", 0, None, out)
    assert len(list(out.iterdir())) == 2


def test_a_study_without_its_partition_is_refused() -> None:
    with pytest.raises(ConfigError, match="--partition"):
        cells.Study("fashion-mnist", 1, partition=True).at(None)
    with pytest.raises(ConfigError, match="unknown"):
        measure(["nobody"], [0], Path("nowhere"), None)
