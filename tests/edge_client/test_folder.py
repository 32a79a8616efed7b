"""A folder of windows that fills: what is read, what leaves, labels that come later, and drift."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from talaria import durable, time
from talaria.errors import ConfigError, DataError
from talaria_edge import Device, FolderSource, load_config
from talaria_edge.cli import app
from talaria_edge.data import NamedSource, checked, require_learnable
from talaria_edge.recording import drift, labels

SHAPE = (6, 32)
DAY = 86400.0


@pytest.fixture
def clock():
    """The wall clock, which a test may set; it begins where the machine's stands."""
    at = [time.time()]
    with time.told_by(time.Clocks(wall=lambda: at[0])):
        yield at


def window(folder, name, at, y=None, rows=1, mean=0.0, shape=SHAPE, **more):
    folder.mkdir(exist_ok=True)
    x = np.random.default_rng(len(name)).standard_normal((rows, *shape)).astype(np.float32) + np.float32(mean)
    np.savez(folder / f"{name}.npz", x=x, **({} if y is None else {"y": y}), **more)
    os.utime(folder / f"{name}.npz", (at, at))


def test_a_window_that_cannot_be_kept_says_what_would_help(tmp_path, monkeypatch):
    for number, mend in ((errno.ENOSPC, "free space there"), (errno.EROFS, "let this program write there")):

        def refuse(*_, number=number):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(durable, "write", refuse)
        with pytest.raises(DataError, match=f"cannot be written to .*; {mend}"):
            FolderSource(tmp_path).record(np.zeros(SHAPE))


def test_a_label_for_which_the_disk_has_half_the_room_is_refused_and_not_taken_for_kept(tmp_path):
    queue = labels.LabelQueue(tmp_path)
    queue.add("monday", "walk")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / labels.FILE).stat().st_size + 8, hard))
        with pytest.raises(DataError, match="cannot be written to"):
            queue.add("tuesday", "rest")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    queue.add("wednesday", "rest")
    assert queue.read() == {"monday": "walk", "wednesday": "rest"}


def test_a_new_folder_is_there_to_be_filled(tmp_path):
    found = FolderSource(tmp_path / "new").load()
    assert len(found.train) == len(found.val) == 0
    with pytest.raises(DataError, match="record some"):
        require_learnable(found)


def test_a_window_whose_label_the_run_has_no_class_for_is_set_aside_and_named(tmp_path, clock, caplog):
    folder = tmp_path / "windows"
    for i in range(12):
        window(folder, f"w{i}", clock[0] - 30 + i, [i % 3], split=[int(i >= 9)])
    window(folder, "seven", clock[0], [7, 2], rows=2, split=[0, 0])
    window(folder, "below", clock[0], [-3], split=[1])
    loaded = FolderSource(folder).load()
    found = checked(loaded, SHAPE, 3)
    assert found.train.y.tolist() == [*([0, 1, 2] * 3), 2]
    assert found.val.y.tolist() == [0, 1, 2]
    assert found.aside == ("below.npz", "seven.npz")
    assert "has no class for the label of some samples in below.npz, seven.npz" in caplog.text
    assert checked(loaded, SHAPE, 8).aside == ("below.npz",)  # a run with more classes has a place for it
    with pytest.raises(DataError, match=r"one class for each step"):
        checked(loaded, SHAPE, 3, "per_step")  # none fits: another task, and no fault of one file


def test_a_window_whose_label_has_another_form_is_not_learned_from_and_named(tmp_path, clock, caplog):
    folder = tmp_path / "windows"
    for i in range(12):
        window(folder, f"w{i}", clock[0] - 30 + i, [i % 3], split=[int(i >= 9)])
    window(folder, "list", clock[0], [[1, 0]], split=[0])
    source = FolderSource(folder)
    source.label("w3", [1, 2, 0])
    loaded = source.load()
    assert checked(loaded, SHAPE, 3).train.y.tolist() == [0, 1, 2, 1, 2, 0, 1, 2]
    assert len(loaded.unlabelled) == 2
    assert "another form than most (one number): w3.npz, list.npz; correct these files" in caplog.text


