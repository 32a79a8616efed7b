"""Saved runs side by side, and what is refused."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from typer.testing import CliRunner

import talaria
from talaria import durable
from talaria.cli import simulate_output
from talaria.cli.main import app
from talaria.data import Federated
from talaria.errors import ConfigError, StateError
from talaria.simulation import checkpoint
from talaria.simulation.reporting import compare


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of two clients, saved by the real simulation."""
    folder = tmp_path_factory.mktemp("runs")
    draw = np.random.default_rng(0)
    y = np.tile([0, 1], 40)
    data = Federated.from_arrays(
        draw.normal(size=(80, 4)) + 3 * y[:, None], y, np.repeat(["anna", "<bela>"], 40), name="two"
    )
    for algorithm in ("fedavg", "fedper"):
        talaria.simulate(algorithm, data, rounds=2, evaluate_every=1, save=folder / algorithm)
    return folder


def test_figures_are_those_of_the_runs(runs: Path) -> None:
    ran = CliRunner().invoke(app(["report"]), ["report", str(runs / "fedavg"), str(runs / "fedper"), "--json"])
    assert ran.exit_code == 0, ran.output
    told = json.loads(ran.stdout)
    for name in ("fedavg", "fedper"):
        kept = json.loads((runs / name / "result.json").read_text())
        assert told[name]["members"]["mean"] == kept["accuracy"]["mean"]
        assert told[name]["members"]["worst_tenth"] == kept["accuracy"]["worst_tenth"]
        assert told[name]["bytes_up"] == kept["bytes_up"]
        assert told[name]["bytes_down"] == kept["bytes_down"] > kept["bytes_up"]
        assert told[name]["newcomers"] is None
    assert told["fedper"]["bytes_up"] < told["fedavg"]["bytes_up"]


def test_the_table_fits_a_terminal_of_eighty_columns(runs: Path) -> None:
    words = ["report", str(runs / "fedavg"), str(runs / "fedper")]
    ran = CliRunner().invoke(app(["report"]), words, env={"COLUMNS": "80"})
    assert ran.exit_code == 0, ran.output
    assert "…" not in ran.stdout
    for word in ("fedavg", "fedper", "members' worst tenth", "MB down", "two"):
        assert word in ran.stdout


def test_the_seeds_of_an_algorithm_are_set_side_by_side_however_many(runs: Path, tmp_path: Path) -> None:
    for seed in range(5):
        (tmp_path / f"seed-{seed}").symlink_to(runs / "fedavg")
    words = ["report", *(str(tmp_path / f"seed-{seed}") for seed in range(5))]
    ran = CliRunner().invoke(app(["report"]), words, env={"COLUMNS": "80"})
    assert ran.exit_code == 0, ran.output
    assert all(f"seed-{seed}" in ran.stdout for seed in range(5))
    assert len(re.findall("seed +[^\\w-]", ran.stdout)) == 2


