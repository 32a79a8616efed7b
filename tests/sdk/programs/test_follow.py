"""Steps that a small network takes in one call: which batches go together, and that nothing else changes."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from talaria.programs.follow import in_runs
from talaria.programs.program import Program
from talaria.programs.training import Training


@given(st.lists(st.integers(1, 5), max_size=40), st.integers(0, 60))
def test_runs_hold_all_batches_in_their_order(sizes, most):
    ends = np.cumsum([0, *sizes])
    batches = [np.arange(start, end) for start, end in pairwise(ends)]
    runs = list(in_runs(batches, most))
    assert [rows.tolist() for run in runs for rows in run] == [rows.tolist() for rows in batches]
    for run in runs:
        assert len(run) & len(run) - 1 == 0
        assert len(run) == 1 or run.size <= most


def test_a_training_of_any_length_has_few_shapes():
    rows = np.arange(3)
    assert {len(run) for many in range(200) for run in in_runs([rows] * many, 96)} == {1, 2, 4, 8, 16, 32}


def test_many_steps_are_taken_where_a_call_is_a_good_part_of_one(program_of):
    small = {name: Program(program_of(name)).small for name in ("mlp", "sequence", "imu_cnn")}
    assert small == {"mlp": True, "sequence": True, "imu_cnn": False}


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
