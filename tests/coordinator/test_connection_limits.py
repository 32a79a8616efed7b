"""Connections that say nothing, before any token, do not turn the health check, the metrics or the dashboard off."""

import socket
import ssl
import threading
from contextlib import ExitStack, contextmanager

import httpx
import pytest

from talaria_coordinator.cli.template import found
from talaria_coordinator.config.api import ApiConfig
from talaria_coordinator.storage.store import Store
from talaria_coordinator.web.api import ANSWER_S, make_api
from talaria_coordinator.web.connection_limits import BUSY_S, PLACES, Places
from talaria_coordinator.web.queries import Views
from talaria_coordinator.web.server import listening, serving, url_of

NEVER = 3600.0


@pytest.fixture
def views(tmp_path):
    Store(tmp_path / "coordinator.db").close()
    views = Views(tmp_path / "coordinator.db")
    yield views
    views.close()


@contextmanager
def open_door(app, places=None, **options):
    config = ApiConfig(port=0, **options)
    with listening(config, places) as sock, serving(app, config, sock):
        yield url_of(config, sock), sock.getsockname()


def silent(stack, address, count, source="127.0.0.1"):
    return [
        stack.enter_context(socket.create_connection(address, timeout=20, source_address=(source, 0)))
        for _ in range(count)
    ]


def test_silent_connections_do_not_turn_the_health_check_off(views):
    with open_door(make_api(views, metrics=lambda: b"x 1\n")) as (url, address), ExitStack() as stack:
        silent(stack, address, 4 * PLACES)
        assert [httpx.get(url + path, timeout=20).status_code for path in ("/healthz", "/metrics", "/")] == [200] * 3
        silent(stack, address, 4 * PLACES)
        assert httpx.get(url + "/healthz", timeout=20).json() == {"status": "ok"}


def test_nor_do_those_that_begin_a_request_and_never_end_it(views):
    with open_door(make_api(views)) as (url, address), ExitStack() as stack:
        for raw in silent(stack, address, 2 * PLACES):
            raw.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ")
        assert httpx.get(url + "/healthz", timeout=20).status_code == 200


def test_nor_those_that_never_begin_tls(views, tmp_path):
    found(tmp_path / "keys", "watch", ["localhost"], 8883, 1)
    server, ca = tmp_path / "keys" / "broker" / "server", tmp_path / "keys" / "ca.crt"
    files = {"cert": server.with_suffix(".crt"), "key": server.with_suffix(".key")}
    with open_door(make_api(views), **files) as (url, address), ExitStack() as stack:
        silent(stack, address, 4 * PLACES)
        trust = ssl.create_default_context(cafile=ca)
        assert httpx.get(url + "/healthz", timeout=20, verify=trust).status_code == 200


def test_an_order_that_takes_too_long_is_answered_before_its_connection_is_put_out(views, monkeypatch, tmp_path):
    """Both had sixty seconds, and the second came first: who asked was told nothing."""
    with Store(tmp_path / "coordinator.db") as store:
        store.fleets.enter("watch", '{"rounds": 3}', "a" * 64, "b" * 64)
    monkeypatch.setattr("talaria_coordinator.web.api.ANSWER_S", ANSWER_S / 60)
    app = make_api(views, give={"watch": lambda order: None})
    with open_door(app, Places(busy_s=BUSY_S / 60)) as (url, _):
        assert httpx.post(f"{url}/api/v1/fleets/watch/pause", timeout=20).status_code == 503


@pytest.mark.parametrize(
    "said", [b"", b"GET / HTTP/1.1\r\nX-Slow: ", b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"]
)
def test_a_connection_without_a_request_is_closed_after_a_while(views, said):
    """Also one whose first request was answered, and that then sends the beginning of another one."""
    with (
        open_door(make_api(views), Places(idle_s=0.3)) as (_, address),
        socket.create_connection(address, timeout=20) as raw,
    ):
        raw.sendall(said + b"GET / HTTP/1.1\r\nX-Slow: " if said.endswith(b"\r\n\r\n") else said)
        heard = b""
        while more := raw.recv(4096):  # it would time out where the server did not close
            heard += more
        assert heard.startswith(b"HTTP/1.1 200") == said.endswith(b"\r\n\r\n")


def test_a_request_that_is_being_answered_keeps_its_place(views):
    held, free = threading.Event(), threading.Event()

    def slow():
        held.set()
        assert free.wait(60)
        return b"x 1\n"

    with open_door(make_api(views, metrics=slow), Places(idle_s=NEVER)) as (url, address), ExitStack() as stack:
        answers = []
        asking = threading.Thread(target=lambda: answers.append(httpx.get(url + "/metrics", timeout=60).text))
        asking.start()
        assert held.wait(20)
        silent(stack, address, 4 * PLACES)
        assert httpx.get(url + "/healthz", timeout=20).status_code == 200
        free.set()
        asking.join(60)
        assert answers == ["x 1\n"]


def test_who_holds_most_places_loses_one_first(views):
    with open_door(make_api(views), Places(idle_s=NEVER)) as (url, address), ExitStack() as stack:
        (quiet,) = silent(stack, address, 1)
        silent(stack, address, 4 * PLACES, source="127.0.0.2")
        assert httpx.get(url + "/healthz", timeout=20).status_code == 200
        quiet.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert quiet.recv(4096).startswith(b"HTTP/1.1 200")


def test_an_answer_that_nobody_takes_gives_up_its_place(views):
    free = threading.Event()

    def never():
        free.wait(30)
        return b""

    try:
        with (
            open_door(make_api(views, metrics=never), Places(busy_s=0.3)) as (_, address),
            socket.create_connection(address, timeout=20) as raw,
        ):
            raw.sendall(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert raw.recv(100) == b""
            free.set()
    finally:
        free.set()
