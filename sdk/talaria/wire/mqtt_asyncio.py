"""An MQTT client driven by the event loop instead of a thread of its own: for many light clients in one process."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, Protocol

MISC_S = 1.0


class Client(Protocol):
    """What of paho's client is used here; each returns an error code that the client's own callbacks tell better."""

    on_socket_close: Any
    on_socket_register_write: Any
    on_socket_unregister_write: Any

    def socket(self) -> Any: ...
    def loop_read(self) -> Any: ...
    def loop_write(self) -> Any: ...
    def loop_misc(self) -> Any: ...
    def want_write(self) -> bool: ...


class Pump:
    """Reads and writes ``client`` in the running event loop, from :meth:`start` to :meth:`stop`."""

    def __init__(self, client: Client) -> None:
        self._client, self._loop = client, asyncio.get_running_loop()
        self._socket: socket.socket | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin; the client has connected its socket."""
        client, own = self._client, self._client.socket()
        self._socket = own
        client.on_socket_register_write = lambda *_: self._loop.add_writer(own, client.loop_write)
        client.on_socket_unregister_write = lambda *_: self._loop.remove_writer(own)
        client.on_socket_close = lambda *_: self.stop()
        self._loop.add_reader(own, self._readable, own)
        if client.want_write():
            self._loop.add_writer(own, client.loop_write)
        self._misc()

    def _readable(self, own: Any) -> None:
        self._client.loop_read()
        # What TLS has taken in already, no selector sees.
        while own is self._socket and getattr(own, "pending", int)():
            self._client.loop_read()

    def _misc(self) -> None:
        """Keep-alive."""
        self._timer = self._loop.call_later(MISC_S, self._misc)
        self._client.loop_misc()

    def stop(self) -> None:
        """Let go of the socket; it may be called again."""
        if self._timer is not None:
            self._timer.cancel()
        if self._socket is not None and self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
        self._socket = self._timer = None
