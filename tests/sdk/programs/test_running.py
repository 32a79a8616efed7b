"""Programs run, and are refused, without torch."""

import json
import subprocess
import sys

import numpy as np
import onnx
import onnxruntime
import pytest
from typer.testing import CliRunner

from talaria.cli.programs import app
from talaria.errors import ConfigError, DataError, ModelError, StateError, TooLarge
from talaria.model import zoo
from talaria.programs import vector
from talaria.programs.program import Program
from talaria.programs.session import Session
from talaria.programs.shapes import Limits
from talaria.programs.training import Training
from talaria.programs.verify import verify

SCRIPT = """
import sys
import numpy as np
from talaria.programs import vector
from talaria.programs.program import Program
from talaria.programs.verify import verify
path = sys.argv[1]
assert verify(path).ok
program = Program.open(path)
feed = vector.inputs(program.graph, program.manifest)
weights = {name.removeprefix("weight/"): value for name, value in feed.items() if name.startswith("weight/")}
momentum = program.momentum(weights)
losses = []
for _ in range(8):
    weights, momentum, loss = program.step(weights, momentum, feed["x"], feed["y"], lr=0.01)
    losses.append(loss)
assert losses[-1] < losses[0], losses
print(sorted({"torch", "onnx", "typer", "talaria.types"} & set(sys.modules)))
"""

AGAIN = """
import sys
import numpy as np
from talaria.programs.program import Program
from talaria.programs.training import Training
from talaria.programs import vector

def most():
    status = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))

program = Program.open(sys.argv[1])
feed = vector.inputs(program.graph, program.manifest)
weights = {name.removeprefix("weight/"): value for name, value in feed.items() if name.startswith("weight/")}
x = np.zeros((256, *feed["x"].shape[1:]), np.float32)
y = np.zeros(256, np.int64)
program.session
taken = []
for _ in range(5):
    before = most()
    program.step(weights, program.momentum(weights), x, y, lr=0.01)
    taken.append(most() - before)
print(taken[0], sum(taken[1:]))
"""


FOREIGN = """
from torch import nn


class Net(nn.Module):
    def __init__(self, channels, classes):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(channels, 8, 3), nn.GroupNorm(2, 8)
        self.gru, self.out = nn.GRU(8, 5, batch_first=True), nn.Linear(5, classes)

    def forward(self, x):
        _, last = self.gru(self.norm(self.conv(x)).transpose(1, 2))
        return self.out(last[-1])


class Odd(Net):
    def __init__(self, channels, classes):
        super().__init__(channels, classes)
        self.odd = nn.RReLU()

    def forward(self, x):
        return self.out(self.odd(self.conv(x)[:, :5, -1]))


class Spare(Net):
    # its GRU is read by nobody
    def __init__(self, channels, classes):
        super().__init__(channels, classes)
        self.out = nn.Linear(8, classes)

    def forward(self, x):
        return self.out(self.norm(self.conv(x)).mean(-1))


def make(shape, classes):
    return Net(shape[0], classes)


def spare(shape, classes):
    return Spare(shape[0], classes)


def odd(shape, classes):
    return Odd(shape[0], classes)
"""


@pytest.fixture
def file(program_of, tmp_path):
    path = tmp_path / "mlp.program"
    path.write_bytes(program_of("mlp"))
    return path


def test_a_program_is_verified_and_learns_without_torch(program_of, tmp_path):
    path = tmp_path / "imu.program"
    path.write_bytes(program_of("imu_cnn"))
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_steps_of_the_same_shapes_need_no_more_memory_than_the_first(program_of, tmp_path):
    """ONNX Runtime plans a block for some shapes, beside what their first run took, unless that is given back."""
    path = tmp_path / "imu.program"
    path.write_bytes(program_of("imu_cnn"))
    done = subprocess.run([sys.executable, "-c", AGAIN, str(path)], capture_output=True, text=True, check=True)
    first, later = map(int, done.stdout.split())
    assert first > 10_000, "a step took no memory that is worth looking at"
    assert later < 0.25 * first


