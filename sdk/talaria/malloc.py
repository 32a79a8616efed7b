"""Makes glibc use freed memory again: its defaults keep it for threads and sizes that may not come again, or map every
large block anew, whose pages the kernel must then fill with zeros."""

from __future__ import annotations

import ctypes
import os

M_ARENA_MAX, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = -8, -3, -1  # of malloc.h
MAPPED = 32 << 20
"""The largest that glibc takes."""


def settle(arenas: int = 2, mapped: int = MAPPED, kept: int = 64 << 20) -> None:
    """At most so many heaps for all threads. Blocks below ``mapped`` bytes, which a coordinator's updates are, come
    from them, so that the pages of one update are those of the next; larger ones are the system's. Above ``kept`` bytes
    what is free at a heap's end goes back, and the rest by :func:`give_back`. Call it before threads start. Does
    nothing where MALLOC_* variables say otherwise, and without glibc."""
    if any(name.startswith("MALLOC_") for name in os.environ):
        return
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    mallopt(M_ARENA_MAX, arenas)
    mallopt(M_MMAP_THRESHOLD, mapped)
    mallopt(M_TRIM_THRESHOLD, kept)


def give_back() -> None:
    """Give all free pages back to the system, wherever they lie between used ones: once a round, so that what one round
    left in pieces does not pile up. Does nothing without glibc."""
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):
        return
