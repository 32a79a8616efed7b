"""The plot that benches share, and a bench that writes it."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from talaria.errors import ConfigError
from talaria_bench import audit, bars, export, planner, privacy
from talaria_bench.aggregation import aggregation
from talaria_bench.fleet import agent_memory, load
from talaria_bench.private import secure


def test_every_bar_has_its_name_and_its_value(tmp_path: Path) -> None:
    path = bars.place(tmp_path / "new" / "found.svg")
    bars.draw({"16 masks": {"ours": 52.5, "naive": 1440.0}, "4 masks": {"ours": 48.25}}, "CPU ms", path)
    text = path.read_text()
    assert all(word in text for word in ("16 masks", "4 masks", "ours", "naive", "52.5", "48.2", "1.44e+03", "CPU ms"))
    before = path.read_bytes()
    bars.draw({"16 masks": {"ours": 52.5, "naive": 1440.0}, "4 masks": {"ours": 48.25}}, "CPU ms", path)
    assert path.read_bytes() == before


def test_the_bench_of_folds_draws_its_peers_and_its_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    aggregation(clients=5, rounds=1, scale=0.05, plot=tmp_path / "a.svg", as_json=False)
    text = (tmp_path / "a.svg").read_text()
    assert all(word in text for word in ("5 masks", "4 masks", "naive_numpy", "naive_torch", "memory_pass"))
    assert "passes over the memory" in capsys.readouterr().out


def test_no_more_masks_are_told_than_there_are_clients(capsys: pytest.CaptureFixture[str]) -> None:
    for clients, told in ((2, [2]), (4, [4]), (5, [5, 4])):
        aggregation(clients=clients, rounds=1, scale=0.01, plot=None, as_json=True)
        assert [one["masks"] for one in json.loads(capsys.readouterr().out)["settings"]] == told


def an_audit(plot: Path, patch: pytest.MonkeyPatch) -> None:
    with pytest.raises(typer.Exit):
        audit.audit(noise=2.0, rounds=2, trials=100, plot=plot, as_json=False)


def an_export(plot: Path, patch: pytest.MonkeyPatch) -> None:
    row = {"latency_ratio": 0.31, "size_ratio": 0.111}
    patch.setattr(export, "measure", lambda *_: {"models": {"imu_cnn": row}})
    export.export(plot=plot, as_json=True)


def a_plan(plot: Path, patch: pytest.MonkeyPatch) -> None:
    row = {"model": "imu_cnn", "pruned": {"0.3": 0.77, "0.5": 0.55, "0.7": 0.33}, "budgets": {"kept": 10}}
    patch.setattr(planner, "family", lambda *_: row)
    patch.setattr("talaria.planning.profile.cached", lambda: SimpleNamespace(cpu="", block=8, machine=""))
    planner.planner(plot=plot, families="imu_cnn", as_json=True)


def a_secure_round(plot: Path, patch: pytest.MonkeyPatch) -> None:
    privacy.privacy(devices=8, mib=0.05, degree=0, leaving=0.25, plot=plot, as_json=False)


def secure_runs(plot: Path, patch: pytest.MonkeyPatch) -> None:
    one = {"data": "smartwatch", "algorithm": "hermes", "plain": [0.99, 0.98], "secure": [0.991, 0.981]}
    patch.setattr(secure, "measure", lambda *_: [one])
    secure.secure(plot=plot, as_json=True)


def an_agent(plot: Path, patch: pytest.MonkeyPatch) -> None:
    moments = [{"event": "connected", "rss_mb": 88.8}, {"event": "trained", "rss_mb": 110.0}]
    patch.setattr(agent_memory, "measured", lambda *_: {"agents": {"device0": moments}})
    agent_memory.agent(plot=plot, as_json=True)


@pytest.mark.parametrize(
    ("bench", "words"),
    [
        (an_audit, ("2 rounds", "claimed", "shows", "epsilon at 1e-05")),
        (an_export, ("latency", "size", "imu_cnn, aim", "0.31", "0.28", "0.111", "0.2")),
        (a_plan, ("30 % of the channels away", "70 % of the channels away", "imu_cnn", "0.77", "0.33")),
        (a_secure_round, ("8 devices", "coordinator, plain round", "a device: masking", "CPU ms")),
        (secure_runs, ("smartwatch, hermes", "plain", "secure", "0.985", "0.986")),
        (an_agent, ("device0", "connected", "trained", "88.8", "110")),
    ],
    ids=lambda one: one.__name__ if callable(one) else "",
)
def test_every_bench_with_a_peer_or_an_aim_draws_both(
    bench: Callable[[Path, pytest.MonkeyPatch], Any],
    words: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench(tmp_path / "found.svg", monkeypatch)
    text = (tmp_path / "found.svg").read_text()
    assert [word for word in words if word not in text] == []


def test_a_load_that_measures_nothing_to_draw_is_refused_first(tmp_path: Path) -> None:
    for given in ({"rounds": 1}, {"cuts": 3}):
        with pytest.raises(ConfigError, match="give two rounds, and leave cuts out"):
            load.load(plot=tmp_path / "found.svg", **given)
