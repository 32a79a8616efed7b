"""How a device gets its run's kit: it asks for it, and it comes as a global model does, a window at a time.

What is remembered here is of one life: after a restart the program asks again, and says what lies on flash.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from talaria.errors import WireError
from talaria.protocol import actions as a
from talaria.protocol import events as e
from talaria.protocol.transfer import Receiver, transfer_of
from talaria.wire import messages as m
from talaria.wire.chunks import cut_of
from talaria.wire.frames import Frame

Say = Callable[[m.Message], None]


@dataclass
class KitFetch:
    """A kit on its way: ``receiver`` once its manifest is known, and when it was asked for last."""

    receiver: Receiver | None = None
    asked: float = -1e18

    @property
    def transfer(self) -> str:
        """The name of its transfer, empty while that is not known."""
        return "" if self.receiver is None else transfer_of(self.receiver.cut.sha256)


def ask(fetch: KitFetch, now: float, credit: int, say: Say, again: bool = False) -> None:
    """Ask for the manifest, or for the chunks that are missing; ``again`` for all of them once more."""
    if fetch.receiver is None:
        fetch.asked = now
        say(m.WantKit(sha256=b"", bitmap=b""))
    elif bitmap := fetch.receiver.window(now, credit, again):
        say(m.WantKit(sha256=fetch.receiver.cut.sha256, bitmap=bitmap))


def announced(fetch: KitFetch, device: str, manifest: m.KitManifest, now: float) -> list[a.Action]:
    """Take the manifest; one that is known already changes nothing."""
    cut = cut_of(manifest)
    if fetch.receiver is not None and fetch.receiver.cut == cut:
        return []
    before = [] if fetch.receiver is None else [a.Discard(device, fetch.transfer)]
    fetch.receiver = Receiver(cut, touched=now, moved=now)
    return [*before, a.KitBegun(fetch.transfer, cut)]


def found(fetch: KitFetch, event: e.KitFound, credit: int, say: Say) -> list[a.Action]:
    """Go on from what lies intact on flash."""
    receiver = fetch.receiver
    if receiver is None or receiver.cut.sha256 != event.sha256:
        return []
    receiver.have, receiver.asked = set(event.chunks), set()
    if receiver.whole:
        return [a.KitComplete(fetch.transfer, receiver.cut)]
    ask(fetch, event.now, credit, say, again=True)
    return []


def took(fetch: KitFetch, device: str, frame: Frame, now: float, credit: int, say: Say) -> list[a.Action]:
    """One chunk of it. Raises :class:`~talaria.errors.WireError` for a wrong one."""
    receiver = fetch.receiver
    if receiver is None:
        raise WireError(f"chunk of transfer {frame.header.xfer!r}, which was not asked for")
    if receiver.whole or not receiver.take(frame, now):
        return []
    keep = a.KeepChunk(device, frame.header.xfer, receiver.cut, frame.header.idx, frame.payload)
    if receiver.whole:
        return [keep, a.KitComplete(fetch.transfer, receiver.cut)]
    ask(fetch, now, credit, say)
    return [keep]


def tick(fetch: KitFetch, now: float, wait: float, credit: int, say: Say) -> None:
    """Ask again where nothing came for ``wait`` seconds, or as long as a chunk may take."""
    receiver = fetch.receiver
    if now - fetch.asked >= wait if receiver is None else receiver.overdue(now, wait):
        ask(fetch, now, credit, say, again=True)
