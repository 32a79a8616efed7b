"""A device's badge: whose signing key a key is, by the word of the fleet's authority."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgpack

from talaria.errors import WireError
from talaria.foreign import shown
from talaria.wire.signing import KEY_BYTES, SIGNATURE_BYTES, Signer, verified


@dataclass(frozen=True)
class Badge:
    """A device's identity: its Ed25519 public key, and the authority's signature that it is this device's."""

    key: bytes
    proof: bytes = field(repr=False)

    def __post_init__(self) -> None:
        for name, value, size in (("key", self.key, KEY_BYTES), ("proof", self.proof, SIGNATURE_BYTES)):
            if not isinstance(value, bytes) or len(value) != size:
                raise WireError(f"badge: {name} must be {size} bytes, got {shown(value, 20)}")

    @staticmethod
    def issued(authority: Signer, fleet: str, device: str, key: bytes) -> Badge:
        """The badge of ``device``, by the fleet's authority."""
        return Badge(key, authority.sign(_text(fleet, device, key)))

    def genuine(self, authority: bytes, fleet: str, device: str) -> bool:
        """True where the fleet's ``authority`` (public key) issued it for ``device``."""
        return verified(authority, self.proof, _text(fleet, device, self.key))


def _text(fleet: str, device: str, key: bytes) -> bytes:
    packed: bytes = msgpack.packb(["badge", fleet, device, key])
    return b"talaria/secure/1\x00" + packed
