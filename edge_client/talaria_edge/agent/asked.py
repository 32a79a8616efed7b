"""What a coordinator asks of a device beside the round's number: JSON that travels opaque with the request for work."""

from __future__ import annotations

import json

from talaria.errors import ConfigError


def work_of(spec: bytes) -> tuple[int, int | None, bool]:
    """The round that a request for work names; in an asynchronous run this device's last round that counted (0: none);
    and whether the model is to be tried here before others get it."""
    try:
        asked = json.loads(spec)
        round, after, tries = asked["round"], asked.get("after"), asked.get("gate") is True
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        round, after, tries = None, None, False
    if type(round) is not int or round < 1:
        raise ConfigError(f"the coordinator's request names no round ({spec[:60]!r}); update this device")
    return round, after if type(after) is int else None, tries
