"""Name -> algorithm. One paper, one file; every file holds one frozen dataclass."""

import difflib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from talaria.algorithms.apfl import APFL
from talaria.algorithms.base import Algorithm
from talaria.algorithms.ditto import Ditto
from talaria.algorithms.fedavg import FedAvg
from talaria.algorithms.fedavg_ft import FedAvgFT
from talaria.algorithms.fedbabu import FedBABU
from talaria.algorithms.fedper import FedPer
from talaria.algorithms.fedprox import FedProx
from talaria.algorithms.fedrep import FedRep
from talaria.algorithms.ffgg import FFGG
from talaria.algorithms.heart_pfl import HeartPFL
from talaria.algorithms.hermes import Hermes
from talaria.algorithms.lg_fedavg import LGFedAvg
from talaria.algorithms.local_only import LocalOnly
from talaria.algorithms.perfedavg import PerFedAvg
from talaria.algorithms.pfedgm import PFedGM
from talaria.algorithms.thorki import Thorki
from talaria.errors import ConfigError

ALGORITHMS: dict[str, type[Algorithm]] = {
    cls.card.name: cls
    for cls in (
        LocalOnly,
        FedAvg,
        FedAvgFT,
        FedProx,
        FedPer,
        FedRep,
        FedBABU,
        LGFedAvg,
        Ditto,
        APFL,
        PerFedAvg,
        Hermes,
        Thorki,
        HeartPFL,
        PFedGM,
        FFGG,
    )
}


def load(name: str, hparams: Mapping[str, Any] | None = None) -> Algorithm:
    """The named algorithm with ``hparams`` (scalars and strings). Raises :class:`ConfigError`, naming what
    exists, for an unknown name or option, and for a value of the wrong type."""
    cls = ALGORITHMS.get(name)
    if cls is None:
        raise ConfigError(
            f"algorithm {name!r} is unknown{_nearest(name, ALGORITHMS)}; choose from {sorted(ALGORITHMS)}"
        )
    known = options(cls)
    given = dict(hparams or {})
    for option, value in given.items():
        if option not in known:
            raise ConfigError(
                f"{name}: option {option!r} is unknown{_nearest(option, known)}; it takes {sorted(known) or 'none'}"
            )
        given[option] = _typed(name, option, value, known[option])
    return cls(**given)


def options(cls: type[Algorithm]) -> dict[str, object]:
    """The hyper-parameters of an algorithm and their defaults; resources such as the aggregator are not among them."""
    return {f.name: f.default for f in fields(cls) if f.repr}  # type: ignore[arg-type]


def _typed(name: str, option: str, value: object, default: object) -> object:
    want = type(default)
    if isinstance(default, bool) or isinstance(value, bool):
        ok = isinstance(value, bool) and isinstance(default, bool)
    elif isinstance(default, float):
        ok = isinstance(value, int | float) and abs(value) < 1e300  # neither NaN nor infinity
        value = float(value) if isinstance(value, int) else value
    else:
        ok = default is None or isinstance(value, want)
    if not ok:
        raise ConfigError(f"{name}: {option}={value!r} must be a {want.__name__}, as in {option}={default!r}")
    return value


def _nearest(word: str, known: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
