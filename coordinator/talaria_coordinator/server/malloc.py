"""Makes glibc return freed memory to the system: its defaults keep it for threads and sizes that may not come again."""

from __future__ import annotations

import ctypes
import os

M_ARENA_MAX, M_MMAP_THRESHOLD = -8, -3  # of malloc.h
ARENAS = 2
MAPPED = 1 << 18


def settle() -> None:
    """At most two heaps for all threads, and blocks of 256 KiB or more, which updates are, mapped one by one and given
    back when freed. Without it the memory of a coordinator creeps up by some hundred KiB a round. Call it before
    threads start. Does nothing where MALLOC_* variables say otherwise, and without glibc."""
    if any(name.startswith("MALLOC_") for name in os.environ):
        return
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    mallopt(M_ARENA_MAX, ARENAS)
    mallopt(M_MMAP_THRESHOLD, MAPPED)
