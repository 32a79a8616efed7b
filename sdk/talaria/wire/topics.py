"""The topic tree of one fleet. A topic holds at most six slashes, so that every known broker carries it.

fl/1/{fleet}/co/state             retained   the coordinator's birth, or its last will
fl/1/{fleet}/co/model              retained   the signed manifest of the current global model
fl/1/{fleet}/m/{model8}/{k}                   a chunk of the global model, to all
fl/1/{fleet}/d/{device}/state     retained   a device's birth, or its last will
fl/1/{fleet}/d/{device}/cmd                  coordinator to device
fl/1/{fleet}/d/{device}/evt                  device to coordinator
fl/1/{fleet}/d/{device}/up/{x}               chunks of upload x
fl/1/{fleet}/d/{device}/dn/{x}               chunks of the global model that this device asked for again
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from talaria.errors import WireError

Kind = Literal["co/state", "co/model", "m", "state", "cmd", "evt", "up", "dn"]

FLEET_NAME = r"[a-z0-9][a-z0-9_-]{0,35}"
FLEET_RULE = "1 to 36 of a-z, 0-9, '-' and '_', a letter or digit first"
DEVICE_NAME = r"[a-z0-9][a-z0-9-]{0,35}"
DEVICE_RULE = "1 to 36 of a-z, 0-9 and '-', a letter or digit first"
"""How fleets and devices may be called, as a pattern and in words; whoever asks for a name asks for these."""
_FLEET, _DEVICE = re.compile(FLEET_NAME), re.compile(DEVICE_NAME)
_XFER = re.compile(r"[a-z0-9]{1,32}")
_MODEL8 = re.compile(r"[0-9a-f]{8}")
_INDEX = re.compile(r"0|[1-9][0-9]{0,5}")
_LONGEST = 160


@dataclass(frozen=True)
class Topic:
    """One topic, taken apart. ``device`` is empty outside ``d/``; ``xfer`` is set for ``up`` and ``dn``."""

    fleet: str
    kind: Kind
    device: str = ""
    xfer: str = ""
    model8: str = ""
    index: int = 0

    def __post_init__(self) -> None:
        _need(_FLEET, "fleet", self.fleet, FLEET_RULE)
        of_device = self.kind in ("state", "cmd", "evt", "up", "dn")
        if of_device:
            _need(_DEVICE, "device", self.device, DEVICE_RULE)
        if self.kind in ("up", "dn"):
            _need(_XFER, "transfer", self.xfer, "1 to 32 of a-z and 0-9")
        if self.kind == "m":
            _need(_MODEL8, "model", self.model8, "the first 8 hex digits of its sha256")
            _need(_INDEX, "chunk", str(self.index), "a number of at most 6 digits")

    def __str__(self) -> str:
        root = f"fl/1/{self.fleet}"
        if self.kind in ("co/state", "co/model"):
            return f"{root}/{self.kind}"
        if self.kind == "m":
            return f"{root}/m/{self.model8}/{self.index}"
        tail = f"/{self.xfer}" if self.kind in ("up", "dn") else ""
        return f"{root}/d/{self.device}/{self.kind}{tail}"


def _need(pattern: re.Pattern[str], what: str, value: str, rule: str) -> None:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise WireError(f"topic: {what} {str(value)[:40]!r} is not allowed; use {rule}")


def parse(text: str) -> Topic:
    """The topic that ``text`` spells.

    Raises :class:`WireError` for anything that :class:`Topic` would not spell in the same way.
    """
    parts = text.split("/") if len(text) <= _LONGEST else []
    if parts[:2] != ["fl", "1"] or len(parts) < 4:
        raise WireError(f"topic {text[:80]!r} is not of this protocol; it begins with fl/1/<fleet>/")
    match parts[2:]:
        case [fleet, "co", "state"]:
            return Topic(fleet, "co/state")
        case [fleet, "co", "model"]:
            return Topic(fleet, "co/model")
        case [fleet, "m", model8, index] if _INDEX.fullmatch(index):
            return Topic(fleet, "m", model8=model8, index=int(index))
        case [fleet, "d", device, ("state" | "cmd" | "evt") as kind]:
            return Topic(fleet, kind, device)
        case [fleet, "d", device, ("up" | "dn") as kind, xfer]:
            return Topic(fleet, kind, device, xfer)
    raise WireError(f"topic {text[:80]!r} is not one of the tree; see talaria.wire.topics")


def device_filters(fleet: str, device: str) -> tuple[str, ...]:
    """What a device subscribes to: the coordinator, the global model, and its own commands."""
    Topic(fleet, "cmd", device)
    root = f"fl/1/{fleet}"
    return (f"{root}/co/#", f"{root}/m/#", f"{root}/d/{device}/cmd", f"{root}/d/{device}/dn/#")


def coordinator_filters(fleet: str, *, uploads: bool = True) -> tuple[str, ...]:
    """What a coordinator subscribes to: its own birth (to fence itself) and all that devices say, chunks of
    ``uploads`` too unless its ingest workers take them."""
    Topic(fleet, "co/state")
    root = f"fl/1/{fleet}"
    own = (f"{root}/co/state", f"{root}/d/+/state", f"{root}/d/+/evt")
    return (*own, upload_filter(fleet, "+")) if uploads else own


def upload_filter(fleet: str, device: str) -> str:
    """What an ingest worker subscribes to: all chunks of one device's uploads (``+``: of every device's)."""
    return f"fl/1/{fleet}/d/{device}/up/+"


def matches(pattern: str, topic: str) -> bool:
    """True where the MQTT filter ``pattern`` (with ``+`` and ``#``) covers ``topic``."""
    want, have = pattern.split("/"), topic.split("/")
    for i, part in enumerate(want):
        if part == "#":
            return True
        if i >= len(have) or part not in ("+", have[i]):
            return False
    return len(want) == len(have)