@pytest.mark.parametrize(
    ("y", "why"),
    [
        (np.array([1.0, np.inf]), "y holds infinity"),
        (np.array([[1.0, np.nan], [2.0, 3.0]]), "NaN in a row of numbers"),
        (np.array([2**63, 1], np.uint64), "beyond int64"),
    ],
)
def test_a_file_whose_labels_no_round_can_learn_is_passed_over_and_named(tmp_path, y, why):
    np.savez(tmp_path / "odd.npz", x=np.ones((2, 3)), y=y)
    np.savez(tmp_path / "good.npz", x=np.ones((2, 3)), y=np.array([0, 1]))
    data, (note,) = FolderSource(tmp_path).look()
    assert why in note
    assert sorted(data.train.y.tolist()) == [0, 1]
    np.savez(tmp_path / "odd.npz", x=np.ones((2, 3)), y=y, split=np.array([3, 3]))
    if y.dtype.kind == "f":  # whose labels nobody reads
        assert len(FolderSource(tmp_path).load().unlabelled) == 2


def test_steps_and_several_labels_are_set_aside_by_their_file_too(tmp_path, clock):
    for task, good, odd in (("per_step", [0, 2, -1], [0, 5, 1]), ("multilabel", [0, 1, 1], [0, 2, 0])):
        folder = tmp_path / task
        for i in range(4):
            window(folder, f"w{i}", clock[0] - 30 + i, [good], split=[int(i == 3)])
        window(folder, "odd", clock[0], [odd], split=[0])
        found = checked(FolderSource(folder).load(), SHAPE, 3, task)
        assert (len(found.train), len(found.val), found.aside) == (3, 1, ("odd.npz",))


def test_what_is_whole_is_read_and_what_is_labelled_is_learned(tmp_path, clock):
    folder = tmp_path / "windows"
    for i in range(30):
        window(folder, f"w{i}", clock[0] - 30 + i, [i % 3] if i % 2 else None)
    window(folder, "many", clock[0], [0, -1, 2], rows=3, split=[0, 0, 1])
    whole = (folder / "w1.npz").read_bytes()
    (folder / "half.npz").write_bytes(whole[: len(whole) - 40])  # as one that is written just now
    (folder / ".hidden.npz").write_bytes(whole)
    (folder / "link.npz").symlink_to(folder / "w1.npz")
    np.savez(folder / "objects.npz", x=np.array([{"a": 1}], dtype=object))
    window(folder, "odd", clock[0], [1], shape=(6, 31))
    window(folder, "nan", clock[0], [1], mean=np.nan)
    found = checked(FolderSource(folder).load(), SHAPE, 3)
    assert len(found.train) + len(found.val) == 15 + 2
    assert len(found.val) >= 1
    assert found.test is None
    again = FolderSource(folder).load()
    assert np.array_equal(again.val.x, found.val.x)
    assert len(list(folder.glob("*.npz"))) == 37  # nothing is thrown away while there is room


def test_what_is_unlabelled_is_what_training_gains_by_labels(tmp_path, clock):
    source = FolderSource(tmp_path / "windows")
    for i in range(40):
        window(source.path, f"w{i}", clock[0] - 40 + i, [i % 3] if i % 2 else None)
    window(source.path, "many", clock[0], [-1, -1, -1, 0], rows=4, split=[0, 1, 2, 0])
    before = checked(source.load(), SHAPE, 3)
    for name in (*(f"w{i}" for i in range(0, 40, 2)), "many/0", "many/1", "many/2"):
        source.label(name, 1)
    after = source.load()
    assert after.unlabelled is None
    assert len(after.val) > len(before.val)  # those of files that are held out stay out
    rows = sorted(x.tobytes() for x in (*before.train.x, *before.unlabelled))
    assert rows == sorted(x.tobytes() for x in after.train.x)