@pytest.mark.parametrize("name", ["imu_cnn", "mlp", "fmnist_cnn"])
def test_a_program_is_standard_onnx(program_of, name):
    model = onnx.load_from_string(program_of(name))
    onnx.checker.check_model(model, full_check=True)
    assert {entry.domain for entry in model.opset_import} == {""}
    assert not [node for node in model.graph.node if "Random" in node.op_type or node.op_type in ("Dropout", "Loop")]


def test_a_program_of_imu_cnn_is_small(program_of):
    assert len(program_of("imu_cnn")) <= 25_000


def test_verify_measures_and_replays(file):
    report = verify(file)
    assert report.ok
    assert report.deviation <= report.allowed
    assert report.parity["program"] <= 2 * report.parity["torch"]
    assert report.digest == Program.open(file).digest


def test_another_expectation_fails(program_of, tmp_path):
    """A file that claims another result is refused by the replay, however well it is written."""
    data = program_of("mlp")
    program = Program(data)
    from talaria.programs import onnx_file

    facts = program.manifest
    wrong = {kind: (total + norm, norm) for kind, (total, norm) in facts.expected.items()}
    path = tmp_path / "wrong.program"
    path.write_bytes(onnx_file.write(program.graph, type(facts)(**{**vars(facts), "expected": wrong}).text()))
    assert not verify(path).ok
    done = CliRunner().invoke(app, ["verify", str(path)])
    assert done.exit_code == 1
    assert "FAILED" in done.stdout


def state_and_batch(spec):
    weights = {k: v.numpy() for k, v in zoo.build(spec).state_dict().items()}
    rng = np.random.default_rng(0)
    return weights, rng.standard_normal((4, *spec.input_shape), np.float32), rng.integers(0, spec.classes, 4)


def test_what_does_not_fit_is_refused_with_its_name(program_of, spec_of):
    program = Program(program_of("mlp"))
    weights, x, y = state_and_batch(spec_of("mlp"))
    momentum = program.momentum(weights)
    step = lambda **but: program.step(**{"weights": weights, "momentum": momentum, "x": x, "y": y, "lr": 0.1} | but)
    assert step()[2] > 0
    for but, error, said in (
        ({"y": y + 4}, DataError, "labels"),
        ({"y": y - 4}, DataError, "labels"),
        ({"y": y.astype(np.int32)}, ModelError, "int64"),
        ({"y": y[:3]}, ModelError, "'y'"),
        ({"x": x[:0], "y": y[:0]}, ModelError, "'x'"),
        ({"x": x.astype(np.float64)}, ModelError, "float32"),
        ({"x": x[:, :7]}, ModelError, "'x'"),
        ({"x": x[None]}, ModelError, "'x'"),
        ({"x": x.tolist()}, ModelError, "list"),
        ({"weights": {}}, ModelError, "missing"),
        ({"momentum": {}}, ModelError, "missing"),
        ({"weights": weights | {"fc2.weight": weights["fc2.weight"][:, :9]}}, ModelError, "fc2.weight"),
        ({"momentum": momentum | {"fc1.bias": momentum["fc1.bias"][:1]}}, ModelError, "fc1.bias"),
    ):
        with pytest.raises(error, match=said):
            step(**but)


def test_a_step_beyond_the_limits_is_refused_before_it_is_made(program_of, spec_of):
    program = Program(program_of("imu_cnn"), Limits(memory_bytes=24 << 20))
    weights, x, y = state_and_batch(spec_of("imu_cnn"))
    momentum = program.momentum(weights)
    program.step(weights, momentum, x, y, lr=0.1)
    many = np.broadcast_to(x[:1], (100_000, 6, 100)), np.broadcast_to(y[:1], (100_000,))
    with pytest.raises(TooLarge, match="smaller batch"):
        program.step(weights, momentum, *many, lr=0.1)


def test_the_memory_of_a_step_has_what_is_given_to_it_and_what_it_gives(program_of, spec_of):
    program = Program(program_of("mlp"))
    weights, _, _ = state_and_batch(spec_of("mlp"))
    assert program.cost.memory_bytes > 4 * sum(value.nbytes for value in weights.values())  # momenta, and both anew


