"""A fleet is written whole or not at all, never over something, and only where its agents would learn from it."""

import json
import os
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from talaria import data
from talaria.cli.main import app
from talaria.errors import ConfigError
from talaria.privacy.accounting import noise_for
from talaria.simulation.device_ids import device_id, ids_of
from talaria.wire.topics import DEVICE_NAME
from talaria_coordinator.config.fleet import load_config as fleet_config
from talaria_edge.config import load_config as device_config


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


def test_what_it_says_to_type_can_be_typed(mine, tmp_path):
    told = written(mine(), tmp_path / "my fleet").output
    assert f"  talaria coordinator serve '{tmp_path}/my fleet'/fleet.toml\n" in told
    assert f"  talaria edge run '{tmp_path}/my fleet'/*.toml\n" in told


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


def test_each_device_gets_its_clients_unlabelled_windows(mine, tmp_path):
    split = np.tile([0, 0, 0, 1, 2], 12)
    split[[1, 2, 41]] = 3
    path = mine(split=split)
    assert written(path, tmp_path / "fleet").exit_code == 0
    clients = data.load(f"npz:{path}").clients
    for name, count in {"anna": 2, "bela": 0, "carl": 1}.items():
        one, whole = clients[name], device_config(tmp_path / "fleet" / f"{name}.toml").source.load()
        assert len(whole.train) + len(whole.val) + len(whole.test) == 20 - count
        assert np.array_equal(whole.train.x, one.train.x)
        assert (whole.unlabelled is None) == (count == 0)
        if count:
            assert len(whole.unlabelled) == count
            assert np.array_equal(whole.unlabelled, one.unlabelled)


