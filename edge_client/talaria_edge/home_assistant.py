"""What Home Assistant is told about a device over MQTT: its entities, by which topics, and what they show.

The forms are those of Home Assistant's MQTT discovery for devices (2024.11 and later,
https://www.home-assistant.io/integrations/mqtt/#device-discovery-payload).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from talaria.errors import ConfigError
from talaria.foreign import shown

SILENT_S = 300
"""Seconds without a word after which the sensors say that they know nothing."""
_PREFIX = re.compile(r"[A-Za-z0-9_-]{1,40}(/[A-Za-z0-9_-]{1,40})?")


@dataclass(frozen=True, kw_only=True)
class HomeAssistant:
    """The ``[home_assistant]`` table of a ``device.toml``; where it is given, the device appears there."""

    prefix: str = "homeassistant"
    """What discovery listens to."""
    name: str = ""
    """What the device is called there; empty for ``Talaria`` and its name in the fleet."""
    ask: bool = False
    """A new bundle that does better waits until somebody installs it."""

    def __post_init__(self) -> None:
        if not isinstance(self.prefix, str) or not _PREFIX.fullmatch(self.prefix):
            raise ConfigError(
                f"home_assistant: prefix={shown(self.prefix)} must be 1 to 40 letters, digits, '_' and '-', as Home "
                "Assistant's own setting; leave it out for 'homeassistant'"
            )
        if not isinstance(self.name, str) or len(self.name) > 100 or not (self.name.isprintable()):
            raise ConfigError(f"home_assistant: name={shown(self.name)} must be at most 100 printable characters")
        if not isinstance(self.ask, bool):
            raise ConfigError(f"home_assistant: ask={shown(self.ask)} must be true or false")


def state_topic(fleet: str, device: str) -> str:
    """Where the device says what its entities show (JSON, retained)."""
    return f"fl/1/{fleet}/d/{device}/ha"


def command_topic(fleet: str, device: str) -> str:
    """Where the device listens for ``install`` and ``rollback``."""
    return f"{state_topic(fleet, device)}/set"


def config_topic(home: HomeAssistant, fleet: str, device: str) -> str:
    """Where the device says what it is (JSON, retained)."""
    return f"{home.prefix}/device/{fleet}/{device}/config"


def discovery(home: HomeAssistant, fleet: str, device: str, *, update: bool) -> dict[str, Any]:
    """What the device is, for :func:`config_topic`; ``update`` where it makes bundles, which can be installed."""
    topic, known = state_topic(fleet, device), f"talaria_{fleet}_{device}"

    def sensor(name: str, value: str, **more: Any) -> dict[str, Any]:
        return {
            "platform": "sensor",
            "unique_id": f"{known}_{value}",
            "name": name,
            "state_topic": topic,
            "value_template": f"{{{{ value_json.{value} }}}}",
            "expire_after": SILENT_S,
            **more,
        }

    share = {"unit_of_measurement": "%", "state_class": "measurement", "suggested_display_precision": 1}
    parts = {
        "before": sensor("Personal score before", "before", icon="mdi:history", **share),
        "after": sensor("Personal score", "after", icon="mdi:target-account", **share),
        "trained": sensor("Last trained", "trained", device_class="timestamp"),
        "waiting": sensor("Waiting for", "waiting", icon="mdi:timer-sand", entity_category="diagnostic"),
        "kept": sensor("Channels kept", "kept", icon="mdi:content-cut", entity_category="diagnostic", **share),
    }
    if update:
        parts["bundle"] = {
            "platform": "update",
            "unique_id": f"{known}_bundle",
            "name": "Personal model",
            "title": "Personal model",
            "state_topic": f"{topic}/bundle",
            "command_topic": command_topic(fleet, device),
            "payload_install": "install",
        }
        parts["rollback"] = {
            "platform": "button",
            "unique_id": f"{known}_rollback",
            "name": "Back to the model before",
            "command_topic": command_topic(fleet, device),
            "payload_press": "rollback",
            "icon": "mdi:undo",
            "entity_category": "config",
        }
    return {
        "device": {
            "identifiers": [known],
            "name": home.name or f"Talaria {device}",
            "manufacturer": "Talaria",
            "model": f"Member of fleet {fleet}",
            "sw_version": version("talaria"),
        },
        "origin": {"name": "talaria", "sw_version": version("talaria")},
        "components": parts,
        "availability_topic": f"{topic}/alive",
        "qos": 1,
    }


@dataclass(frozen=True)
class Shown:
    """What the sensors show; None for what is not known. Scores and shares in percent."""

    before: float | None = None
    after: float | None = None
    trained: str | None = None
    waiting: str | None = None
    kept: float | None = None
    dense: int | None = field(default=None, repr=False)

    def to_json(self) -> dict[str, Any]:
        """As it travels."""
        return {name: value for name, value in vars(self).items() if name != "dense"}


def after(shown: Shown, event: Mapping[str, Any]) -> Shown:
    """What is shown after an event of the agent."""
    match event.get("event"):
        case "waiting" | "declined":
            return replace(shown, waiting=str(event.get("reason", ""))[:250] or None)
        case "allowed" | "training" | "personalizing":
            return replace(shown, waiting=None)
        case "trained":
            return replace(shown, trained=_moment(event.get("at")))
        case "done":
            return finished(replace(shown, trained=_moment(event.get("at")) or shown.trained), event)
    return shown


def finished(shown: Shown, result: Mapping[str, Any]) -> Shown:
    """What is shown after a run that came to this result, as ``talaria edge result`` prints it."""
    accuracy, kept = result.get("accuracy"), result.get("channels_kept")
    found = shown
    if isinstance(accuracy, Mapping):
        found = replace(found, before=_percent(accuracy.get("in_force")), after=_percent(accuracy.get("new")))
    return replace(found, kept=_percent(kept)) if kept is not None else found


def _percent(share: Any) -> float | None:
    return round(100 * share, 2) if type(share) in (int, float) else None


def _moment(at: Any) -> str | None:
    return datetime.fromtimestamp(at, UTC).isoformat() if type(at) in (int, float) else None
