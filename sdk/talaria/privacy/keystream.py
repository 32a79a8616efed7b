"""Keys and masks from `cryptography`: X25519 (RFC 7748), HKDF-SHA256 (RFC 5869), ChaCha20 and its AEAD (RFC 8439).

A mask is the key stream of ChaCha20 under a key of its own (nonce and counter from zero), read as little-endian
unsigned numbers: uniform modulo 2^16 or 2^32, whatever was added to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from talaria.errors import WireError
from talaria.tensors import Array

KEY_BYTES = 32
DOMAIN = b"talaria/secure/1\x00"
"""What every key and every signed word of this protocol is derived or hashed with."""
_STRETCH = memoryview(bytes(1 << 16))
"""Zeros to encrypt at once; they, what comes out, and what it is added to stay in the second cache."""


def derived(secret: bytes, salt: bytes, *purpose: bytes | str) -> bytes:
    """A key of 32 bytes for one ``purpose``, by HKDF-SHA256. The parts of a purpose are told apart by their lengths."""
    parts = [part.encode() if isinstance(part, str) else part for part in purpose]
    info = DOMAIN + b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return HKDF(hashes.SHA256(), KEY_BYTES, salt, info).derive(secret)


def public_of(secret: bytes) -> bytes:
    """The public half of an X25519 key."""
    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def agreeing(secret: bytes) -> Callable[[bytes], bytes]:
    """By another's public key, what the two alone know; of one ``secret`` for many, as to read it costs as much as to
    agree. Raises :class:`WireError`, when it is called, for a public key of low order, which anybody would know."""
    key = X25519PrivateKey.from_private_bytes(secret)

    def agree(public: bytes) -> bytes:
        try:
            return key.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError:
            raise WireError(
                "secure: a device's public key is no X25519 key, or one that anybody can agree with"
            ) from None

    return agree


def stream(key: bytes, count: int, dtype: np.dtype[Any]) -> Array:
    """``count`` numbers of ``dtype`` (unsigned), the key stream of ``key``; never twice under one key."""
    return summed([(key, True)], count, dtype)


def summed(keys: Sequence[tuple[bytes, bool]], count: int, dtype: np.dtype[Any]) -> Array:
    """The sum of the key streams of ``keys`` modulo the dtype, where True adds and False subtracts."""
    total = np.zeros(count, dtype)
    mask(total, keys)
    return total


def mask(total: Array, keys: Sequence[tuple[bytes, bool]]) -> None:
    """Add the sum of the key streams of ``keys`` to ``total`` (contiguous), in place and modulo its dtype.

    All streams go forward together, so that what is added is still in the cache."""
    count, dtype = len(total), total.dtype
    if not count:
        return
    nothing = bytes(16)  # counter and nonce
    running = [
        (Cipher(algorithms.ChaCha20(key, nothing), mode=None).encryptor().update_into, np.add if plus else np.subtract)
        for key, plus in keys
    ]
    numbers = np.empty(min(count, len(_STRETCH) // dtype.itemsize), dtype.newbyteorder("<"))
    for start in range(0, count, len(numbers)):
        part = total[start : start + len(numbers)]
        numbers = numbers[: len(part)]  # shorter the last time
        room = numbers.data.cast("B")
        zeros = _STRETCH[: len(room)]
        for expand, add in running:
            expand(zeros, room)
            add(part, numbers, part)


def sealed(key: bytes, plain: bytes, context: bytes) -> bytes:
    """``plain`` so that the holder of ``key`` alone reads it; ``key`` must be of this one message alone."""
    return ChaCha20Poly1305(key).encrypt(bytes(12), plain, context)


def unsealed(key: bytes, box: bytes, context: bytes) -> bytes:
    """What :func:`sealed` was given. Raises :class:`WireError` where the box was altered or is another's."""
    try:
        return ChaCha20Poly1305(key).decrypt(bytes(12), box, context)
    except InvalidTag:
        raise WireError("secure: a sealed share was altered on its way, or is meant for another") from None