def test_nothing_given_is_changed(program_of, spec_of):
    program = Program(program_of("mlp"))
    weights, x, y = state_and_batch(spec_of("mlp"))
    before = {k: v.copy() for k, v in weights.items()}
    momentum = program.momentum(weights)
    program.step(weights, momentum, x, y, lr=0.1)
    assert all(np.array_equal(weights[k], v) for k, v in before.items())
    assert not any(v.any() for v in momentum.values())


def test_steps_in_buffers_that_stay_give_the_same_bytes(program_of, spec_of):
    program = Program(program_of("imu_cnn"))
    weights, x, y = state_and_batch(spec_of("imu_cnn"))
    momentum = program.momentum(weights)
    training = Training(program, weights, momentum)
    for count in (4, 4, 3, 4, 1, 2, 3, 4, 4):
        assert training.step(x[:count], y[:count], lr=0.1 / count) > 0
        weights, momentum, _ = program.step(weights, momentum, x[:count], y[:count], lr=0.1 / count)
        for mine, theirs in ((training.weights, weights), (training.momentum, momentum)):
            assert mine.keys() == theirs.keys()
            assert all(np.array_equal(mine[name], theirs[name]) for name in theirs)
    with pytest.raises(DataError, match="labels"):
        training.step(x, y + 7, lr=0.1)
    with pytest.raises(ModelError, match="'x'"):
        training.step(x[:, :3], y, lr=0.1)


def test_a_step_takes_its_memory_as_one_block(program_of):
    """A session that is run once or twice on some shapes would keep a block for each."""
    data = program_of("mlp")
    assert Program(data).session._session.get_session_options().enable_mem_pattern
    assert not Session(data)._session.get_session_options().enable_mem_pattern


def test_where_no_free_memory_can_be_given_back_a_step_is_made_nevertheless(program_of, spec_of, monkeypatch):
    def elsewhere():
        options = onnxruntime.RunOptions()
        options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "gpu:0")  # which there is not
        return options

    program = Program(program_of("mlp"))
    weights, x, y = state_and_batch(spec_of("mlp"))
    momentum = program.momentum(weights)
    monkeypatch.setattr("talaria.programs.session._given_back", elsewhere)
    training = Training(program, weights, momentum)
    for _ in range(3):
        training.step(x, y, lr=0.1)
        weights, momentum, _ = program.step(weights, momentum, x, y, lr=0.1)
    assert all(np.array_equal(training.weights[name], value) for name, value in weights.items())


def test_rows_are_followed_with_the_bytes_of_steps(program_of, spec_of):
    program = Program(program_of("imu_cnn"))
    weights, x, y = state_and_batch(spec_of("imu_cnn"))
    rows = [np.array(some) for some in ([2, 0, 3], [1, 2, 0], [3], [1, 3, 2])]
    one, other = (Training(program, weights, program.momentum(weights)) for _ in range(2))
    for index in rows:
        one.step(x[index], y[index], lr=0.1)
    other.follow(x, y, rows[:1], lr=0.3)
    other.begin(weights)
    other.follow(x, y, rows, lr=0.1)
    for mine, theirs in ((other.weights, one.weights), (other.momentum, one.momentum)):
        assert all(np.array_equal(mine[name], theirs[name]) for name in theirs)
    with pytest.raises(DataError, match="labels"):
        other.follow(x, y + 7, rows, lr=0.1)
    with pytest.raises(ModelError, match="'x'"):
        other.follow(x[:, :3], y, rows, lr=0.1)


def test_what_is_frozen_stays_and_is_not_shared_with_the_caller(program_of, spec_of):
    program = Program(program_of("imu_cnn", "head"))
    weights, x, y = state_and_batch(spec_of("imu_cnn"))
    training = Training(program, weights, program.momentum(weights))
    before = training.weights
    for value in weights.values():
        value[...] = 0
    training.step(x, y, lr=0.1)
    after = training.weights
    assert {name for name in after if not np.array_equal(after[name], before[name])} == {"head.weight", "head.bias"}


def test_the_vector_is_the_same_everywhere(program_of):
    """The draws are part of the format: these words come from Philox, keyed by sha256 of the name."""
    program = Program(program_of("mlp"))
    feed = vector.inputs(program.graph, program.manifest)
    key = 0x7A9F  # any key: what is held is numpy's promise that raw words never change
    assert np.random.Philox(key=key).random_raw(1)[0] == np.random.Philox(key=key).random_raw(2)[0]
    assert feed["x"].shape == (vector.BATCH, 20)
    assert np.abs(feed["x"]).max() <= np.sqrt(3)


