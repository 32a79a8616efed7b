"""What a Flower app's config says of Talaria: the keys below ``talaria.``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from talaria.errors import ConfigError

PREFIX = "talaria."


def nested(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings below ``talaria.`` as tables within each other; Flower gives them flat.

    >>> nested({"talaria.rounds": 3, "talaria.recipe.lr": 0.1, "mine": 1})
    {'recipe': {'lr': 0.1}, 'rounds': 3}
    """
    found: dict[str, Any] = {}
    for key in sorted(name for name in config if name.startswith(PREFIX)):
        *tables, last = key[len(PREFIX) :].split(".")
        place = found
        for table in tables:
            place = place.setdefault(table, {})
            if not isinstance(place, dict):
                raise ConfigError(f"flower: {key!r} of the app's config stands below a plain value; rename one of them")
        place[last] = config[key]
    return found
