"""Steps that a small network takes in one call: which batches go together, and that nothing else changes."""

from itertools import pairwise, repeat

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from talaria.model import zoo
from talaria.model.state import state_of
from talaria.programs.build import build
from talaria.programs.follow import followed, in_runs
from talaria.programs.making import Maker
from talaria.programs.program import Program
from talaria.programs.training import Training


@given(st.lists(st.integers(1, 5), max_size=40), st.integers(0, 60))
def test_runs_hold_all_batches_in_their_order(sizes, most):
    ends = np.cumsum([0, *sizes])
    batches = [np.arange(start, end) for start, end in pairwise(ends)]
    runs = list(in_runs(batches, most))
    assert [rows.tolist() for run in runs for rows in run] == [rows.tolist() for rows in batches]
    for run in runs:
        assert len(run) >> max(0, len(run).bit_length() - 3) << max(0, len(run).bit_length() - 3) == len(run)
        assert len(run) == 1 or run.size <= most


def test_a_training_of_any_length_has_few_shapes():
    rows = np.arange(3)
    few = {*range(1, 8), *range(8, 16, 2), *range(16, 32, 4), 32}
    assert {len(run) for many in range(200) for run in in_runs([rows] * many, 96)} == few
    assert max(len([*in_runs([rows] * many, 1 << 9)]) for many in range(128)) == 3


def test_a_run_waits_for_no_more_batches_than_it_holds():
    """Nor for the end of a training of a million steps."""
    assert next(in_runs(repeat(np.arange(3)), 150)).shape == (48, 3)


@pytest.mark.parametrize("name", ["mlp", "sequence"])
def test_what_no_step_changes_is_worked_out_once(program_of, name):
    many = followed(Program(program_of(name)).graph).nodes
    body = next(node for node in many if node.kind == "Scan").get("body")
    assert {"Shape", "Cast", "Div", "Expand"} <= {node.kind for node in many}  # the rate over the size of a batch
    assert not any(node.kind == "Shape" and node.inputs == ("step/x",) for node in body.nodes)
    changing = {port.name for port in body.inputs}
    for node in body.nodes:
        assert changing.intersection(node.inputs)
        changing.update(node.outputs)


def test_many_steps_are_taken_where_a_call_is_a_good_part_of_one(program_of):
    small = {name: Program(program_of(name)).small for name in ("mlp", "sequence", "imu_cnn")}
    assert small == {"mlp": True, "sequence": True, "imu_cnn": False}


class Moments(nn.Module):
    """It adds up what is given, whose order depends on where in memory that begins."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 5), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(torch.cat([x.mean(2), x.std(2)], 1)))


def test_batches_that_begin_anywhere_in_memory_give_the_bytes_of_steps():
    torch.manual_seed(0)
    net, draw = Moments(), np.random.default_rng(0)
    program, weights = Program(build(zoo.keep(net, (3, 37), 4))), state_of(net)
    x, y = draw.standard_normal((9, 3, 37), np.float32), draw.integers(0, 4, 9)
    one, other = (Training(program, weights, program.momentum(weights)) for _ in range(2))
    for index in range(8):
        one.step(x[index : index + 1], y[index : index + 1], lr=0.1)
    other.follow(x, y, [np.array([index]) for index in range(8)], lr=0.1)
    assert all(other.weights[name].tobytes() == value.tobytes() for name, value in one.weights.items())


def test_a_slice_is_looked_at_and_learned_from_with_the_bytes_of_its_copy():
    torch.manual_seed(0)
    net = Moments()
    spec = zoo.keep(net, (3, 37), 4)
    program, look, weights = Program(build(spec)), Maker(spec).forward(), state_of(net)
    x, y = np.random.default_rng(0).standard_normal((9, 3, 37), np.float32), np.array([1])
    for part in (x[index : index + 1] for index in range(1, 8)):
        found = [program.step(weights, program.momentum(weights), one, y, lr=0.1)[0] for one in (part, part.copy())]
        assert all(found[0][name].tobytes() == value.tobytes() for name, value in found[1].items())
        logits = [look({"x": one}, weights)["features"].tobytes() for one in (part, part.copy())]
        assert logits[0] == logits[1]


def test_a_small_network_follows_rows_with_the_bytes_of_steps(program_of):
    program, draw = Program(program_of("mlp")), np.random.default_rng(0)
    weights = {
        port.name.removeprefix("weight/"): draw.standard_normal([*map(program.manifest.size, port.shape)], np.float32)
        for port in program.graph.inputs
        if port.name.startswith("weight/")
    }
    x, y = draw.standard_normal((40, 20), np.float32), draw.integers(0, 4, 40)
    rows = [draw.permutation(40)[:count] for count in (16, 16, 16, 8, 16, 16, 3)]
    one, other = (Training(program, weights, program.momentum(weights)) for _ in range(2))
    other.follow(x, y, rows[:3], lr=0.3)
    other.begin(weights)
    for index in rows:
        one.step(x[index], y[index], lr=0.1)
    other.follow(x, y, rows, lr=0.1)
    for mine, theirs in ((other.weights, one.weights), (other.momentum, one.momentum)):
        assert all(mine[name].tobytes() == theirs[name].tobytes() for name in theirs)
