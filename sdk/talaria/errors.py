"""One tree of exceptions. Each message names the field, the value that came, and the mend.

TalariaError
├── ConfigError       a setting, option or hyper-parameter is wrong (also a ValueError)
├── DataError         a user's samples cannot be learned from (also a ValueError)
├── ModelError        a model lacks what was asked of it: a head, a layer, a safe way to prune
├── BudgetError       no plan keeps the budget; carries the nearest one that does
├── AggregationError  updates that do not fit the shared state or each other
├── WireError         bytes from outside that are refused
│   └── TooLarge      refused before anything was allocated
├── TransportError    the broker is out of reach, or closed the door
├── StateError        saved state that is damaged, missing, or could not be written
└── BundleError       a bundle that is damaged, unsafe, or not what its manifest says
"""

import errno
from collections.abc import Sequence


class TalariaError(Exception):
    """Root of everything that Talaria raises on purpose."""


class ConfigError(TalariaError, ValueError):
    """A setting, option or hyper-parameter is wrong."""


class DataError(TalariaError, ValueError):
    """A user's samples cannot be learned from."""


class ModelError(TalariaError):
    """A model lacks what was asked of it."""


class BudgetError(TalariaError):
    """No plan keeps the budget. ``nearest`` is the closest budget that can be kept, if any."""

    def __init__(self, message: str, nearest: object | None = None) -> None:
        super().__init__(message)
        self.nearest = nearest


class AggregationError(TalariaError):
    """Updates that do not fit the shared state, or each other."""


class WireError(TalariaError):
    """Bytes from outside that are refused."""


class TooLarge(WireError):  # noqa: N818 - reads as what it is
    """Refused for its declared size, before anything was allocated."""


class TransportError(TalariaError):
    """The broker is out of reach, or closed the door."""


class StateError(TalariaError):
    """Saved state that is damaged, missing, or could not be written."""


class BundleError(TalariaError):
    """A bundle that is damaged, unsafe, or not what its manifest says."""


def some_of(names: Sequence[str], most: int) -> str:
    """The first of ``names`` for a message, and dots where there are more."""
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def so_that_it_can_be_written(error: OSError) -> str:
    """What to do about a file that could not be written, by what the system said."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "free space there"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "let this program write there"
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EEXIST):
        return "make that folder"
    if error.errno in (errno.EISDIR, errno.EBUSY, errno.ENXIO):
        return "name a file"
    return "check that disk"


def said(error: BaseException) -> str:
    """What went wrong, in words; of an error that was not foreseen, also its kind."""
    return (
        str(error) if isinstance(error, TalariaError) else f"{type(error).__name__}: {str(error)[:300] or 'no reason'}"
    )
