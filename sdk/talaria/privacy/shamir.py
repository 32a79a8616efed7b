"""Shamir's sharing of 32-byte secrets (1979): any ``threshold`` shares give the secret, fewer tell nothing.

The field is that of the smallest prime above 2^256, so that every secret is an element. A share is the polynomial's
value at 1, 2, ..., as 33 bytes, big-endian. Python's whole numbers take a time that depends on their values: whoever
times this process to the nanosecond is not defended against (SECURITY.md, side channels).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import combinations
from math import prod

from talaria.errors import ConfigError, WireError

PRIME = (1 << 256) + 297
SECRET_BYTES, SHARE_BYTES = 32, 33
MOST = 1 << 12
"""Holders of one secret at most."""
PAIRS = 100
"""The threshold up to which two wrong shares are looked for: 5,000 choices, some seconds. Above it, one."""


def split(secret: bytes, threshold: int, holders: int, entropy: bytes) -> list[bytes]:
    """The shares of holders 1..``holders``, in that order, each 33 bytes.

    ``entropy`` (32 secret bytes, used for this secret alone) gives the polynomial, so that a device that was killed
    makes the same shares again. Raises :class:`ConfigError` for sizes that cannot be.
    """
    if len(secret) != SECRET_BYTES or len(entropy) != 32:
        raise ConfigError(f"shares: secret and entropy have {len(secret)} and {len(entropy)} bytes, need 32 each")
    if not 1 <= threshold <= holders <= MOST:
        raise ConfigError(f"shares: threshold={threshold} must be in 1..{holders}, the holders (at most {MOST})")
    wide = hashlib.shake_256(b"talaria/shamir/1\x00" + entropy).digest(48 * (threshold - 1))
    # 48 bytes for an element of 257 bits: what taking the remainder favours is below 2^-127.
    drawn = [int.from_bytes(wide[i : i + 48], "big") % PRIME for i in range(0, len(wide), 48)]
    falling = [*reversed(drawn), int.from_bytes(secret, "big")]
    return [_value(falling, x).to_bytes(SHARE_BYTES, "big") for x in range(1, holders + 1)]


def _value(falling: Sequence[int], x: int) -> int:
    total = 0
    for coefficient in falling:
        total = (total * x + coefficient) % PRIME
    return total


def weights(points: Sequence[int], at: int = 0) -> list[int]:
    """Lagrange's weights for the value at ``at`` of a polynomial known at ``points`` (distinct, from 1)."""
    if len(set(points)) != len(points) or not all(1 <= x <= MOST for x in points):
        raise WireError(f"shares: holders {list(points)[:8]} must be distinct and in 1..{MOST}")
    out = []
    for x in points:
        above = below = 1
        for other in points:
            if other != x:
                above, below = above * (other - at) % PRIME, below * (other - x) % PRIME
        out.append(above * pow(below, -1, PRIME) % PRIME)
    return out


def is_on(share: bytes, shares: Sequence[bytes], scale: Sequence[int]) -> bool:
    """Whether ``share`` is the value of the polynomial through ``shares`` where ``scale`` are its :func:`weights`."""
    total = sum(int.from_bytes(one, "big") * w for one, w in zip(shares, scale, strict=True)) % PRIME
    return share == total.to_bytes(SHARE_BYTES, "big")


def join(shares: Mapping[int, bytes], scale: Sequence[int] | None = None) -> bytes:
    """The secret of as many ``shares`` (by holder, from 1) as its threshold, or more.

    ``scale`` are the :func:`weights` of these holders, where they are known. Raises :class:`WireError` for what are no
    shares, and where they come to no secret of 32 bytes (one of them is wrong).
    """
    for holder, share in shares.items():
        if len(share) != SHARE_BYTES or int.from_bytes(share, "big") >= PRIME:
            raise WireError(f"shares: that of holder {holder} is no element of the field")
    scale = weights(list(shares)) if scale is None else scale
    total = sum(int.from_bytes(share, "big") * w for share, w in zip(shares.values(), scale, strict=True)) % PRIME
    if total >> 256:
        raise WireError("shares: they come to no secret; one of them is wrong")
    return total.to_bytes(SECRET_BYTES, "big")


def wrong_ones(threshold: int, givers: int) -> int:
    """How many wrong shares, wherever they stand, do not keep :func:`choices` from finding as many right ones as must
    be, where ``givers`` could give one."""
    return max(0, min(givers - threshold, 2 if threshold <= PAIRS else 1))


def choices(holders: Sequence[int], threshold: int) -> Iterator[tuple[tuple[int, ...], list[int]]]:
    """Which shares to try, and their :func:`weights`: the first that are enough, then so that each one, and each two,
    were left out once."""
    for wrong in range(wrong_ones(threshold, len(holders)) + 1 if len(holders) >= threshold else 0):
        first = tuple(holders[: threshold + wrong])
        every = _weights(first)
        for out in combinations(first[:-1], wrong):  # without the last one, it was tried before
            over = pow(prod(out), -1, PRIME)
            scale = [w * prod(x - y for x in out) * over % PRIME for y, w in zip(first, every, strict=True)]
            yield (
                tuple(y for y in first if y not in out),
                [w for y, w in zip(first, scale, strict=True) if y not in out],
            )


@lru_cache(maxsize=64)
def _weights(points: tuple[int, ...]) -> list[int]:
    """Of shares in the same places of many secrets."""
    return weights(points)