def test_what_a_file_marks_as_unlabelled_trains_once_it_has_a_label(tmp_path, clock):
    source = FolderSource(tmp_path / "windows")
    window(source.path, "held", clock[0], [0, 1, 2, 0], rows=4, split=[0, 1, 3, 3])
    found = source.load()
    assert [len(found.train), len(found.val), len(found.unlabelled)] == [1, 1, 2]
    source.label("held/3", 2)
    found = source.load()
    assert [len(found.train), len(found.val), len(found.unlabelled)] == [2, 1, 1]
    assert found.train.y.tolist() == [0, 2]


def test_a_window_never_changes_sides(tmp_path, clock):
    folder, sides = tmp_path / "windows", {}
    for i in range(60):
        window(folder, f"w{i}", clock[0] + i, [i % 3], mean=i)
        if i < 20 or i % 10:
            continue
        found = FolderSource(folder, most=25).load()
        for side, part in (("train", found.train), ("val", found.val)):
            for value in part.x:
                assert sides.setdefault(value.tobytes(), side) == side


def test_what_was_recorded_before_the_clock_was_set_is_kept_from_then_on(tmp_path, clock):
    """A device without a clock of its own wakes in 1970: its windows were removed as too old once it knew the day."""
    folder, now = tmp_path / "windows", clock[0]
    for i in range(4):
        window(folder, f"w{i}", 100.0 + i, y=[i % 2])
    source = FolderSource(folder, days=90)
    assert source.look()[1] == ()
    assert os.stat(folder / "w0.npz").st_mtime == 100.0
    assert len(source.load().train) == 3
    clock[0] = now + 89 * DAY
    assert len(source.load().train) == 3
    clock[0] = now + 91 * DAY
    source.load()
    assert not list(folder.glob("*.npz"))


