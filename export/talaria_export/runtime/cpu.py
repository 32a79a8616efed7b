"""The features of this machine's processor that decide between variants."""

from __future__ import annotations

import platform
from typing import Any

from talaria.cpuinfo import flags


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
