"""What this machine's processor can do, as far as it decides between variants."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path
from typing import Any


@cache
def flags() -> frozenset[str]:
    """The processor's feature flags as Linux names them; empty where they cannot be read."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return frozenset()
    for line in text.splitlines():
        if line.lower().startswith(("flags", "features")):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def has_vnni() -> bool:
    """Whether 8-bit products are summed without saturation: VNNI on x86, the dot product on ARM."""
    return bool(flags() & {"avx512_vnni", "avx_vnni", "asimddp", "i8mm"})


def cpu_class() -> str:
    """A name for machines that can share an optimized model: the architecture and its widest vectors."""
    widest = next((name for name in ("avx512f", "avx2", "avx", "asimd") if name in flags()), "")
    return "-".join(part for part in (platform.machine(), widest, "vnni" if has_vnni() else "") if part)


def device() -> dict[str, Any]:
    """What figures were measured on, as plain data."""
    import onnxruntime

    return {"cpu": cpu_class(), "system": platform.system(), "onnxruntime": onnxruntime.__version__, "threads": 1}
