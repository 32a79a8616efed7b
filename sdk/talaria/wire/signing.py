"""Ed25519 signatures over frames: who wrote this, whatever broker carried it.

cryptography is loaded with the first key: a program of a fleet without keys does not carry it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from talaria.errors import ConfigError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

SIGNATURE_BYTES = 64
KEY_BYTES = 32
_DOMAIN = b"talaria/frame/1\x00"


class Signer:
    """A private key that signs and never shows itself: ``repr`` tells the public half only.

    >>> Signer.of(bytes(32)).public.hex()[:8]
    '3b6a27bc'
    """

    def __init__(self, key: Ed25519PrivateKey) -> None:
        from cryptography.hazmat.primitives import serialization

        self._key = key
        raw = serialization.Encoding.Raw
        self.public: bytes = key.public_key().public_bytes(raw, serialization.PublicFormat.Raw)

    @classmethod
    def generate(cls) -> Signer:
        """A new key from the operating system's random source."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def of(cls, seed: bytes) -> Signer:
        """The key of a stored 32-byte seed."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        if len(seed) != KEY_BYTES:
            raise ConfigError(f"signing key has {len(seed)} bytes; an Ed25519 seed has {KEY_BYTES}")
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    def seed(self) -> bytes:
        """The 32 secret bytes, for a file that only its owner can read."""
        from cryptography.hazmat.primitives import serialization

        encoding, plain = serialization.Encoding.Raw, serialization.NoEncryption()
        return self._key.private_bytes(encoding, serialization.PrivateFormat.Raw, plain)

    def sign(self, data: bytes) -> bytes:
        """64 bytes over ``data``."""
        return self._key.sign(_DOMAIN + data)

    def __repr__(self) -> str:
        return f"Signer(public={self.public.hex()})"


def verified(public: bytes, signature: bytes, data: bytes) -> bool:
    """True where the holder of ``public`` (32 bytes) signed ``data``."""
    if len(signature) != SIGNATURE_BYTES or len(public) != KEY_BYTES:
        return False
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, _DOMAIN + data)
    except (InvalidSignature, ValueError):
        return False
    return True
