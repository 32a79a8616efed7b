"""Makes glibc use freed memory again: its defaults keep it for threads and sizes that may not come again, or map every
large block anew, whose pages the kernel must then fill with zeros."""

from __future__ import annotations

import ctypes
import os

M_ARENA_MAX, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = -8, -3, -1  # of malloc.h
ARENAS = 2
MAPPED = 32 << 20
"""The largest that glibc takes."""
KEPT = 64 << 20


def settle() -> None:
    """At most two heaps for all threads. Blocks below 32 MiB, which updates are, come from them, so that the pages of
    one update are those of the next; above 64 MiB what is free at a heap's end goes back to the system, and the rest by
    :func:`give_back`. Call it before threads start. Does nothing where MALLOC_* variables say otherwise, and without
    glibc."""
    if any(name.startswith("MALLOC_") for name in os.environ):
        return
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    mallopt(M_ARENA_MAX, ARENAS)
    mallopt(M_MMAP_THRESHOLD, MAPPED)
    mallopt(M_TRIM_THRESHOLD, KEPT)


def give_back() -> None:
    """Give all free pages back to the system, wherever they lie between used ones: once a round, so that what one round
    left in pieces does not pile up. Does nothing without glibc."""
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):
        return
