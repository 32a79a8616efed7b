"""What a coordinator says: its birth, the global model's manifest, and commands to one device, each sealed in a
frame."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

from talaria.protocol.coordinator.state import GlobalModel, Rules
from talaria.wire import messages as m
from talaria.wire.frames import Header, encode_frame
from talaria.wire.signing import Signer


@dataclass(frozen=True)
class Voice:
    """What one coordinator says, signed where it has a key."""

    fleet: str
    rules: Rules
    spec: bytes
    signer: Signer | None

    def sealed(self, message: m.Message, epoch: int, device: str = "", seq: int = 0) -> bytes:
        """One message as a frame of this epoch."""
        header = Header(message.TYPE, self.fleet, device, boot=epoch, seq=seq)
        return encode_frame(header, m.encode_message(message), self.signer)

    def birth(self, epoch: int, online: bool) -> bytes:
        """The payload of a birth, or of the last will."""
        birth = m.CoordinatorBirth(
            online=online,
            key=b"" if self.signer is None else self.signer.public,
            chunk=self.rules.chunk,
            credit=self.rules.credit,
            max_update=self.rules.max_update,
            retry=self.rules.retry,
            spec=self.spec,
        )
        return self.sealed(birth, epoch)

    def manifest(self, model: GlobalModel) -> m.ModelManifest:
        """What a device must know to fetch ``model``."""
        cut = model.cut
        nonce = sha256(f"{self.fleet}/{model.version}/".encode() + cut.sha256).digest()[:16]
        return m.ModelManifest(
            version=model.version, size=cut.size, chunk=cut.chunk, sha256=cut.sha256, hashes=cut.hashes, nonce=nonce
        )
