"""The plot that benches share, and a bench that writes it."""

from pathlib import Path

import pytest

from talaria_bench import bars
from talaria_bench.aggregation import aggregation


def test_every_bar_has_its_name_and_its_value(tmp_path: Path) -> None:
    path = tmp_path / "new" / "found.svg"
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
