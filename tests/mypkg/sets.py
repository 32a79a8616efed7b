"""A dataset that Talaria does not have."""

import numpy as np

from talaria.data import Federated


def rings(clients: int = 2, seed: int = 0) -> Federated:
    """Three classes that lie apart."""
    draw = np.random.default_rng(seed)
    y = np.tile(np.arange(3), 10 * clients)
    x = draw.normal(0, 0.4, (len(y), 4)).astype(np.float32)
    x[:, 0] += 2 * y
    return Federated.from_arrays(x, y, np.repeat(np.arange(clients), 30), name="rings")


def nothing() -> None:
    """No dataset at all."""


def called(name: str = "rings", kind: str = "near", what: int = 2) -> Federated:
    """The same, by options whose names are words that Talaria uses itself."""
    return Federated("-".join((name, kind)), rings(what).clients, ("a", "b", "c"), (4,))


def given(draw=None) -> Federated:  # type: ignore[no-untyped-def]
    """The same, by an option that may be anything."""
    return rings(seed=int(np.max(draw)))