def test_a_class_called_as_another_ones_number_is_written_by_its_name(mine, tmp_path):
    """Who reads the file beside a bundle, which has names too, would take class 1, called 2, for the one called 1."""
    split = np.where(np.arange(60) % 20 == 19, 3, np.arange(60) // 3 % 3)
    for labels, kind in (([1, 2, 3], "U"), ([3, 7, 100], "i"), ([0, 1, 2], "i"), (["a", "b", "c"], "i")):
        path, folder = mine(y=np.array(labels)[np.arange(60) % 3], split=split), tmp_path / f"fleet-{labels[0]}"
        assert written(path, folder).exit_code == 0
        assert np.load(folder / "data" / "anna.npz")["y"].dtype.kind == kind
        one, found = data.load(f"npz:{path}").clients["anna"], device_config(folder / "anna.toml").source.load()
        assert np.array_equal(found.test.y, one.test.y)
        assert np.array_equal(found.unlabelled, one.unlabelled)


def test_labels_in_any_script_are_read_as_they_were_written(mine, tmp_path):
    labels = ["läuft 😀", 'a "b" \\', "x\ny\x7fz"]
    assert written(mine(y=np.array(labels)[np.arange(60) % 3]), tmp_path / "fleet").exit_code == 0
    assert set(device_config(tmp_path / "fleet" / "anna.toml").labels) == set(labels)


def test_a_client_that_no_agent_could_be_is_refused_first(mine, tmp_path):
    odd = mine(y=np.repeat([0, 1, 2], 20))
    for task in ("classification", "classification:balance=true"):
        assert "anna trains on class 0 alone" in str(written(odd, tmp_path / "fleet", "--task", task).exception)
    odd = mine(y=np.repeat([0, 1, 2], 20), client=np.repeat(["Анна", "dora", "emil"], 20))  # no device is called so
    assert "Анна trains on class 0 alone" in str(written(odd, tmp_path / "fleet").exception)
    assert not (tmp_path / "fleet").exists()


OWN = """
import torch
from torch import nn
class Summed(nn.Module):
    def __init__(self, channels, classes):
        super().__init__()
        self.conv, self.head = nn.Conv1d(channels, channels, 3, padding=1), nn.Linear(channels, classes)
    def forward(self, x):
        return self.head((self.conv(x) + x).mean(-1))
class Spectrum(Summed):
    def forward(self, x):
        return self.head(torch.fft.rfft(self.conv(x)).abs().mean(-1))
def summed(shape, classes):
    return Summed(shape[0], classes)
def spectrum(shape, classes):
    return Spectrum(shape[0], classes)
"""


def test_what_its_simulation_would_refuse_is_not_left_behind(mine, tmp_path, monkeypatch):
    (tmp_path / "refused_nets.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    folder, path = tmp_path / "fleet", mine()
    whole = written(path, folder, "-a", "hermes", "--model", "refused_nets:summed")
    assert "has none that may go" in str(whole.exception)
    words = ["-a", "fedavg", "--model", "refused_nets:spectrum", "--engine", "onnx", "--rounds", "1"]
    asked = ["simulate", "-d", f"npz:{path}", "--write-fleet", str(folder), *words]
    refused = CliRunner().invoke(app(asked), asked)
    assert "which has no rule" in str(refused.exception)
    assert f"{folder} is taken back" in refused.stderr
    assert not folder.exists()
    (folder / "state").mkdir(parents=True)  # somebody serves it
    monkeypatch.setattr("talaria.cli.simulate_output.write_fleet", lambda folder, _: None)
    assert "no rule" in str(CliRunner().invoke(app(asked), asked).exception)
    assert folder.exists()


def test_clients_of_any_name_have_devices_with_ids_and_a_table_says_whose(mine, tmp_path):
    names, folder = ["Jürgen B.", "fleet", "../../etc/пётр 2"], tmp_path / "fleet"
    told = written(mine(client=np.repeat(names, 20)), folder)
    assert told.exit_code == 0, told.exception
    table = json.loads((folder / "names.json").read_text())
    assert sorted(table.values()) == sorted(names)
    assert all(device_id(name) == device for device, name in table.items())
    assert "'Jürgen B.' is jurgen-b-" in told.output
    assert sorted(path.stem for path in folder.glob("*.toml")) == sorted(["fleet", *table])
    members = fleet_config(folder / "fleet.toml").members
    assert sorted(members) == sorted(table)
    for device in table:
        assert device_config(folder / f"{device}.toml").device == device
    assert written(mine(), tmp_path / "plain").exit_code == 0
    assert not (tmp_path / "plain" / "names.json").exists()


@given(st.text(min_size=1, max_size=60))
def test_any_name_has_an_id_that_depends_on_it_alone(name):
    device = device_id(name)
    assert re.fullmatch(DEVICE_NAME, device)
    assert device != "fleet"
    assert device_id(device) == device
    assert (device == name) == (re.fullmatch(DEVICE_NAME, name) is not None and name != "fleet")


def test_two_clients_are_never_one_device():
    with pytest.raises(ConfigError, match=r"clients 'Jürgen B\.' and '.*' would both be device 'jurgen-b-.*rename one"):
        ids_of(["Jürgen B.", device_id("Jürgen B.")])


def test_a_run_that_was_kept_under_devices_names_goes_on(mine, tmp_path):
    path = mine(client=np.repeat(["Jürgen", "bela", "carl"], 20))
    words = ("-a", "fedavg", "--rounds", "2", "--json", "-d", f"npz:{path}", "--write-fleet", tmp_path / "fleet")
    words = ["simulate", *map(str, words), "--save", str(tmp_path / "kept")]
    first = json.loads(CliRunner().invoke(app(words), words).stdout)
    again = ["simulate", "--resume", str(tmp_path / "kept"), "--json"]
    second = json.loads(CliRunner().invoke(app(again), again).stdout)
    assert device_id("Jürgen") in first["clients"]
    assert second["model_digest"] == first["model_digest"]


def test_who_has_one_class_alone_is_simulated_and_named_as_what_a_device_would_not_be(mine):
    client = np.repeat(["anna", "bela", "carl"], 20)
    path = mine(client=client, y=np.where(client == "bela", 1, np.arange(60) % 3))
    words = ["simulate", "-a", "fedavg", "--rounds", "1", "--json", "-d", f"npz:{path}"]
    told = CliRunner().invoke(app(words), words)
    assert json.loads(told.stdout)["clients"]["bela"]
    assert "note: one class alone to train on: bela; a device learns nothing from such samples" in told.stderr


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


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--plan", "PLAN"), "widths name nosuch"),
        (("--data-option", "newcomers=carl", "--plan", "carl=PLAN"), "widths name nosuch"),
        (("--recipe", "freeze=nosuch"), "names no layer"),
        (("-a", "local", "--asynchronous"), "shares nothing"),
        (("--aggregator", "median:f=1", "--asynchronous", "--buffer", "2"), "buffer=2 must be at least 3"),
    ],
)
def test_what_could_not_begin_is_not_written(mine, tmp_path, words, why):
    """A newcomer's plan was even refused when all rounds were learned, and all was lost."""
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"widths": {"nosuch": 3}}))
    told = written(mine(), tmp_path / "fleet", *(word.replace("PLAN", str(plan)) for word in words))
    assert re.search(why, str(told.exception))
    assert not (tmp_path / "fleet").exists()
