"""Sets of small whole numbers as bitmaps: chunks that are missing, channels that a mask keeps."""

from __future__ import annotations

from collections.abc import Iterable

from talaria.errors import WireError


def bits_of(indices: Iterable[int], count: int) -> bytes:
    """A bitmap of ``count`` bits, least significant first.

    >>> bits_of({0, 9}, 10).hex()
    '0102'
    """
    return sum(1 << i for i in indices).to_bytes(-(-count // 8), "little")


def indices_of(bitmap: bytes, count: int) -> set[int]:
    """The set bits of a bitmap of ``count`` bits. Raises :class:`WireError` for a wrong length or stray bits."""
    value = int.from_bytes(bitmap, "little")
    if len(bitmap) != -(-count // 8) or value >> count:
        raise WireError(f"bitmap of {len(bitmap)} bytes does not describe {count} places, or marks one beyond")
    return {i for i in range(count) if value >> i & 1}