def test_the_command_builds_and_verifies(tmp_path):
    out = tmp_path / "head.program"
    words = ["build", "--model", "mlp", "--shape", "20", "--classes", "4", "--trained", "head", "--out", str(out)]
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 0, done.output
    made = json.loads(done.stdout)
    done = CliRunner().invoke(app, ["verify", str(out), "--json"])
    assert done.exit_code == 0
    assert json.loads(done.stdout)["digest"] == made["digest"]
    assert Program.open(out).trained == ("head.weight", "head.bias")
    assert out.stat().st_size < len(b"x") * 4000


def test_the_command_builds_a_module_from_elsewhere(tmp_path, monkeypatch):
    (tmp_path / "watch_nets.py").write_text(FOREIGN)
    monkeypatch.syspath_prepend(tmp_path)
    out = tmp_path / "whole.program"
    words = ["build", "--shape", "6,20", "--classes", "3", "--out", str(out), "--json", "--model"]
    done = CliRunner().invoke(app, [*words, "watch_nets:make"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["ok"]
    assert "gru.weight_hh_l0" in Program.open(out).trained
    done = CliRunner().invoke(app, [*words, "watch_nets:spare"])
    assert done.exit_code == 0, done.output
    trained = Program.open(out).trained
    assert "conv.weight" in trained
    assert "gru.weight_hh_l0" not in trained
    done = CliRunner().invoke(app, [*words, "watch_nets:odd"])
    assert isinstance(done.exception, ModelError)
    assert "'odd' is a RReLU" in str(done.exception)
    assert "use layers among" in str(done.exception)


WAYS = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, flat, classes):
        super().__init__()
        self.flat, self.conv, self.fc = flat, nn.Conv1d(6, 8, 3), nn.Linear(8 * 18, classes)

    def forward(self, x):
        return self.fc(self.flat(self.conv(x)))


def size(shape, classes):
    return Net(lambda x: x.view(x.size(0), -1), classes)


def shape(shape, classes):
    return Net(lambda x: x.reshape((x.shape[0], 144)), classes)


def length(shape, classes):
    return Net(lambda x: torch.reshape(x, (len(x), -1)), classes)


def start(shape, classes):
    return Net(lambda x: torch.flatten(x, start_dim=1), classes)


def layer(shape, classes):
    return Net(nn.Flatten(), classes)
"""
MADE = """
import sys
from talaria.model.spec import ModelSpec
from talaria.programs.build import build
sys.path.insert(0, sys.argv[1])
for model in ("mlp", "imu_cnn", *(f"ways:{one}" for one in ("size", "shape", "length", "start", "layer"))):
    build(ModelSpec(model, (6, 20), 3))
    print(model, "torch._dynamo" in sys.modules)
"""


def test_a_program_is_made_without_torchs_compiler(tmp_path):
    """To import it takes longer than to make a program, and a hundred MB more."""
    (tmp_path / "ways.py").write_text(WAYS)
    done = subprocess.run([sys.executable, "-c", MADE, str(tmp_path)], capture_output=True, text=True, check=True)
    assert [line.split()[1] for line in done.stdout.splitlines()] == ["False"] * 7, done.stdout


def test_the_program_of_a_watch_is_small(program_of):
    assert len(program_of("imu_cnn")) <= 25_000


def test_the_command_names_what_is_wrong(tmp_path):
    runner = CliRunner()
    for words, said in (
        (["build", "--model", "mlp", "--shape", "a,b", "--classes", "4"], "shape='a,b'"),
        (["build", "--model", "nosuch", "--shape", "4", "--classes", "4"], "nosuch"),
        (
            ["build", "--model", "mlp", "--shape", "4", "--classes", "4", "-o", str(tmp_path / "no" / "p")],
            "cannot be written",
        ),
        (["verify", str(tmp_path / "none")], "cannot read"),
    ):
        done = runner.invoke(app, words)
        assert isinstance(done.exception, ConfigError | StateError), done.output
        assert said in str(done.exception)
