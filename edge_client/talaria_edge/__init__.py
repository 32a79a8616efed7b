"""A device of a fleet from Python: its agent, its settings, where its samples come from, and joining with keys.

The names below load on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from talaria import lazy

if TYPE_CHECKING:
    from talaria_edge.config import DeviceConfig, load_config
    from talaria_edge.data import DataSource, DeviceData, Given, NamedSource, NpzSource
    from talaria_edge.device import Device
    from talaria_edge.home_assistant import HomeAssistant
    from talaria_edge.identity.enroll import accept_answer, join
    from talaria_edge.recording.folder import FolderSource
    from talaria_edge.training_policy import Rules

__all__ = [
    "DataSource",
    "Device",
    "DeviceConfig",
    "DeviceData",
    "FolderSource",
    "Given",
    "HomeAssistant",
    "NamedSource",
    "NpzSource",
    "Rules",
    "accept_answer",
    "join",
    "load_config",
]

__getattr__, __dir__ = lazy.attach(
    __name__,
    {
        "Device": "talaria_edge.device",
        "FolderSource": "talaria_edge.recording.folder",
        "HomeAssistant": "talaria_edge.home_assistant",
        "Rules": "talaria_edge.training_policy",
        **dict.fromkeys(("DeviceConfig", "load_config"), "talaria_edge.config"),
        **dict.fromkeys(("DataSource", "DeviceData", "Given", "NamedSource", "NpzSource"), "talaria_edge.data"),
        **dict.fromkeys(("accept_answer", "join"), "talaria_edge.identity.enroll"),
    },
)