def test_what_a_cut_left_of_a_window_is_removed_a_day_later(tmp_path, clock, monkeypatch):
    """Each stayed for ever, beside what megabytes allows."""

    class PowerCut(BaseException):
        pass

    def cut(_):
        raise PowerCut

    source = FolderSource(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(durable.os, "fsync", cut)
        with pytest.raises(PowerCut):
            source.record(np.ones(SHAPE))
    (tmp_path / ".mine.npz.part").write_bytes(b"another program's")
    assert len(list(tmp_path.glob(".*-*.npz.part"))) == 1
    source.load()
    assert len(list(tmp_path.glob(".*-*.npz.part"))) == 1  # it may be under way just now
    clock[0] += 2 * DAY
    source.look()
    assert len(list(tmp_path.glob(".*-*.npz.part"))) == 1
    source.load()
    assert [path.name for path in tmp_path.glob(".*.part")] == [".mine.npz.part"]


@pytest.mark.parametrize("bound", ["most", "days", "megabytes"])
def test_the_oldest_leave(tmp_path, clock, bound):
    folder = tmp_path / "windows"
    for i in range(10):
        window(folder, f"w{i}", clock[0] - (9 - i) * DAY, [i % 3])
    size = (folder / "w0.npz").stat().st_size
    source = FolderSource(folder, **{bound: {"most": 4, "days": 3.5, "megabytes": 4.5 * size / 2**20}[bound]})
    source.load()
    assert sorted(path.stem for path in folder.glob("*.npz")) == ["w6", "w7", "w8", "w9"]
    (folder / "huge.npz").write_bytes(bytes(10 * size))  # larger than all of the room, and newer than all others
    source.load()
    assert (folder / "huge.npz").exists() is (bound != "megabytes")
    assert (folder / "w9.npz").exists()


def test_labels_come_later_and_the_last_word_counts(tmp_path):
    source = FolderSource(tmp_path / "windows", labels=("rest", "walk"))
    names = [source.record(np.full(SHAPE, i, np.float32)) for i in range(12)]
    assert len(source.load().train) == 0
    for i, name in enumerate(names[:10]):
        source.label(name, "walk" if i % 2 else 0)
    source.label(names[0], 1)
    source.label(names[1], -1)  # taken back
    source.label(names[2], np.float32(-1))
    found = source.load()
    learned = {int(x[0, 0]): int(y) for part in (found.train, found.val) for x, y in zip(part.x, part.y, strict=True)}
    assert learned == {0: 1, **{i: i % 2 for i in range(3, 10)}}
    with pytest.raises(ConfigError, match=r"y='run' is none of \[device\] labels"):
        source.label(names[0], "run")
    for id, y in ((names[0], float("nan")), (names[0], True), (names[0], {}), ("", 1), (names[0], [[[1]]])):
        with pytest.raises(ConfigError, match="label: "):
            source.label(id, y)


def test_a_word_about_a_whole_file_is_the_last_about_each_of_its_windows(tmp_path, clock):
    source = FolderSource(tmp_path / "windows", labels=("rest", "walk"))
    window(source.path, "monday", clock[0], rows=4, split=[0, 0, 0, 0])
    source.label("monday/3", "rest")
    source.label("monday", "walk")
    assert source.load().train.y.tolist() == [1, 1, 1, 1]
    source.label("monday/0", "rest")
    assert source.load().train.y.tolist() == [0, 1, 1, 1]
    source.label("monday", -1)
    assert len(source.load().train) == 0


@pytest.mark.parametrize("y", [2, -2, 2.0, 0.5, np.int64(7), 10**400])
def test_a_class_beyond_the_names_is_refused_when_it_is_said(tmp_path, y):
    """Not in each round that would learn from it, which nobody could trace to the window."""
    source = FolderSource(tmp_path / "windows", labels=("rest", "walk"))
    source.record(np.zeros(SHAPE, np.float32), 1)
    with pytest.raises(ConfigError, match=r"label: y=.* is no class of the 2 in \[device\] labels; use 0\.\.1, a name"):
        source.record(np.ones(SHAPE, np.float32), y)
    found = source.load()
    assert (found.train.y.tolist() or found.val.y.tolist(), found.unlabelled) == ([1], None)


def test_numbers_to_learn_are_no_classes(tmp_path):
    glucose = FolderSource(tmp_path / "one", labels=("glucose",))
    glucose.record(np.zeros(SHAPE, np.float32), 180)
    both = FolderSource(tmp_path / "two", labels=("systolic", "diastolic"))
    both.record(np.zeros(SHAPE, np.float32), [120, 80])
    nameless = FolderSource(tmp_path / "nameless")
    nameless.record(np.zeros(SHAPE, np.float32), 7)
    assert [source.queue.read().popitem()[1] for source in (glucose, both, nameless)] == [180, [120, 80], 7]


def test_a_queue_of_labels_survives_a_kill_at_any_write(tmp_path):
    """Labels are written by a process that is killed again and again; what it said was kept, is there."""
    program = (
        "import sys; from pathlib import Path; from talaria_edge.recording.labels import LabelQueue\n"
        "queue = LabelQueue(Path(sys.argv[1]))\n"
        "for i in range(int(sys.argv[2]), 10**6):\n"
        "    queue.add(f'w{i}', i % 7)\n"
        "    print(i, flush=True)\n"
    )
    said = -1
    for _ in range(3):
        begun = subprocess.Popen([sys.executable, "-c", program, tmp_path, str(said + 1)], stdout=subprocess.PIPE)
        for _ in range(20):
            said = int(begun.stdout.readline())
        begun.send_signal(signal.SIGKILL)
        rest = begun.communicate()[0].split(b"\n")[:-1]
        said = int(rest[-1]) if rest else said
        with (tmp_path / labels.FILE).open("ab") as file:
            file.write(b'["torn')  # as a cut in the middle of a write leaves it
    labels.LabelQueue(tmp_path).add("last", 3)
    found = labels.LabelQueue(tmp_path).read()
    assert {f"w{i}": i % 7 for i in range(said + 1)}.items() <= found.items()
    assert found["last"] == 3


def test_the_queue_is_bounded_and_lines_that_are_none_are_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(labels, "LARGEST", 2000)
    queue = labels.LabelQueue(tmp_path)
    for i in range(100, 200):
        queue.add(f"w{i}", i)
    assert (tmp_path / labels.FILE).stat().st_size <= 2000
    assert queue.read()["w199"] == 199
    (tmp_path / labels.FILE).write_bytes(b'\xff\n[1,2]\n{}\n["a"]\n["b",NaN]\n' + b"[" * 1000 + b'\n["c",1]\n')
    assert queue.read() == {"c": 1}


def test_drift_is_told_in_two_numbers(tmp_path, clock):
    folder, begun = tmp_path / "windows", clock[0]
    for i in range(20):
        window(folder, f"a{i}", begun, [i % 2])
    assert FolderSource(folder).load().told == {"drift.labels": 0.0, "drift.features": 0.0}
    clock[0] = begun + 2 * DAY
    FolderSource(folder).load()
    for i in range(60):
        window(folder, f"b{i}", clock[0], [1], mean=2.0)
    moved = FolderSource(folder).load().told
    assert moved["drift.labels"] == pytest.approx(7 / 8 - 1 / 2)
    assert 1.3 < moved["drift.features"] < 1.7  # three of four windows moved by two spreads
    assert FolderSource(folder, drift=False).load().told == {}
    remembered = json.loads((folder / drift.FILE).read_text())
    assert len(remembered["mean"]) == SHAPE[0]
    (folder / drift.FILE).write_text('{"labels": 3}')
    assert FolderSource(folder).load().told  # begun anew


def test_drift_goes_out_with_each_update(tmp_path, house, run_all, a_run):
    one = house(a_run("fedavg", rounds=1))
    for name in one.data:
        source = FolderSource(tmp_path / "windows" / name)
        for x, y in zip(one.data[name].train.x, one.data[name].train.y, strict=True):
            source.record(x, int(y))
        one.data[name] = source.load()
    run_all(one.serve(), *(one.agent(name) for name in one.data))
    for name in one.data:
        assert one.of("trained", name)[0]["metrics"].keys() >= {"drift.labels", "drift.features"}


def test_settings(tmp_path):
    path = tmp_path / "device.toml"
    head = '[device]\nid = "a"\nlabels = ["x"]\n[fleet]\nname = "watch"\nbroker = "mqtt://127.0.0.1"\n'
    path.write_text(
        f'{head}[data]\nsource = "folder"\npath = "w"\nmost = 5\ndays = 2\nmegabytes = 1.5\ndrift = false\n'
    )
    assert load_config(path).source == FolderSource(tmp_path / "w", ("x",), 5, 2, 1.5, False)
    for line, says in (("most = 0", "most=0 must be"), ("days = 0", "days=0 must be"), ("megabytes = 1e9", "megabytes"),
                       ("client = 'a'", "client='a' is unknown")):  # fmt: skip
        path.write_text(f'{head}[data]\nsource = "folder"\npath = "w"\n{line}\n')
        with pytest.raises(ConfigError, match=says):
            load_config(path)


def test_a_program_records_and_labels(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    device = Device("mqtt://127.0.0.1", fleet="watch", data="folder:windows", id="a")
    device.label(device.record(np.zeros(SHAPE)), 2)
    found = device.config.source.load()
    assert [*found.train.y, *found.val.y] == [2]
    for wrong, why in (
        (np.full(SHAPE, np.nan), "NaN, infinity"),
        (np.full(SHAPE, 1e39), "beyond float32"),
        (np.zeros((0, 32)), r"shape \(0, 32\)"),
        (3.0, r"shape \(\)"),
        ("abc", "need numbers"),
        (np.zeros(SHAPE, complex), "real numbers"),
    ):
        with pytest.raises(DataError, match=f"record: x.*{why}"):
            device.record(wrong)
    assert len(list((tmp_path / "windows").glob("*.npz"))) == 1
    with pytest.raises(ConfigError, match="device: labels: 'walk' stands there 2 times"):
        Device("mqtt://127.0.0.1", fleet="watch", data="folder:windows", id="a", labels=["walk", "rest", "walk"])
    other = Device("mqtt://127.0.0.1", fleet="watch", data=lambda: None, id="a")
    with pytest.raises(ConfigError, match="folder:PATH"):
        other.label("a", 1)


def test_a_function_of_a_package_gives_samples_where_it_is_allowed(monkeypatch):
    source = NamedSource("mypkg.data:load", "anna", {"count": 12}, ("mypkg",))
    assert len(source.load().train) + len(source.load().val) + len(source.load().test) == 12
    with pytest.raises(ConfigError, match=r"'mypkg', which is not allowed; set \[code\] allow = \[.mypkg.\]"):
        NamedSource("mypkg.data:load", "anna").load()
    with pytest.raises(DataError, match=r"source='mypkg.data:load' failed .*many"):
        NamedSource("mypkg.data:load", "anna", {"count": "many"}, ("mypkg",)).load()


def test_a_label_by_hand(tmp_path):
    path = tmp_path / "device.toml"
    head = '[device]\nid = "a"\nlabels = ["rest", "walk"]\n[fleet]\nname = "watch"\nbroker = "mqtt://127.0.0.1"\n'
    path.write_text(f'{head}[data]\nsource = "folder"\npath = "w"\n')
    for name, rows in (("a", 1), ("b", 1), ("c", 3)):
        window(tmp_path / "w", name, 0.0, rows=rows)
    for window_, said in (("a", "walk"), ("b", "0"), ("c/2", "-1")):
        assert CliRunner().invoke(app, ["label", str(path), window_, said], catch_exceptions=False).exit_code == 0
    for wrong in ("a.npz", "A", "c/3", "c/-1", "c/two", "c/", "", ".."):
        with pytest.raises(ConfigError, match=r"w holds no window .*; give a file's name without \.npz"):
            CliRunner().invoke(app, ["label", str(path), wrong, "walk"], catch_exceptions=False)
    path.write_text(path.read_text().replace('labels = ["rest", "walk"]', ""))
    CliRunner().invoke(app, ["label", str(path), "b", "1.5"], catch_exceptions=False)
    assert load_config(path).source.queue.read() == {"a": "walk", "b": 1.5, "c/2": -1}
    path.write_text(f'{head}[data]\nsource = "smartwatch"\n')
    with pytest.raises(ConfigError, match="no folder that fills"):
        CliRunner().invoke(app, ["label", str(path), "a", "walk"], catch_exceptions=False)


def test_windows_of_several_named_inputs(tmp_path, caplog):
    source = FolderSource(tmp_path / "windows")
    draw = np.random.default_rng(0)
    for i in range(20):
        given = {"imu": draw.normal(size=(2, 5)), "mask": np.arange(5) < 3}
        source.record(given, i % 2)
    np.savez(
        tmp_path / "windows" / "more.npz", x_imu=draw.normal(size=(2, 2, 5)), x_mask=np.ones((2, 5), bool), y=[0, 1]
    )
    found = checked(source.load(), (15,), 2)
    assert len(found.train) + len(found.val) == 22
    assert set(np.unique(found.train.x[:, 10:])) <= {0.0, 1.0}
    with pytest.raises(
        DataError, match=r"train samples have the inputs imu \(2, 5\), mask \(5,\), and the model takes"
    ):
        checked(source.load(), (15,), 2, parts={"imu": (5, 2), "mask": (5,)})
    source.record({"imu": draw.normal(size=(5, 2)), "mask": np.arange(5) < 3}, 0)
    assert len(checked(source.load(), (15,), 2, parts={"imu": (2, 5), "mask": (5,)}).train) + len(found.val) == 22
    assert "not read, as they have other inputs than most (imu (2, 5), mask (5,)): " in caplog.text
    with pytest.raises(DataError, match=r"record: x: input 'imu' is uint8 .*; divide pixels by 255 as float32"):
        source.record({"imu": np.zeros((2, 5), np.uint8)})
