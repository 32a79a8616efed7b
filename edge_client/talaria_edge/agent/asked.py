"""What a coordinator asks of a device beside the round's number: JSON that travels opaque with the request for work."""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from talaria.errors import ConfigError
from talaria.privacy.forms import FORMS


@dataclass(frozen=True)
class Asked:
    """The round; in an asynchronous run this device's last round that counted (0: none); whether the model is to be
    tried here before others get it; the terms of a secure round, empty where it is none; and what differential privacy
    will have cost this device then (``epsilon`` at ``delta``, and by whose noise: ``form``), empty where nothing is
    counted."""

    round: int
    after: int | None = None
    tries: bool = False
    terms: bytes = field(default=b"", repr=False)
    spent: Mapping[str, float | str] = field(default_factory=dict)


def asked_of(spec: bytes) -> Asked:
    """What a request for work says. Raises :class:`ConfigError` where it names no round, or a cost of privacy that is
    none: the personal model's card carries it."""
    try:
        found = json.loads(spec)
        round, after, tries = found["round"], found.get("after"), found.get("gate") is True
        terms = base64.b64decode(found.get("secure", ""), validate=True)
        cost = found.get("privacy") or {}
        spent: dict[str, float | str] = {name: _cost(cost[name]) for name in ("epsilon", "delta")} if cost else {}
        if spent and cost.get("form") in FORMS.values():
            spent["form"] = str(cost["form"])
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, binascii.Error):
        round, after, tries, terms, spent = None, None, False, b"", {}
    if type(round) is not int or round < 1:
        raise ConfigError(f"the coordinator's request for a round cannot be read ({spec[:90]!r}); update this device")
    return Asked(round, after if type(after) is int else None, tries, terms, spent)


def _cost(value: object) -> float:
    if not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError("a cost that is none")
    return float(value)
