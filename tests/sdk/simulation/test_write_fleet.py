"""A fleet is written whole or not at all, never over something, and only where its agents would learn from it."""

import os

import numpy as np
import pytest
from typer.testing import CliRunner

from talaria.cli.main import app
from talaria.privacy.accounting import noise_for
from talaria_coordinator.config.fleet import load_config as fleet_config


@pytest.fixture
def mine(tmp_path):
    def make(**changes):
        draw, y = np.random.default_rng(0), np.tile(np.arange(3), 20)
        arrays = {"x": draw.normal(size=(60, 6, 32)), "y": y, "client": np.repeat(["anna", "bela", "carl"], 20)}
        np.savez(tmp_path / "mine.npz", **(arrays | changes))
        return tmp_path / "mine.npz"

    return make


def written(path, folder, *words):
    base = [
        "simulate",
        "-d",
        f"npz:{path}",
        "--no-training",
        *(["--write-fleet", str(folder)] if folder else []),
        *words,
    ]
    return CliRunner().invoke(app(base), base)


def test_nothing_is_written_over_and_a_half_written_fleet_never_stays(mine, tmp_path):
    folder, path = tmp_path / "fleet", mine()
    first = written(path, folder)
    assert first.exit_code == 0
    assert f"talaria coordinator serve {folder}/fleet.toml" in first.output
    before = (folder / "fleet.toml").read_bytes()
    assert "not empty; give the name of a new folder" in str(written(path, folder).exception)
    assert (folder / "fleet.toml").read_bytes() == before
    assert "give --write-fleet DIR" in str(written(path, None).exception)
    (tmp_path / "file").write_text("")
    assert "cannot be written" in str(written(path, tmp_path / "file" / "fleet").exception)
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".fleet")]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"client": np.repeat(["Anna B.", "bela", "carl"], 20)}, "client 'Anna B.' cannot be a device's id"),
        ({"client": np.repeat(["fleet", "bela", "carl"], 20)}, "client 'fleet' cannot be"),
        ({"y": np.repeat([0, 1, 2], 20)}, "anna trains on class 0 alone"),
    ],
)
def test_a_client_that_no_agent_could_be_is_refused_first(mine, tmp_path, changes, says):
    assert says in str(written(mine(**changes), tmp_path / "fleet").exception)
    assert not (tmp_path / "fleet").exists()


def test_a_budget_is_written_down_and_secure_sums_need_keys(mine, tmp_path):
    folder, path = tmp_path / "fleet", mine()
    told = written(path, folder, "--epsilon", "8", "--clip", "0.5", "--rounds", "4")
    assert told.exit_code == 0
    assert "anew in the fleet, so their bytes will differ" in told.output
    found = fleet_config(folder / "fleet.toml").privacy.rule
    assert (found.clip, found.epsilon, found.secure) == (0.5, 8.0, False)
    assert found.noise == noise_for(8.0, 4, found.delta)
    assert "`talaria fleet init` and set [privacy] secure = true" in str(
        written(path, tmp_path / "other", "--secure").exception
    )
    assert not (tmp_path / "other").exists()
