"""One step of the coordinator's machine: its state, the time, its voice, and the actions gathered so far."""

from __future__ import annotations

from talaria.errors import TalariaError
from talaria.protocol.actions import Action, Publish
from talaria.protocol.coordinator.outbox import Voice
from talaria.protocol.coordinator.state import CoordinatorState, Peer, Rules
from talaria.wire import messages as m
from talaria.wire.topics import Topic


class IgnoredError(TalariaError):
    """Refused without holding it against the device: it may not be the author."""


class Turn:
    """Lives for one event only."""

    def __init__(self, voice: Voice, state: CoordinatorState, now: float, relayed: bool = False) -> None:
        """``relayed``: chunks of uploads come to ingest workers."""
        self._voice, self.state, self.now, self.relayed = voice, state, now, relayed
        self.out: list[Action] = []

    @property
    def rules(self) -> Rules:
        """The bounds and times of this fleet."""
        return self._voice.rules

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

    def say(self, device: str, message: m.Message) -> None:
        """One command to one device, numbered within this epoch."""
        peer = self.peer(device)
        peer.said += 1
        payload = self._voice.sealed(message, self.state.epoch, device, peer.said)
        self.act(Publish(str(Topic(self._voice.fleet, "cmd", device)), payload))

    def say_where(self, device: str) -> None:
        """Which global model is there, and how it is cut."""
        if self.state.model is not None:
            self.say(device, self._voice.manifest(self.state.model))

    def announce(self) -> None:
        """The birth and the manifest of the global model, retained."""
        self.state.announced = self.now
        birth = self._voice.birth(self.state.epoch, online=True)
        self.act(Publish(str(Topic(self._voice.fleet, "co/state")), birth, retain=True))
        self.announce_model()

    def announce_model(self) -> None:
        """The manifest of the global model, retained."""
        if self.state.model is not None:
            manifest = self._voice.sealed(self._voice.manifest(self.state.model), self.state.epoch)
            self.act(Publish(str(Topic(self._voice.fleet, "co/model")), manifest, retain=True))
