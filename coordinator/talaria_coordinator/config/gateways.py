"""The ``[gateways]`` table of a ``fleet.toml``: which members speak for a site, and for how many devices at most."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from talaria.aggregate.base import Aggregator
from talaria.aggregate.partial_sum import require_summable
from talaria.config import Section
from talaria.errors import ConfigError
from talaria.federated import rounds
from talaria.federated.run import Run

MOST = 100_000
"""Devices that one gateway may speak for."""


def gateways_of(section: Section) -> dict[str, int]:
    """What a ``[gateways]`` table says: by member, the most devices that it may speak for."""
    found = {name: section.whole(name, low=1, high=MOST) for name in section.values}
    section.done()
    return found


def require_gateways(
    gateways: Mapping[str, int],
    members: Collection[str],
    run: Run,
    rule: Aggregator | None,
    *,
    private: bool,
    tried: bool,
) -> None:
    """Raise :class:`ConfigError` where a fleet cannot have these gateways; ``members`` is empty where whoever comes is
    a member, ``rule`` what replaces the algorithm's own; ``tried`` says that new runs are tried by some first."""
    if not gateways:
        return
    for name, most in gateways.items():
        if members and name not in members:
            raise ConfigError(f"gateways: {name!r} is no member; add it to [fleet] members, or leave it out")
        if type(most) is not int or not 1 <= most <= MOST:
            raise ConfigError(f"gateways: {name}={most!r} must be a whole number in 1..{MOST}: devices")
    if private:
        raise ConfigError(
            "gateways: [privacy] cuts or masks the updates of single devices, and a partial sum is none; leave one of "
            "the two out"
        )
    if tried:
        raise ConfigError(
            "gateways: [canary] asks the gates of single devices, and a gateway has none; leave one of the two out"
        )
    require_summable_run(run, rule)


def require_summable_run(run: Run, rule: Aggregator | None = None) -> None:
    """Raise :class:`ConfigError` where a partial sum of some devices' updates cannot stand for them in ``run``."""
    if run.asynchronous:
        raise ConfigError(
            "gateways: an asynchronous run weighs each update by its own staleness, which a partial sum hides; set "
            '[rounds] mode = "synchronous", or leave [gateways] out'
        )
    if run.fraction != 1:
        raise ConfigError(
            f"gateways: fraction={run.fraction:g} draws among members, and would draw a whole site or none of it; set "
            "fraction to 1, or leave [gateways] out"
        )
    require_summable(rounds.rule_of(run, rule))
