"""The web server of a coordinator, on a thread of its own: neither requests nor learning wait for each other."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EADDRINUSE

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from talaria.errors import ConfigError, StateError
from talaria.wire.broker_url import at
from talaria_coordinator.config.api import ApiConfig
from talaria_coordinator.web.connection_limits import Door, Places

START_S = 20.0
BACKLOG = 64


@contextmanager
def listening(config: ApiConfig, places: Places | None = None) -> Iterator[Door]:
    """A socket bound as ``config`` says. Raises :class:`ConfigError` where the port or address cannot be had."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        sock = Door(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"api: host={config.host!r} cannot be used here ({error.strerror})") from None
    sock.places = places or Places()
    with sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((config.host, config.port))
            sock.listen(BACKLOG)
        except OSError as error:
            mend = "stop the program that has the port, or give [api] another port (0: any free one)"
            if error.errno != EADDRINUSE:
                mend = "[api] host must be an address of this machine, and port one that this user may open, above 1023"
            raise ConfigError(
                f"api: cannot listen on {at(config.host, config.port)} ({error.strerror}); {mend}"
            ) from None
        yield sock


def url_of(config: ApiConfig, sock: socket.socket) -> str:
    """Where a browser finds it."""
    return f"{'https' if config.cert else 'http'}://{at(config.host, sock.getsockname()[1])}"


@contextmanager
def serving(app: ASGIApp, config: ApiConfig, sock: Door) -> Iterator[None]:
    """Answer requests while the block runs. How many may be here, and for how long, is the door's to say."""

    async def in_place(scope: Scope, receive: Receive, send: Send) -> None:
        with sock.places.answering(scope["client"]):
            await app(scope, receive, send)

    settings = uvicorn.Config(
        in_place,
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        h11_max_incomplete_event_size=32 * 1024,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=2,
        ssl_certfile=config.cert,
        ssl_keyfile=config.key,
        ssl_keyfile_password="none",  # OpenSSL would ask a terminal for that of a key that has one, and wait
    )
    try:
        settings.load()
    except OSError as error:
        raise ConfigError(
            f"api: cert={str(config.cert)!r} and key={str(config.key)!r} do not serve ({error}); give PEM files "
            "that belong together, the key without a passphrase"
        ) from None
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])), name="api", daemon=True)
    thread.start()
    try:
        _wait_until_started(server, thread)
        yield
    finally:
        server.should_exit = True
        thread.join(5)


def _wait_until_started(server: uvicorn.Server, thread: threading.Thread) -> None:
    waited = 0.0
    while not server.started:
        thread.join(0.02)
        waited += 0.02
        if not thread.is_alive() or waited > START_S:
            raise StateError("api: the web server did not start; look at the log, or leave [api] out for now")
