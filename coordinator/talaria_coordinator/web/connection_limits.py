"""Limits on the connections of the web server: how many there may be, and how long each may take.

A connection that says nothing costs its maker nothing. So there is no fixed number of places that strangers could take:
where all are taken, whoever holds most of them loses the one that has been idle longest. Connections that a request is
being answered on go last.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

PLACES = 64
IDLE_S = 10.0
"""Seconds within which a connection must have shown a request's head; TLS included, and again after each answer."""
BUSY_S = 60.0
"""Seconds within which a request must be answered and its answer taken."""

_Who = tuple[str, int]


@dataclass(eq=False)
class _Guest:
    sock: socket.socket
    host: str
    since: float
    answering: bool = False


@dataclass(eq=False)
class Places:
    """All open connections, by peer address; used in one event loop only."""

    places: int = PLACES
    idle_s: float = IDLE_S
    busy_s: float = BUSY_S
    _guests: dict[_Who, _Guest] = field(default_factory=dict, init=False)

    def enter(self, sock: socket.socket, peer: Sequence[Any]) -> None:
        """A connection from ``peer`` (host, port, ...) was accepted."""
        self._guests = {who: guest for who, guest in self._guests.items() if guest.sock.fileno() >= 0}
        while len(self._guests) >= self.places:
            self._put_out(self._most_dispensable())
        guest = _Guest(sock, str(peer[0]), _now())
        self._guests[_who(peer)] = guest
        self._look_again(_who(peer), guest, self.idle_s)

    @contextmanager
    def answering(self, peer: Sequence[Any]) -> Iterator[None]:
        """A request of ``peer`` is answered while the block runs."""
        who = _who(peer)
        guest = self._guests.get(who)
        if guest is None:  # it was put out meanwhile
            yield
            return
        guest.since, guest.answering = _now(), True
        self._look_again(who, guest, self.busy_s)
        try:
            yield
        finally:
            guest.since, guest.answering = _now(), False
            self._look_again(who, guest, self.idle_s)

    def _most_dispensable(self) -> _Who:
        idle = {who: guest for who, guest in self._guests.items() if not guest.answering} or self._guests
        held = Counter(guest.host for guest in self._guests.values())
        return min(idle, key=lambda who: (-held[idle[who].host], idle[who].since))

    def _look_again(self, who: _Who, guest: _Guest, after: float) -> None:
        asyncio.get_running_loop().call_later(after, self._overdue, who, guest, guest.since)

    def _overdue(self, who: _Who, guest: _Guest, since: float) -> None:
        if self._guests.get(who) is guest and guest.since == since:
            self._put_out(who)

    def _put_out(self, who: _Who) -> None:
        # The server's own transport reads the end of the connection, and closes it.
        with suppress(OSError):
            self._guests.pop(who).sock.shutdown(socket.SHUT_RDWR)


class Door(socket.socket):
    """A listening socket whose connections are entered in ``places`` as they are accepted."""

    places: Places

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection; it has its place."""
        sock, peer = super().accept()
        self.places.enter(sock, peer)
        return sock, peer


def _who(peer: Sequence[Any]) -> _Who:
    return str(peer[0]), int(peer[1])


def _now() -> float:
    return asyncio.get_running_loop().time()
