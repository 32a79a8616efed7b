"""What a coordinator says: its birth, the body's manifest, and commands to one device, each sealed in a frame."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

from talaria.protocol import actions as a
from talaria.protocol.coordinator.state import CoordinatorState, GlobalModel, Rules
from talaria.protocol.coordinator.step_context import Turn
from talaria.wire import messages as m
from talaria.wire.frames import Header, encode_frame
from talaria.wire.signing import Signer
from talaria.wire.topics import Topic


@dataclass(frozen=True)
class Speech:
    """The coordinator's voice; signed where it has a key."""

    fleet: str
    rules: Rules
    spec: bytes
    signer: Signer | None

    def say(self, t: Turn, device: str, message: m.Message) -> None:
        """One command to one device, numbered within this epoch."""
        peer = t.peer(device)
        peer.said += 1
        header = Header(message.TYPE, self.fleet, device, boot=t.state.epoch, seq=peer.said)
        payload = encode_frame(header, m.encode_message(message), self.signer)
        t.act(a.Publish(str(Topic(self.fleet, "cmd", device)), payload))

    def announce(self, t: Turn) -> None:
        """The birth and the body's manifest, retained."""
        t.state.announced = t.now
        t.act(a.Publish(str(Topic(self.fleet, "co/state")), self.birth(t.state, online=True), retain=True))
        self.announce_body(t)

    def announce_body(self, t: Turn) -> None:
        """The manifest of the current body, retained."""
        if t.state.body is None:
            return
        header = Header(m.ModelManifest.TYPE, self.fleet, boot=t.state.epoch)
        payload = encode_frame(header, m.encode_message(self.manifest(t.state.body)), self.signer)
        t.act(a.Publish(str(Topic(self.fleet, "co/body")), payload, retain=True))

    def birth(self, state: CoordinatorState, online: bool) -> bytes:
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
        return encode_frame(Header(birth.TYPE, self.fleet, boot=state.epoch), m.encode_message(birth), self.signer)

    def manifest(self, body: GlobalModel) -> m.ModelManifest:
        """What a device must know to fetch ``body``."""
        cut = body.cut
        nonce = sha256(f"{self.fleet}/{body.version}/".encode() + cut.sha256).digest()[:16]
        return m.ModelManifest(
            version=body.version, size=cut.size, chunk=cut.chunk, sha256=cut.sha256, hashes=cut.hashes, nonce=nonce
        )
