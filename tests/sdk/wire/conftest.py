"""Real brokers on free loopback ports."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Mosquitto:
    """A Mosquitto process that a test may kill and start again."""

    def __init__(self, folder: Path, lines: str = "allow_anonymous true", scheme: str = "mqtt") -> None:
        self.port = free_port()
        self.url = f"{scheme}://127.0.0.1:{self.port}"
        self._config = folder / "mosquitto.conf"
        self._config.write_text(
            f"listener {self.port} 127.0.0.1\npersistence false\nuser root\nlog_type error\n{lines}\n"
        )
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        binary = shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")
        assert binary is not None, "install mosquitto (apt-get install mosquitto) to run the tests"
        self._process = subprocess.Popen([binary, "-c", str(self._config)])
        wait_for(self.port)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


AMQTT = """
import asyncio, sys
from amqtt.broker import Broker

async def main():
    await Broker({
        "listeners": {"default": {"type": sys.argv[1], "bind": "127.0.0.1:" + sys.argv[2]}},
        "plugins": {"amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True}},
    }).start()
    await asyncio.Event().wait()

asyncio.run(main())
"""


class Amqtt:
    """amqtt in a process of its own; MQTT 3.1.1 only."""

    def __init__(self, kind: str = "tcp", port: int = 0) -> None:
        self.port, self._kind = port or free_port(), kind
        self.url = f"{'ws' if kind == 'ws' else 'mqtt'}://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [sys.executable, "-c", AMQTT, self._kind, str(self.port)]
        self._process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        wait_for(self.port)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def wait_for(port: int) -> None:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.5):
            return
        time.sleep(0.02)
    raise AssertionError(f"no broker on port {port} after 20 s")


@pytest.fixture
def mosquitto(tmp_path: Path) -> Iterator[Mosquitto]:
    broker = Mosquitto(tmp_path)
    try:
        broker.start()
        yield broker
    finally:
        broker.kill()


@pytest.fixture(params=["mosquitto", "amqtt"])
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Mosquitto | Amqtt]:
    found = Mosquitto(tmp_path) if request.param == "mosquitto" else Amqtt()
    found.start()
    yield found
    found.kill()


@pytest.fixture
def amqtt_websocket() -> Iterator[Amqtt]:
    found = Amqtt("ws")
    found.start()
    yield found
    found.kill()


@pytest.fixture
def make_amqtt() -> Iterator[object]:
    started: list[Amqtt] = []

    def make(port: int) -> Amqtt:
        started.append(Amqtt(port=port))
        started[-1].start()
        return started[-1]

    yield make
    for one in started:
        one.kill()


@pytest.fixture
def make_mosquitto(tmp_path: Path) -> Iterator[object]:
    started: list[Mosquitto] = []

    def make(lines: str, scheme: str = "mqtt") -> Mosquitto:
        broker = Mosquitto(tmp_path, lines, scheme)
        started.append(broker)
        broker.start()
        return broker

    yield make
    for one in started:
        one.kill()


@pytest.fixture
def unused_port() -> int:
    return free_port()
