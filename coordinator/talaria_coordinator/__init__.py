"""The coordinator of a fleet from Python: what it needs, and serving until the end.

The names below load on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from talaria import lazy

if TYPE_CHECKING:
    from talaria_coordinator.config.api import ApiConfig
    from talaria_coordinator.config.fleet import FleetConfig, load_config
    from talaria_coordinator.config.store import StoreConfig
    from talaria_coordinator.server.server import serve

__all__ = ["ApiConfig", "FleetConfig", "StoreConfig", "load_config", "serve"]

__getattr__, __dir__ = lazy.attach(
    __name__,
    {
        "ApiConfig": "talaria_coordinator.config.api",
        "StoreConfig": "talaria_coordinator.config.store",
        "serve": "talaria_coordinator.server.server",
        **dict.fromkeys(("FleetConfig", "load_config"), "talaria_coordinator.config.fleet"),
    },
)
