"""What a coordinator answers to a device that asks for the run's kit."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

from talaria.bitmaps import indices_of
from talaria.errors import WireError
from talaria.protocol import actions as a
from talaria.protocol.coordinator.step_context import IgnoredError, Turn
from talaria.protocol.transfer import transfer_of
from talaria.wire import messages as m
from talaria.wire.chunks import Cut


@dataclass(frozen=True)
class KitOffer:
    """What there is: the kit as it is cut, or ``without``, why there is none; neither while that is not known."""

    cut: Cut | None = None
    without: str = ""

    @property
    def size(self) -> int:
        """Bytes of the kit; 0 without one."""
        return 0 if self.cut is None else self.cut.size


def serve(t: Turn, fleet: str, device: str, offer: KitOffer, want: m.WantKit) -> None:
    """Answer ``want``: by the manifest, by chunks, or by why there is none. What is not known yet is asked for, and
    answered when the device asks again."""
    cut, peer = offer.cut, t.peer(device)
    if cut is None:
        if offer.without:
            t.say(device, m.NoKit(reason=offer.without[: m.MAX_TEXT]))
        else:
            t.act(a.KitAsked(device))
        return
    whole = offer.size + (0 if t.state.model is None else t.state.model.cut.size)
    if peer.served > t.rules.serve * whole + t.rules.credit * t.rules.chunk:
        raise IgnoredError(f"asked for more than {t.rules.serve} times the kit and the model; it gets more each minute")
    chunks: list[int] = []
    if want.sha256 == cut.sha256 and want.bitmap:
        try:
            chunks = sorted(indices_of(want.bitmap, cut.count))[: t.rules.credit]
        except WireError:  # it knows the same kit by another cut, from before we began
            chunks = []
    if not chunks:
        peer.served += len(cut.hashes)
        nonce = sha256(f"{fleet}/kit/".encode() + cut.sha256).digest()[:16]
        t.say(device, m.KitManifest(size=cut.size, chunk=cut.chunk, sha256=cut.sha256, hashes=cut.hashes, nonce=nonce))
        return
    peer.served += sum(cut.place(i)[1] for i in chunks)
    name = transfer_of(cut.sha256)
    t.act(a.SendChunks(fleet, device, name, t.state.epoch, 0, cut, tuple(chunks), "dn"))
