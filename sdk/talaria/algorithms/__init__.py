"""Name -> algorithm. One paper, one file; every file holds one frozen dataclass. Those of other packages are found by
the name of an entry point in ``talaria.algorithms`` or as ``module:Name``, and are held to the same form."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from talaria import lazy, plugins, valid
from talaria.algorithms.base import Algorithm, Card
from talaria.errors import ConfigError
from talaria.foreign import shown

ALGORITHMS: Mapping[str, type[Algorithm]] = lazy.Table(
    {
        "local": "talaria.algorithms.local_only:LocalOnly",
        "fedavg": "talaria.algorithms.fedavg:FedAvg",
        "fedavg_ft": "talaria.algorithms.fedavg_ft:FedAvgFT",
        "fedprox": "talaria.algorithms.fedprox:FedProx",
        "fedper": "talaria.algorithms.fedper:FedPer",
        "fedrep": "talaria.algorithms.fedrep:FedRep",
        "fedbabu": "talaria.algorithms.fedbabu:FedBABU",
        "lg_fedavg": "talaria.algorithms.lg_fedavg:LGFedAvg",
        "ditto": "talaria.algorithms.ditto:Ditto",
        "apfl": "talaria.algorithms.apfl:APFL",
        "perfedavg": "talaria.algorithms.perfedavg:PerFedAvg",
        "hermes": "talaria.algorithms.hermes:Hermes",
        "thorki": "talaria.algorithms.thorki:Thorki",
        "heart_pfl": "talaria.algorithms.heart_pfl:HeartPFL",
        "pfedgm": "talaria.algorithms.pfedgm:PFedGM",
        "ffgg": "talaria.algorithms.ffgg:FFGG",
    }
)
"""Talaria's own, each imported when it is asked for: a device runs one of them."""

GROUP = plugins.Group("algorithm", "talaria.algorithms", ALGORITHMS)
"""How algorithms are found by name: :data:`ALGORITHMS`, entry points, ``module:Name``."""
_FORM = ("aggregator", "init", "fit", "personal")


def load(name: str, hparams: Mapping[str, Any] | None = None) -> Algorithm:
    """The named algorithm with ``hparams`` (scalars and strings): built in, an entry point's, or ``module:Name``.

    Raises :class:`ConfigError`, naming what exists, for an unknown name or option and for a value of the wrong type;
    and, naming what is missing, for a class that is no algorithm.
    """
    found, what = kind_of(name), f"algorithm {shown(name)}"
    if not isinstance(found, type):  # an object, whose options are set
        valid.Options({}).read(what, hparams or {})
        return found  # type: ignore[no-any-return]
    made: Algorithm = plugins.make(what, found, **_travelling(found).read(what, hparams or {}))
    return made


def kind_of(name: str) -> Any:
    """The class that ``name`` stands for, or the object that somebody gave a name. Raises :class:`ConfigError`."""
    found = GROUP.find(name)
    if GROUP.is_foreign(name):
        _require_form(f"algorithm {shown(name)}", found)
    return found


def name_of(algorithm: Algorithm) -> tuple[str, dict[str, Any]]:
    """``(name, hparams)`` by which :class:`talaria.federated.run.Run` names this very algorithm, every option
    spelled out.

    What other processes can import is named so that they find it too. A class of ``__main__`` or of a function, and an
    object whose fields are more than numbers and text, are kept in this process: they are for simulation, and are
    refused where a fleet is written. Raises :class:`ConfigError`, naming what is missing, for what is no algorithm.

    >>> name_of(load("fedprox", {"mu": 0.5}))
    ('fedprox', {'mu': 0.5, 'weighting': 'samples', 'allow_degenerate': False})
    """
    if isinstance(algorithm, type):
        raise ConfigError(f"algorithm {algorithm.__name__} is a class; make one, such as {algorithm.__name__}()")
    kind = type(algorithm)
    _require_form(f"algorithm {kind.__name__}", algorithm)
    hparams = {name: getattr(algorithm, name) for name in _travelling(kind).known}
    if all(map(valid.plain, hparams.values())) and _same(kind(**hparams), algorithm):
        return GROUP.name_of(kind), hparams
    return GROUP.name_of(algorithm), {}


def options(cls: type[Algorithm]) -> dict[str, object]:
    """The hyper-parameters of an algorithm and their defaults; resources such as the aggregator are not among them."""
    if not isinstance(cls, type):
        return {}
    return {name: option.default for name, option in _travelling(cls).known.items()}


def _travelling(cls: Any) -> valid.Options:
    return valid.options_of(cls).but([f.name for f in fields(cls) if not f.repr])


def _same(one: Any, other: Any) -> bool:
    """Whether all fields are equal, those too that the class leaves out of its own comparison."""
    try:
        pairs = [(getattr(one, f.name), getattr(other, f.name)) for f in fields(one)]
        return all(a is b or bool(a == b) for a, b in pairs)
    except Exception:  # noqa: BLE001 - a field that cannot be compared is not known to be the same
        return False


def _require_form(what: str, found: Any) -> None:
    """Raise :class:`ConfigError` unless ``found`` is an algorithm, or a class of them."""
    kind = found if isinstance(found, type) else type(found)
    for name in _FORM:
        if not hasattr(kind, name) and name not in getattr(kind, "__dataclass_fields__", ()):
            raise ConfigError(f"{what}: {kind.__name__} has no {name}; see talaria.algorithms.base.Algorithm")
    if not isinstance(getattr(kind, "card", None), Card):
        raise ConfigError(f"{what}: {kind.__name__}.card must be a talaria.algorithms.base.Card; give it one")
    if not is_dataclass(kind) or not kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise ConfigError(
            f"{what}: {kind.__name__} is no frozen dataclass, whose fields are its options; "
            "put @dataclass(frozen=True, kw_only=True) above it"
        )
