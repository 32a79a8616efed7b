"""Real smartwatch wearers: 7 shoulder exercises, 10 subjects x 2 wrists = 20 users, six axes at 50 Hz.

The recordings ship inside the PyPI package ``seglearn`` (Burns et al. 2018, "Shoulder physiotherapy exercise
recognition: machine learning the inertial signals from a smartwatch", arXiv:1802.01489). A user is one wrist of
one subject and has one continuous series per exercise.
"""

import hashlib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from talaria.data.client import Client, samples
from talaria.data.federated import Federated
from talaria.data.safe_pickle import read_object
from talaria.errors import ConfigError, DataError
from talaria.tensors import Array
from talaria.types import Samples

SHA256 = "eb122f23cdf06ef6bd6c6c5312958ec5cf9d038e2e6d457b8081662c75a42537"
_SIZE = 18_118_091
_RATE_HZ = 50
WINDOW, STRIDE, GAP = 100, 50, 100
"""In samples: windows of 2 s, one every second, and 2 s between the training part and the test part."""


@dataclass(frozen=True)
class Recordings:
    """The file as it is: ``series[user][exercise]`` is float64 (time, 6), exercises in the order of ``labels``."""

    series: dict[str, list[Array]]
    labels: tuple[str, ...]
    channels: tuple[str, ...]


@dataclass(frozen=True)
class Cut:
    """The parts of one series as ``[start, stop)`` in samples; they share none."""

    train: tuple[int, int]
    val: tuple[int, int]
    test: tuple[int, int]


def cut(length: int) -> Cut:
    """The parts of a series of ``length`` samples, by time.

    The first 70 % belong to training; the last seventh of that, at least one window, validates; then a gap of
    :data:`GAP` samples; the rest tests. A window lies wholly inside one part, so that no sample is in two.
    """
    end = length * 7 // 10
    middle = end - max(WINDOW, end // 7)
    return Cut((0, middle), (middle, end), (end + GAP, length))


def starts(part: tuple[int, int]) -> range:
    """Where the windows of a part start."""
    return range(part[0], part[1] - WINDOW + 1, STRIDE)


def find_file() -> Path:
    """The recordings' path, without importing ``seglearn`` (which asks for packages that it does not declare)."""
    spec = find_spec("seglearn")
    if spec is None or spec.origin is None:
        raise DataError(
            "smartwatch: the package 'seglearn', which carries the recordings, is not installed; "
            "install it with: pip install 'talaria[sim]'"
        )
    return Path(spec.origin).parent / "data" / "watch_dataset.npy"


def read(path: Path) -> Recordings:
    """The recordings in ``path``. :class:`DataError` where the file is missing or is not the known one.

    The file is a pickle: its sha256 is checked first, and what reads it admits arrays and text only.
    """
    try:
        if path.stat().st_size != _SIZE:
            raise DataError(f"smartwatch: {path} has {path.stat().st_size} bytes, need {_SIZE}; reinstall seglearn")
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"smartwatch: cannot read {path}: {error.strerror}; reinstall seglearn") from None
    digest = hashlib.sha256(data).hexdigest()
    if digest != SHA256:
        raise DataError(f"smartwatch: {path} has sha256 {digest}, need {SHA256}; reinstall seglearn")
    raw = read_object(data, "smartwatch")
    labels = tuple(str(name) for name in raw["y_labels"])
    series: dict[str, list[Array]] = {}
    rows = sorted(zip(raw["subject"], raw["side"], raw["y"], raw["X"], strict=True), key=lambda row: row[:3])
    for subject, side, _, x in rows:
        series.setdefault(f"s{int(subject):02d}-{'right' if side else 'left'}", []).append(x)
    return Recordings(dict(sorted(series.items())), labels, tuple(str(name) for name in raw["X_labels"]))


