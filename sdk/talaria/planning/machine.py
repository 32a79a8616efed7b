"""What the machine tells about itself right now. Needs no torch: a device asks before it trains."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import psutil


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load() -> dict[str, Any]:
    """Load, battery and heat. None where the machine does not tell."""
    battery = busy = None
    with suppress(AttributeError, OSError):  # a kernel without power supplies has no folder of them
        battery = psutil.sensors_battery()
    with suppress(AttributeError, OSError):
        busy = os.getloadavg()[0] / cores()
    heat = psutil.sensors_temperatures() if hasattr(psutil, "sensors_temperatures") else {}
    degrees = [entry.current for entries in heat.values() for entry in entries if entry.current]
    return {
        "load": busy,
        "battery": None if battery is None else battery.percent / 100,
        "charging": None if battery is None else battery.power_plugged,
        "celsius": max(degrees, default=None),
    }
