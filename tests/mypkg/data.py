"""A device's samples, by a function of another package."""

import sys
import time
from pathlib import Path

import numpy as np


def leave(word="goodbye"):
    """As a script does where it has nothing to give."""
    sys.exit(word)


def hang(begun):
    """As a recorder does that waits for a sensor; ``begun`` is a file that is there from then on."""
    Path(begun).touch()
    time.sleep(3600)


def load(count=30):
    """``count`` windows and their classes, as arrays."""
    y = np.arange(int(count)) % 3
    if not isinstance(count, int):
        raise TypeError(f"count={count!r} must be a number")
    return np.random.default_rng(0).standard_normal((count, 6, 32)).astype(np.float32), y
