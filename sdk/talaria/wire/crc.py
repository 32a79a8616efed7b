"""The crc32 of what is put together, out of the crc32 of its parts: zlib's ``crc32_combine``, which Python lacks."""

from __future__ import annotations

from functools import lru_cache

_POLYNOMIAL = 0xEDB88320
"""Of crc32, its bits turned round: the highest power is the lowest bit."""
_ONE = 1 << 31


def crc32_of_both(first: int, second: int, length: int) -> int:
    """The crc32 of bytes that have the crc32 ``first``, followed by ``length`` bytes that have the crc32 ``second``.

    >>> from zlib import crc32
    >>> crc32_of_both(crc32(b"ab"), crc32(b"cde"), 3) == crc32(b"abcde")
    True
    """
    return _product(_power(8 * length), first) ^ second


@lru_cache(256)
def _power(bits: int) -> int:
    """x to the power ``bits``, modulo the polynomial."""
    result, square = _ONE, _ONE >> 1
    while bits:
        if bits & 1:
            result = _product(square, result)
        square, bits = _product(square, square), bits >> 1
    return result


def _product(a: int, b: int) -> int:
    """The product of two polynomials over two elements, modulo the polynomial."""
    result = 0
    while a:
        if a & _ONE:
            result ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
    return result
