"""What the code of an algorithm or a server rule gives back, which may be another package's: what is not of the form
that :mod:`talaria.algorithms.base` and :mod:`talaria.aggregate.base` have is named where it is given."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, cast

import numpy as np

from talaria.aggregate import validation
from talaria.aggregate.base import Aggregator
from talaria.errors import ConfigError
from talaria.foreign import shown
from talaria.model.weights import Model, Served, Weights
from talaria.tensors import Tensors, arrays
from talaria.types import Update


def begun(algorithm: str, found: object) -> tuple[Tensors, Tensors]:
    """What travels and what is private, as ``init`` gave them. Raises :class:`ConfigError` for anything else."""
    shared, private = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    if not isinstance(shared, dict) or not isinstance(private, dict):
        raise ConfigError(f"algorithm {shown(algorithm)}: init gave {_kind(found)}; it must give two dicts of arrays")
    return shared, private


def prepared(rule: Aggregator, found: object) -> Tensors:
    """The server's own state that ``init`` gave. Raises :class:`ConfigError` for anything else."""
    if not isinstance(found, dict):
        raise ConfigError(f"aggregator {type(rule).__name__}: init gave {_kind(found)}; it must give a dict of arrays")
    return found


def fitted(algorithm: str, found: object) -> tuple[Update, Tensors]:
    """The update and the private state that ``fit`` gave. Raises :class:`ConfigError` for anything else."""
    update, private = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    if not isinstance(update, Update) or not isinstance(private, dict):
        what = f"algorithm {shown(algorithm)}: fit gave {_kind(found)}"
        raise ConfigError(f"{what}; it must give an update and a dict of private arrays")
    private = arrays(private)
    for name, value in private.items():
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "biuf":
            what = f"algorithm {shown(algorithm)}: fit gave {_kind(value)} as private {name!r}"
            raise ConfigError(f"{what}; make it a numpy array of numbers")
    return update.but(metrics={name: _plain(value) for name, value in update.metrics.items()}), private


def personal(algorithm: str, found: object) -> Model:
    """The model that ``personal`` gave. Raises :class:`ConfigError` for anything else."""
    if not isinstance(found, Weights | Served) and not hasattr(found, "state_dict"):
        what = f"algorithm {shown(algorithm)}: personal gave {_kind(found)}"
        raise ConfigError(f"{what}; it must give a model, such as served(task, state)")
    return cast(Model, found)


def folded(rule: Aggregator, before: Tensors, found: object) -> tuple[Tensors, Tensors]:
    """The shared state and the server's that ``apply`` gave. Raises :class:`ConfigError` for anything else, and where
    an array of ``before`` is missing, has another form or is no longer finite."""
    what = f"aggregator {type(rule).__name__}: apply gave"
    after, state = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    if not isinstance(after, dict) or not isinstance(state, dict):
        raise ConfigError(f"{what} {_kind(found)}; it must give the shared arrays and its own state, two dicts")
    after, state = arrays(after), arrays(state)
    for name, value in before.items():
        new = after.get(name)
        if not isinstance(new, np.ndarray) or (new.dtype, new.shape) != (value.dtype, value.shape):
            raise ConfigError(f"{what} {_kind(new)} as {name!r}; it must stay {_kind(value)}")
    own = type(rule).__module__.startswith("talaria.")  # ours look at updates and at what becomes of them
    if not own and (lost := validation.lost(before, after)) is not None:
        raise ConfigError(f"{what} NaN or infinity in {lost!r}, and every device would learn from it; make it finite")
    return after, state


def _plain(metric: Any) -> Any:
    """One of numpy's or torch's numbers as Python's; anything else as it is, which the codec refuses."""
    with suppress(ValueError, RuntimeError):
        return metric.item() if hasattr(metric, "item") else metric
    return metric


def _kind(found: object) -> str:
    if isinstance(found, tuple):
        return f"({', '.join(type(one).__name__ for one in found)})"
    return f"{found.dtype} {found.shape}" if isinstance(found, np.ndarray) else f"a {type(found).__name__}"
