"""Aggregators from configuration tables, and errors that say what would have been right."""

import tomllib

import pytest

from talaria.aggregate.base import Aggregator
from talaria.aggregate.fedbuff import FedBuff
from talaria.aggregate.fedopt import ServerAdam
from talaria.aggregate.masked import MaskedMean
from talaria.aggregate.registry import AGGREGATORS, load
from talaria.aggregate.robust.krum import Krum
from talaria.aggregate.wrappers import Clipped
from talaria.errors import ConfigError

NEEDED: dict[str, dict[str, object]] = {
    "bucketed": {"inner": "median"},
    "clipped": {"inner": "mean", "norm": 1},
    "server_momentum": {"inner": "mean"},
    "server_adam": {"inner": {"name": "rfa"}},
}


@pytest.mark.parametrize("name", AGGREGATORS)
def test_every_name_loads(name: str) -> None:
    rule = load({"name": name, **NEEDED.get(name, {})})
    assert isinstance(rule, Aggregator)
    assert type(rule) is AGGREGATORS[name]


def test_a_nested_table() -> None:
    spec = tomllib.loads(
        """
        name = "server_adam"
        lr = 1
        [inner]
        name = "fedbuff"
        capacity = 12
        a = 0.5
        [inner.inner]
        name = "clipped"
        norm = 2.5
        inner = {name = "krum", f = 3}
        """
    )
    want = ServerAdam(lr=1, inner=FedBuff(capacity=12, a=0.5, inner=Clipped(norm=2.5, inner=Krum(f=3))))
    assert load(spec) == want
    assert load("masked_mean") == MaskedMean()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("medain", r"aggregator 'medain' is unknown \(did you mean 'median'\?\); use mean, masked_mean, median"),
        ({"f": 1}, "name=None must be one of mean, "),
        (["median"], "must be a name, or a table"),
        ({"name": "krum", "ff": 1}, r"option 'ff' is unknown \(did you mean 'f'\?\); it takes f, min_holders, keep"),
        ({"name": "krum", "f": 1.5}, "'krum': f=1.5 must be a whole number"),
        ({"name": "krum", "f": True}, "f=True must be a whole number"),
        ({"name": "krum", "f": "2"}, "f='2' must be a whole number"),
        ({"name": "multi_krum", "m": 0.5}, "m=0.5 must be a whole number or left out"),
        ({"name": "masked_mean", "mode": "union"}, "mode='union' must be one of 'holders', 'intersection'"),
        ({"name": "masked_mean", "blend": 1}, "blend=1 must be true or false"),
        ({"name": "rfa", "nu": "small"}, "nu='small' must be a number"),
        ({"name": "clipped", "inner": "mean"}, "'clipped': option 'norm' is missing"),
        ({"name": "clipped", "norm": 1}, "'clipped': option 'inner' is missing"),
        ({"name": "clipped", "norm": 1, "inner": 3}, "3 must be a name, or a table"),
        ({"name": "bucketed", "inner": {"name": "krumm"}}, r"'krumm' is unknown \(did you mean 'krum'"),
        ({"name": "rfa", "nu": -1.0}, "nu=-1.0 must be a number in"),
    ],
)
def test_wrong_specs_say_what_would_be_right(spec: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(spec)  # type: ignore[arg-type]
