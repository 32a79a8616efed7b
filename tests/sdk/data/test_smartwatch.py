"""The smartwatch users: who they are, and that no sample is ever in two parts."""

import hashlib
import importlib.util
import io
import os
import pickle
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from talaria.data import Federated, load, smartwatch
from talaria.data.safe_pickle import read_object
from talaria.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def watch() -> Federated:
    return load("smartwatch")


@pytest.fixture(scope="module")
def recordings() -> smartwatch.Recordings:
    return smartwatch.read(smartwatch.find_file())


def test_users_subjects_and_shapes(watch: Federated) -> None:
    assert list(watch.clients) == [f"s{s:02d}-{side}" for s in range(1, 9) for side in ("left", "right")]
    assert list(watch.newcomers) == ["s09-left", "s09-right", "s10-left", "s10-right"]
    assert watch.labels == ("PEN", "ABD", "FEL", "IR", "ER", "TRAP", "ROW")
    assert watch.input_shape == (6, 100)
    for client in (*watch.clients.values(), *watch.newcomers.values()):
        for part in (client.train, client.val, client.test):
            assert part.x.shape[1:] == (6, 100)
            assert np.unique(part.y).tolist() == list(range(7))


def test_sizes_of_the_parts(watch: Federated) -> None:
    trains = [len(c.train) + len(c.val) for c in watch.clients.values()]
    tests = [len(c.test) for c in (*watch.clients.values(), *watch.newcomers.values())]
    assert (min(trains), max(trains)) == (83, 197)
    assert (min(tests), max(tests)) == (18, 68)
    assert np.bincount(watch.clients["s01-left"].train.y).tolist() == [16, 28, 28, 30, 28, 26, 22]


@given(st.integers(900, 4000))
def test_no_window_reaches_into_another_part(length: int) -> None:
    cut = smartwatch.cut(length)
    used: set[int] = set()
    for part in (cut.train, cut.val, cut.test):
        begun = smartwatch.starts(part)
        assert len(begun) >= 1
        own = {t for a in begun for t in range(a, a + smartwatch.WINDOW)}
        assert not own & used
        assert max(own) < length
        used |= own
    assert cut.val[1] == length * 7 // 10
    assert cut.test[0] - cut.val[1] == smartwatch.GAP


def test_no_value_of_a_user_is_in_two_parts(watch: Federated, recordings: smartwatch.Recordings) -> None:
    """Looked for in the data itself: each window's raw values are found again at one place of the recording."""
    mean, sd = (np.array(watch.meta[k], dtype=np.float64) for k in ("mean", "sd"))
    for user, client in watch.everyone.items():
        for label, series in enumerate(recordings.series[user]):
            scaled = ((series - mean) / sd).astype(np.float32)
            at = {scaled[t].tobytes(): t for t in range(len(scaled))}
            spans = []
            for part in (client.train, client.val, client.test):
                windows = part.x[part.y == label]
                spans.append({t for w in windows for t in range(at[w[:, 0].tobytes()], at[w[:, -1].tobytes()] + 1)})
            assert all(spans)
            assert not spans[0] & spans[1]
            assert not (spans[0] | spans[1]) & spans[2]
            assert max(spans[0] | spans[1]) + smartwatch.GAP < min(spans[2])


def test_newcomers_use_one_minute_of_labels_and_not_more() -> None:
    watch = load("smartwatch", newcomer_holdout=0)
    kept = load("smartwatch", newcomer_holdout=1)
    for user, client in watch.newcomers.items():
        assert np.bincount(client.train.y).tolist() == [8] * 7
        assert len(client.val) == 0
        other = kept.newcomers[user]
        for label in range(7):
            minute = client.train.x[client.train.y == label]
            assert np.array_equal(other.train.x[other.train.y == label], minute[:6])
            assert np.array_equal(other.val.x[other.val.y == label], minute[7:])
        assert np.array_equal(other.test.x, client.test.x)


def test_scaling_comes_from_the_members_training_samples_alone(recordings: smartwatch.Recordings) -> None:
    members = [x for user, xs in recordings.series.items() if int(user[1:3]) <= 8 for x in xs]
    ends = [list(smartwatch.starts(smartwatch.cut(len(x)).train))[-1] + 100 for x in members]
    every = np.concatenate([x[:end] for x, end in zip(members, ends, strict=True)])
    watch = load("smartwatch")
    assert watch.meta["mean"] == pytest.approx(every.mean(0))
    assert watch.meta["sd"] == pytest.approx(every.std(0))


def test_member_windows_cut_the_training_only(watch: Federated) -> None:
    few = load("smartwatch", member_windows=4)
    assert all(np.bincount(c.train.y).tolist() == [4] * 7 for c in few.clients.values())
    assert len(few.clients["s01-left"].test) == len(watch.clients["s01-left"].test)


