"""A run's model told by a process of its own: the same as torch says in this one."""

import os
import sys
from contextlib import suppress
from dataclasses import replace

import pytest

from talaria import plugins
from talaria.errors import ConfigError, StateError
from talaria.federated import blueprint, make_blueprint, own_process, rounds, run_model
from talaria.federated.run import Run
from talaria.model.spec import AdapterSpec, ModelSpec
from talaria.tensors import equal

IMU = ModelSpec("imu_cnn", (6, 100), 7, adapters=AdapterSpec("residual"), seed=3)
RUNS = {
    "fedper": Run(spec=IMU, algorithm="fedper"),
    "statistics travel": Run(spec=IMU, algorithm="fedavg", buffers="aggregate"),
    "pfedgm": Run(spec=ModelSpec("mlp", (20,), 4), algorithm="pfedgm"),
    "local": Run(spec=ModelSpec("fmnist_cnn", (1, 28, 28), 10), algorithm="local"),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_file_holds_what_torch_says(name):
    run = RUNS[name]
    found = blueprint.decode(make_blueprint.here(run))
    assert list(found.schema) == list(run_model.first_shared(run))
    assert dict(found.schema) == dict(run_model.update_schema(run))
    assert found.layout == run_model.layout_of(run.spec)
    assert found.split == run_model.split_of(run)
    assert equal(found.first(), run_model.first_shared(run))


def test_a_process_of_its_own_gives_the_same_bytes():
    assert make_blueprint.made(RUNS["fedper"].to_json()) == make_blueprint.here(RUNS["fedper"])


def test_ctrl_c_in_a_terminal_is_for_who_asks_and_not_for_the_process(tmp_path, monkeypatch):
    """A coordinator that was told to end while its run's model was worked out blamed the run."""
    (tmp_path / "tells_its_group.py").write_text("import os\nprint(os.getpgid(0))\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert int(own_process.made("tells_its_group", "{}", "failed")) != os.getpgid(0)


def test_a_process_that_has_adopted_it_asks_torch_no_more(monkeypatch):
    run = replace(RUNS["fedper"], rounds=7)
    monkeypatch.setattr(run_model, "_adopted", {})
    known = blueprint.decode(make_blueprint.here(run))
    run_model.adopt(run, known)
    monkeypatch.setattr(run_model, "template", None)
    shared, server = rounds.start(run)
    assert equal(shared, known.first())
    assert server == {}
    assert run_model.update_schema(run) is known.schema
    assert run_model.layout_of(run.spec) is known.layout
    assert run_model.split_of(run) is known.split


def test_models_of_ones_own_are_found_where_this_process_finds_them(tmp_path, monkeypatch):
    (tmp_path / "my_nets.py").write_text(
        "from torch import nn\n"
        "def small(input_shape, classes):\n"
        "    print('made')  # no part of the file\n"
        "    return nn.Sequential(nn.Linear(input_shape[0], 8), nn.ReLU(), nn.Linear(8, classes))\n"
    )
    monkeypatch.setattr(plugins, "_beside", [str(tmp_path)])
    monkeypatch.setattr(sys, "path", [*sys.path])
    run = Run(spec=ModelSpec("my_nets:small", (5,), 3), algorithm="fedavg")
    assert list(blueprint.decode(make_blueprint.made(run.to_json())).schema) == [
        "0.weight",
        "0.bias",
        "2.weight",
        "2.bias",
    ]


def test_what_the_run_is_to_blame_for_is_said_as_this_process_would_say_it():
    run = Run(spec=ModelSpec("mlp", (20,), 4), algorithm="hermes")
    text = run.to_json().replace('"name":"mlp"', '"name":"imu_cnn"')
    with pytest.raises(ConfigError, match="imu_cnn"):
        make_blueprint.made(text)
    with pytest.raises(ConfigError, match="unknown"):
        make_blueprint.made(run.to_json().replace("hermes", "hermex"))


@pytest.mark.parametrize("at", [0, 5, 40, 400, -1])
def test_a_damaged_file_is_refused(at):
    data = bytearray(make_blueprint.here(RUNS["pfedgm"]))
    with pytest.raises(StateError, match="make it again"):
        blueprint.decode(bytes(data[:at]))
    data[at] ^= 0x21
    with suppress(StateError):  # a value may be another number; a name, a shape and a part may not
        blueprint.decode(bytes(data))


def test_another_version_is_refused():
    file = make_blueprint.here(RUNS["pfedgm"])
    data = file.replace(b'\\"v\\":1', b'\\"v\\":9')
    assert data != file
    with pytest.raises(StateError, match="version 9"):
        blueprint.decode(data)
