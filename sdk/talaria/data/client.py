"""One client's samples."""

from dataclasses import dataclass, field

import numpy as np

from talaria.errors import DataError
from talaria.tensors import Array
from talaria.types import Samples


@dataclass(frozen=True)
class Client:
    """One client's samples, cut so that nothing measured on ``test`` was seen in ``train`` or ``val``.

    ``train`` and ``test`` hold at least one sample. ``val`` may be empty where a client has too few.
    """

    train: Samples
    val: Samples
    test: Samples
    unlabelled: Array | None = field(default=None, repr=False, kw_only=True)
    """Inputs float32 (N, ...) that nobody has labelled: BatchNorm is calibrated on them beside those of ``train``."""

    def __post_init__(self) -> None:
        for name in ("train", "val", "test"):
            if not isinstance(part := getattr(self, name), Samples):
                raise DataError(
                    f"client: {name} is a {type(part).__name__}; give Samples, of none where there are none"
                )
        for name in ("train", "test"):
            if len(getattr(self, name)) == 0:
                raise DataError(f"client: {name} holds no sample; give at least one")


def samples(x: Array, y: Array) -> Samples:
    """Samples of numpy arrays, copied: ``x`` to float32, ``y`` to int64."""
    return Samples(x.astype(np.float32), y.astype(np.int64))
