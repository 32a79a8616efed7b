"""One step of the coordinator's machine: its state, the time, and the actions gathered so far."""

from __future__ import annotations

from talaria.protocol.actions import Action
from talaria.protocol.coordinator.state import CoordinatorState, Peer


class Turn:
    """Lives for one event only."""

    def __init__(self, state: CoordinatorState, now: float) -> None:
        self.state, self.now = state, now
        self.out: list[Action] = []

    def act(self, *actions: Action) -> None:
        """Add to what is to be done."""
        self.out.extend(actions)

    def known(self, device: str) -> bool:
        """True where this device was heard or asked before."""
        return device in self.state.peers

    def peer(self, device: str) -> Peer:
        """What is known of ``device``; a new entry where nothing is."""
        return self.state.peers.setdefault(device, Peer())

    def bind(self, device: str, key: bytes) -> None:
        """``key`` signed what came from ``device``. A device enrolled anew may have an empty flash: its boots count
        from one again. What was signed by the old key is refused before it comes here, so nothing can be replayed."""
        peer = self.peer(device)
        if peer.key not in (b"", key):
            self.state.peers[device] = peer = Peer(said=peer.said)
        peer.key = key