def test_other_newcomers(watch: Federated) -> None:
    other = load("smartwatch", newcomers=(1,))
    assert list(other.newcomers) == ["s01-left", "s01-right"]
    assert len(other.clients) == 18
    assert load("smartwatch", newcomers=()).newcomers == {}
    for said, subjects in ((1, {"s01"}), ("1,3", {"s01", "s03"}), ("", set())):  # as `--data-option newcomers=` has it
        assert {user.partition("-")[0] for user in load("smartwatch", newcomers=said).newcomers} == subjects
    every = load("smartwatch", newcomers=(1,), newcomer_windows=None).newcomers["s01-left"]
    assert [len(part) for part in (every.train, every.val)] == [
        len(part) for part in (watch.clients["s01-left"].train, watch.clients["s01-left"].val)
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"newcomers": (11,)}, r"newcomers=\(11,\) must be subjects among"),
        ({"newcomers": tuple(range(1, 11))}, "not all of them"),
        ({"newcomers": "anna"}, r"newcomers='anna' must be a list of whole numbers \(9,10\)"),
        ({"newcomer_windows": 0}, "newcomer_windows=0 must be at least 1"),
        ({"newcomer_holdout": 8}, "newcomer_holdout=8"),
        ({"newcomer_windows": 2}, "leaves no window to train on"),
        ({"member_windows": 0}, "member_windows=0 must be at least 1"),
        ({"window": 5}, "option 'window' is unknown .did you mean 'member_windows'..; it takes newcomers"),
    ],
    ids=str,
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load("smartwatch", **options)


def test_a_changed_file_is_refused(tmp_path: Path) -> None:
    data = bytearray(smartwatch.find_file().read_bytes())
    data[len(data) // 2] ^= 1
    changed = tmp_path / "watch_dataset.npy"
    changed.write_bytes(data)
    with pytest.raises(DataError, match=f"has sha256 {hashlib.sha256(data).hexdigest()}, need {smartwatch.SHA256}"):
        load("smartwatch", path=changed)
    changed.write_bytes(data[:-1])
    with pytest.raises(DataError, match="bytes, need 18118091; reinstall seglearn"):
        load("smartwatch", path=changed)
    with pytest.raises(DataError, match=r"cannot read .*No such file"):
        load("smartwatch", path=tmp_path / "none.npy")


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smartwatch, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"'seglearn'.*pip install 'talaria\[sim\]'"):
        load("smartwatch")


def test_seglearn_itself_is_never_imported() -> None:
    assert importlib.util.find_spec("seglearn") is not None
    code = "import sys; from talaria.data import load; load('smartwatch'); sys.exit('seglearn' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0


def npy(payload: bytes, header: str = "{'descr': '|O', 'fortran_order': False, 'shape': (), }") -> bytes:
    text = header.ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode() + payload


class Evil:
    """Pickles as a call of ``os.mkdir``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_a_pickle_that_calls_a_function_is_refused_and_does_not_run(tmp_path: Path) -> None:
    victim = tmp_path / "made-by-the-pickle"
    stream = io.BytesIO()
    np.save(stream, np.array({"X": [Evil(victim)]}, dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match=r"asks for posix\.mkdir; restore the original file"):
        read_object(stream.getvalue(), "here")
    assert not victim.exists()
    pickle.loads(pickle.dumps(Evil(victim)))
    assert victim.exists()  # the attack is a real one


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"PK\x03\x04 not npy at all", "magic string is not correct"),
        (npy(b""), "Ran out of input"),
        (npy(pickle.dumps([1])), "not one object"),
        (npy(b"", "{'descr': '<f8', 'fortran_order': False, 'shape': (3,), }"), "instead of one object"),
        (npy(b"cbuiltins\neval\n(S'1'\ntR."), "asks for builtins.eval"),
        (npy(b"cnumpy\nload\n(S'x'\ntR."), "asks for numpy.load"),
        (npy(b"c_codecs\nencode\n(S'x'\nS'rot13'\ntR."), "codec 'rot13'"),
        (npy(b"Psomewhere\n."), "outside object"),
        (npy(b"cnumpy\nndarray\n((I99999\nI99999\nI99999\nttR."), "not callable"),
        (npy(b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I99\ntS'b'\ntR."), "of shape"),
        (npy(b"cnumpy\ndtype\n(S'V999999999'\nI0\nI1\ntR."), "dtype 'V999999999' is not expected"),
    ],
    ids=str,
)
def test_damaged_and_hostile_object_files(data: bytes, message: str) -> None:
    with pytest.raises(DataError, match=f"here: refused, .*{message}"):
        read_object(data, "here")
