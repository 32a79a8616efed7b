"""What a coordinator answers to a device that asks for what it keeps of the global model, or what changed of that."""

from __future__ import annotations

from hashlib import sha256

from talaria.protocol import actions as a
from talaria.protocol import events as e
from talaria.protocol.coordinator.step_context import IgnoredError, Turn
from talaria.wire import messages as m
from talaria.wire.chunks import Cut

MASKS = 4
"""So many different answers to one device are made of one model: an honest one changes its mind once at most."""


def serve(t: Turn, device: str, want: m.WantCompact) -> None:
    """Answer ``want``: by the manifest, or by having it made. Who asks for another model is told which one there is."""
    model, peer = t.state.model, t.peer(device)
    if model is None:
        return
    if want.model_digest != model.cut.sha256:
        peer.served += len(model.cut.hashes)
        t.say_where(device)
        return
    cut = t.state.compacts.get(_key(want))
    if cut is not None:
        _tell(t, device, model.cut.sha256, cut)
        return
    if peer.masks >= MASKS:
        raise IgnoredError(f"asked for {MASKS} different parts of one global model; a device has one")
    peer.masks += 1
    t.act(a.CompactAsked(device, want))


def made(t: Turn, event: e.CompactMade) -> None:
    """It is there: tell those who asked. Where it is none, they take the whole model."""
    model = t.state.model
    if model is None or model.cut.sha256 != event.want.model_digest:
        return  # replaced meanwhile; whoever needs the new one asks for it
    cut = t.state.compacts[_key(event.want)] = event.cut or model.cut
    for device in event.devices:
        _tell(t, device, model.cut.sha256, cut)


def cut_named(t: Turn, digest: bytes) -> Cut | None:
    """The cut of the global model, or of a part of it, that has this sha256; None for what is not there."""
    model = t.state.model
    if model is None or model.cut.sha256 == digest:
        return None if model is None else model.cut
    return next((cut for cut in t.state.compacts.values() if cut.sha256 == digest), None)


def _key(want: m.WantCompact) -> bytes:
    return sha256(m.encode_message(want)).digest()


def _tell(t: Turn, device: str, of: bytes, cut: Cut) -> None:
    t.peer(device).served += len(cut.hashes)
    nonce = sha256(b"compact/" + of + cut.sha256).digest()[:16]
    manifest = m.CompactManifest(
        of=of, size=cut.size, chunk=cut.chunk, sha256=cut.sha256, hashes=cut.hashes, nonce=nonce
    )
    t.say(device, manifest)
