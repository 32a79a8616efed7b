"""Benchmarks refuse numbers that they cannot measure with, before they measure."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from talaria.cli.main import app
from talaria.errors import ConfigError


@pytest.mark.parametrize(
    "words",
    [
        "aggregation --clients 0", "aggregation --rounds 0", "aggregation --keep 2", "aggregation --scale 0",
        "engines --rounds 0", "export --keep 0", "export --size 0", "export --seconds 0", "export --epochs -1",
        "epsilon --partition none.npz", "secure --partition none.npz", "simulation --partition none.npz",
        "agent --python none", "privacy --leaving 2", "privacy --leaving -1", "load --leaving 0.5",
    ],
)  # fmt: skip
def test_a_number_out_of_range_is_named(words: str) -> None:
    given = ["bench", *words.split(), "--json"]
    found = CliRunner().invoke(app(given), given)
    assert found.exit_code == 2, found.exception
    assert f"Invalid value for '{given[2]}'" in found.output


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--devices 2 --ask 5", "--ask 5 is more than --devices 2"),
        ("--devices 2 --secure", "privacy: 2 devices"),  # as its coordinator would say
        ("--devices 4 --secure", "asks 1 of 4 devices"),
        ("--devices 4 --secure --ask 4 --degree 9", "degree=9 must be even"),
    ],
)
def test_a_load_that_no_fleet_takes_is_refused_before_it_is_measured(words: str, why: str) -> None:
    given = ["bench", "load", "--rounds", "1", "--model-mib", "0.1", *words.split()]
    found = CliRunner().invoke(app(given), given)
    assert isinstance(found.exception, ConfigError)
    assert why in str(found.exception)


@pytest.mark.parametrize(
    "bench",
    [
        "adapters", "agent", "aggregation", "audit", "engines", "epsilon", "export", "load", "people", "planner",
        "privacy", "secure", "simulation",
    ],
)  # fmt: skip
def test_a_plot_that_cannot_be_written_is_refused_before_it_is_measured(bench: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path, tmp_path / "file" / "found.svg"):
        given = ["bench", bench, "--plot", str(place)]
        found = CliRunner().invoke(app(given), given)
        assert isinstance(found.exception, ConfigError), found.output
        assert f"--plot {place}: cannot be written" in str(found.exception)


@pytest.mark.parametrize(
    ("bench", "option"),
    [
        ("people", "--out"), ("epsilon", "--out"), ("secure", "--out"), ("fuzz", "--corpus"), ("chaos", "--folder"),
        ("story", "--folder"),
    ],
)  # fmt: skip
def test_a_folder_that_cannot_be_made_is_refused_before_it_is_measured(bench: str, option: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    given = ["bench", bench, option, str(tmp_path / "file" / "within")]
    found = CliRunner().invoke(app(given), given)
    assert isinstance(found.exception, ConfigError), found.output
    assert f"{option} {tmp_path}/file/within: no folder can be made or written to there" in str(found.exception)


@pytest.mark.parametrize("words", ["chaos --faults 1 --devices 2", "story"])
def test_a_folder_that_is_not_empty_is_refused_and_nothing_goes_on_there(words: str, tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").write_text("of before")
    given = ["bench", *words.split(), "--folder", str(tmp_path)]
    found = CliRunner().invoke(app(given), given)
    assert isinstance(found.exception, ConfigError)
    assert "is there already and not empty; give the name of a new folder" in str(found.exception)
    assert (tmp_path / "journal.jsonl").read_text() == "of before"


@pytest.mark.parametrize(
    ("words", "why"),
    [("--seed 12 --only 99", "--only 99: seed 12 has the faults 0, 1"), ("--only 2", "give --seed with it")],
)
def test_faults_that_a_history_does_not_have_are_none_that_it_survives(words: str, why: str) -> None:
    given = ["bench", "history", *words.split()]
    found = CliRunner().invoke(app(given), given)
    assert isinstance(found.exception, ConfigError)
    assert why in str(found.exception)