def test_the_page_has_every_client_and_a_line_for_each_run(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "both.html"
    words = ["report", str(runs / "fedavg"), str(runs / "fedper"), "-o", str(out)]
    ran = CliRunner().invoke(app(["report"]), words)
    assert ran.exit_code == 0, ran.output
    page = out.read_text(encoding="utf-8")
    pictures = [ElementTree.fromstring(svg) for svg in re.findall(r'<svg class="chart".*?</svg>', page)]
    assert len(pictures) == 2
    tips = {tip.text for picture in pictures for tip in picture.iter("title")}
    for run in (compare.saved(runs / name) for name in ("fedavg", "fedper")):
        for client, accuracy in run.members.items():
            assert f"{client}, {run.name}: {accuracy:.3f}" in tips
    assert "<bela>" not in page
    assert "<script" not in page
    assert "did not learn from the same samples" not in page


def test_what_a_terminal_or_a_page_cannot_hold_is_escaped(runs: Path, tmp_path: Path) -> None:
    """A terminal of another encoding has no dash, and a folder may be called by bytes that are no UTF-8."""
    odd = tmp_path / os.fsdecode(b"b\xff")
    shutil.copytree(runs / "fedavg", odd)
    words = [sys.executable, "-m", "talaria", "report", str(odd), "-o", str(odd) + ".html"]
    ran = subprocess.run(words, env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert b"| newcomers              | \\u2013" in ran.stdout
    assert b"b\\udcff" in ran.stdout
    assert "<h1>b\\udcff</h1>" in Path(str(odd) + ".html").read_text(encoding="utf-8")


def test_a_result_that_nests_deep_is_refused(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "experiment.json").write_bytes((runs / "fedavg" / "experiment.json").read_bytes())
    (tmp_path / "result.json").write_text("[" * 100_000)
    with pytest.raises(StateError, match=r"result\.json cannot be read \(nested deeper than 8\)"):
        compare.saved(tmp_path)


def test_runs_of_another_task_are_called_by_their_score(runs: Path, tmp_path: Path) -> None:
    for name in ("result.json", "experiment.json"):
        (tmp_path / name).write_bytes((runs / "fedavg" / name).read_bytes())
    told = json.loads((tmp_path / "result.json").read_text())
    (tmp_path / "result.json").write_text(json.dumps(told | {"task": "regression"}))
    ran = CliRunner().invoke(app(["report"]), ["report", str(tmp_path), "-o", str(tmp_path / "page.html")])
    assert ran.exit_code == 0, ran.output
    assert "R²" in ran.output
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Mean R² of the members" in page
    assert "ccuracy" not in page


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "result.json").unlink(), "its run is not whole; `talaria simulate --resume"),
        (lambda folder: (folder / "experiment.json").unlink(), "name a folder that `talaria simulate --save` wrote"),
        (lambda folder: (folder / "result.json").write_text("[1]"), "holds no table"),
        (lambda folder: (folder / "result.json").write_text("{"), "cannot be read"),
        (lambda folder: (folder / "result.json").write_text('{"newcomers": null}'), r"damaged \(KeyError"),
    ],
)
def test_what_is_no_whole_run_is_refused(runs: Path, tmp_path: Path, change: object, message: str) -> None:
    for name in ("result.json", "experiment.json"):
        (tmp_path / name).write_bytes((runs / "fedavg" / name).read_bytes())
    assert callable(change)
    change(tmp_path)
    with pytest.raises(StateError, match=message):
        compare.saved(tmp_path)


def test_a_file_that_is_given_for_a_folder_is_told_what_to_name(tmp_path: Path) -> None:
    (tmp_path / "mine.npz").write_bytes(b"")
    with pytest.raises(StateError, match="name a folder that `talaria simulate --save` wrote"):
        compare.saved(tmp_path / "mine.npz")


def test_too_many_runs_and_two_of_one_name_are_refused(runs: Path) -> None:
    with pytest.raises(ConfigError, match="65 runs; name 1 to 64 folders"):
        compare.compared([runs / "fedavg"] * 65)
    with pytest.raises(ConfigError, match=r"5 runs; a page \(--out\) tells 4 apart, figures take more"):
        compare.compared([runs / "fedavg"] * 5, page=True)
    with pytest.raises(ConfigError, match="two runs are called 'fedavg'"):
        compare.compared([runs / "fedavg"] * 2)


@pytest.mark.parametrize(
    ("value", "says"), [(-0.00042, "-0.00042"), (-103346.619, "-103346.619"), (0.5, "0.500"), (0.0, "0.000")]
)
def test_an_error_in_small_units_keeps_its_digits(value, says):
    assert simulate_output._figure(value) == says


def test_a_full_disk_is_not_told_to_be_somebody_elses(tmp_path, monkeypatch):
    def full(path, *given, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(durable, "write", full)
    with pytest.raises(StateError, match=r"cannot be written \(No space left on device\); free space there, or name"):
        checkpoint.begin(tmp_path / "run", {})


def test_names_are_shown_as_they_are(tmp_path: Path) -> None:
    """They were read as rich's markup: a client called sensor[/a] ended a whole run in a traceback, others lost their
    brackets, and :cat: became a picture."""
    names, y = ["sensor[/a]", "[red]lamp", ":cat:"], np.tile([0, 1], 30)
    x = np.random.default_rng(0).normal(size=(60, 4)) + y[:, None]
    np.savez(tmp_path / "my[b].npz", x=x, y=y, client=np.repeat(names, 20))
    words = ["simulate", "-d", f"npz:{tmp_path / 'my[b].npz'}", "--rounds", "1", "--save", str(tmp_path / "run[i]")]
    env = {"COLUMNS": "200"}
    learned = CliRunner().invoke(app(words), words, env=env)
    assert learned.exit_code == 0, learned.output
    for name in (*names, "my[b].npz"):
        assert name in learned.stdout
    words = ["report", str(tmp_path / "run[i]")]
    set_beside = CliRunner().invoke(app(words), words, env=env)
    assert set_beside.exit_code == 0, set_beside.output
    assert "run[i]" in set_beside.stdout