def load(
    *,
    newcomers: tuple[int, ...] = (9, 10),
    newcomer_windows: int | None = 8,
    newcomer_holdout: int = 1,
    member_windows: int | None = None,
    path: Path | None = None,
) -> Federated:
    """The smartwatch users, with samples float32 (6, 100), z-scored per axis.

    ``newcomers``: the subjects whose two wrists stay out of the training, by default the last two, chosen before
    anything was measured. They have labels for their first ``newcomer_windows`` windows per exercise (8: 63 s in
    all) and not one more: the last ``newcomer_holdout`` of these validate, the windows that share a sample with
    them are dropped, the others train. With ``newcomer_holdout=0`` all of them train and ``val`` is empty. With
    ``newcomer_windows=None`` they have as many labels as a member.
    ``member_windows`` cuts the members' training to their first windows per exercise (None: all of them).

    Mean and standard deviation come from the members' training samples alone, as far as ``member_windows`` lets
    them count. ``path``: the recordings, where they do not lie in the installed package.
    """
    record = read(find_file() if path is None else path)
    subjects = sorted({_subject(user) for user in record.series})
    _check(newcomers, subjects, newcomer_windows, newcomer_holdout, member_windows)
    away = {user for user in record.series if _subject(user) in newcomers}
    mean, sd = _scale([x for user, xs in record.series.items() if user not in away for x in xs], member_windows)
    scaled = {user: [(x - mean) / sd for x in xs] for user, xs in record.series.items()}
    return Federated(
        name="smartwatch",
        clients={user: _member(xs, member_windows) for user, xs in scaled.items() if user not in away},
        newcomers={
            user: _member(xs, None) if newcomer_windows is None else _newcomer(xs, newcomer_windows, newcomer_holdout)
            for user, xs in scaled.items()
            if user in away
        },
        labels=record.labels,
        input_shape=(len(record.channels), WINDOW),
        meta={
            "rate_hz": _RATE_HZ,
            "window": WINDOW,
            "stride": STRIDE,
            "gap": GAP,
            "channels": record.channels,
            "mean": tuple(float(v) for v in mean),
            "sd": tuple(float(v) for v in sd),
            "sha256": SHA256,
            "newcomer_windows": newcomer_windows,
            "newcomer_holdout": newcomer_holdout,
        },
    )


def _subject(user: str) -> int:
    return int(user[1:3])


def _check(
    newcomers: tuple[int, ...], subjects: list[int], windows: int | None, holdout: int, member_windows: int | None
) -> None:
    odd = [s for s in newcomers if s not in subjects]
    if odd or len(set(newcomers)) >= len(subjects):
        raise ConfigError(
            f"smartwatch: newcomers={tuple(newcomers)} must be subjects among {subjects}, and not all of them"
        )
    if windows is not None and (windows < 1 or not 0 <= holdout < windows):
        raise ConfigError(
            f"smartwatch: newcomer_windows={windows} must be at least 1, or None for all, and "
            f"newcomer_holdout={holdout} at least 0 and below it"
        )
    if windows is not None and holdout and windows - holdout - _overlap() < 1:
        raise ConfigError(
            f"smartwatch: newcomer_windows={windows} leaves no window to train on beside newcomer_holdout={holdout} "
            f"and the {_overlap()} that would share samples with it; use newcomer_holdout=0 or more windows"
        )
    if member_windows is not None and member_windows < 1:
        raise ConfigError(f"smartwatch: member_windows={member_windows} must be at least 1, or None for all")


def _overlap() -> int:
    """How many windows before one share a sample with it."""
    return (WINDOW - 1) // STRIDE


def _scale(series: list[Array], limit: int | None) -> tuple[Array, Array]:
    parts = []
    for x in series:
        begun = list(starts(cut(len(x)).train))[:limit]
        parts.append(x[: begun[-1] + WINDOW])
    every = np.concatenate(parts)
    return every.mean(0), every.std(0)


def _windows(series: list[Array], begun: list[list[int]]) -> Samples:
    x = [s[a : a + WINDOW].T for s, at in zip(series, begun, strict=True) for a in at]
    y = [label for label, at in enumerate(begun) for _ in at]
    return samples(np.stack(x) if x else np.empty((0, series[0].shape[1], WINDOW)), np.array(y, dtype=np.int64))


def _member(series: list[Array], limit: int | None) -> Client:
    parts = [cut(len(x)) for x in series]
    return Client(
        train=_windows(series, [list(starts(p.train))[:limit] for p in parts]),
        val=_windows(series, [list(starts(p.val)) for p in parts]),
        test=_windows(series, [list(starts(p.test)) for p in parts]),
    )


def _newcomer(series: list[Array], windows: int, holdout: int) -> Client:
    parts = [cut(len(x)) for x in series]
    labelled = [list(starts((0, p.val[1])))[:windows] for p in parts]
    fitted = windows - holdout - _overlap() if holdout else windows
    return Client(
        train=_windows(series, [at[:fitted] for at in labelled]),
        val=_windows(series, [at[windows - holdout :] for at in labelled]),
        test=_windows(series, [list(starts(p.test)) for p in parts]),
    )
