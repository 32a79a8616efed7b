"""What Linux says of this machine's processor."""

from __future__ import annotations

from functools import cache
from pathlib import Path


@cache
def facts() -> dict[str, str]:
    """The first processor's lines of ``/proc/cpuinfo`` by name, in lower case; empty where it cannot be read."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return {}
    lines = (line.partition(":") for line in text.splitlines())
    return {name.strip().lower(): value.strip() for name, _, value in reversed([*lines]) if value}


def flags() -> frozenset[str]:
    """The processor's features, such as ``avx2``, as Linux names them; empty where it does not tell."""
    return frozenset((facts().get("flags") or facts().get("features") or "").split())
