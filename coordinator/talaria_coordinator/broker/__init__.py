"""A broker to talk through: the URL given, else a managed Mosquitto child, else amqtt in this process.

The broker is a cache and a wire, never a store: everything that matters is kept by the coordinator and told
again, so a broker may be killed at any time.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pwd
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from errno import EADDRINUSE
from functools import partial
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from talaria import durable
from talaria.errors import ConfigError, StateError, TransportError, so_that_it_can_be_written
from talaria.foreign import shown
from talaria.wire.broker_url import at
from talaria.wire.chunks import CHUNK
from talaria_coordinator.broker import mosquitto
from talaria_coordinator.broker.open_files import make_room
from talaria_coordinator.broker.supervisor import STOP_SECONDS, Keeper

logger = logging.getLogger(__name__)

Kind = Literal["url", "mosquitto", "amqtt"]
SCHEMES = ("mqtt", "mqtts", "ws", "wss")
START_SECONDS = 10.0


@dataclass(frozen=True)
class Broker:
    """A broker that answers at ``url``. ``log`` is its log file and ``process`` tells its process, where it is ours and
    kept running; ``reload`` makes it read the list of who may say what again, and ``tend`` is :meth:`Keeper.tend`."""

    url: str
    kind: Kind
    log: Path | None = None
    process: Callable[[], int | None] = lambda: None
    reload: Callable[[], None] = lambda: None
    tend: Callable[[bool], list[str]] = lambda failing: []

    @property
    def pid(self) -> int | None:
        """The broker's process just now, where it is ours."""
        return self.process()


def find_mosquitto() -> Path | None:
    """The Mosquitto binary, or None. Debian keeps it in /usr/sbin, which a user's PATH lacks."""
    search = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin", "/opt/homebrew/sbin"])
    found = shutil.which("mosquitto", path=search)
    return Path(found) if found else None


@contextmanager
def open_broker(
    choice: str = "auto",
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    state: Path | None = None,
    security: Path | None = None,
    devices: int = 16,
    chunk: int = CHUNK,
) -> Iterator[Broker]:
    """A broker for the time of the ``with`` block.

    ``choice`` is ``"auto"``, ``"mosquitto"``, ``"amqtt"`` or a URL. ``port`` 0 is a free one, the same again after
    a restart with the same ``state``: the folder for config, log and persistence (a temporary one where None).
    ``security`` is a folder of keys and lists (:mod:`talaria_coordinator.broker.mosquitto`) for a broker of TLS links
    only; Mosquitto alone can do that. ``devices`` is how many are expected, ``chunk`` the bytes that a message carries.
    Raises :class:`~talaria.errors.TransportError` where the port is taken or the broker does not start, and
    :class:`~talaria.errors.ConfigError` for an unknown choice, or where so many may not connect.
    """
    if "://" in choice:
        yield Broker(checked_url(choice), "url")
        return
    if choice not in ("auto", "mosquitto", "amqtt"):
        raise ConfigError(f"broker={choice!r} is unknown; use 'auto', 'mosquitto', 'amqtt' or a URL mqtt://host:1883")
    if not 0 <= port <= 65535:
        raise ConfigError(f"broker port={port} must be 0 (a free one) or 1..65535")
    binary = None if choice == "amqtt" else find_mosquitto()
    if security is not None and binary is None:
        raise ConfigError(
            f"broker={choice!r}: a fleet with keys needs Mosquitto here; run `apt install mosquitto`, or give the URL "
            "of a broker with TLS"
        )
    if choice == "mosquitto" and binary is None:
        raise TransportError("broker='mosquitto': no such binary; run `apt install mosquitto`, or use broker='auto'")
    make_room(devices)
    with _folder(state) as folder:
        wanted = port or _remembered(host, folder)
        own = partial(mosquitto.config, devices=devices, chunk=chunk)
        with _mosquitto(binary, host, wanted, folder, security, own) if binary else _amqtt(host, wanted) as broker:
            with _writing(folder):
                durable.write(folder / "port", str(urlsplit(broker.url).port).encode(), mode=0o666)
            yield broker


def checked_url(url: str) -> str:
    """``url`` itself where it names a broker, else :class:`~talaria.errors.ConfigError`."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in SCHEMES and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        good = False
    if not good:
        raise ConfigError(f"broker url {shown(url)} is not one; write mqtt://host:1883 or mqtts://host:8883")
    return url


@contextmanager
def _folder(state: Path | None) -> Iterator[Path]:
    if state is not None:
        try:
            state.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StateError(
                f"broker: cannot make {state}: {error.strerror}; give a folder that can be written"
            ) from None
        yield state
        return
    with tempfile.TemporaryDirectory(prefix="talaria-broker-") as name:
        yield Path(name)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """What the disk refuses of the broker's files, as a :class:`~talaria.errors.StateError`."""
    try:
        yield
    except OSError as error:
        file, mend = error.filename2 or error.filename or folder, so_that_it_can_be_written(error)
        raise StateError(f"broker: {file} cannot be written ({error.strerror}); {mend}") from None


def _remembered(host: str, folder: Path) -> int:
    """The port that an earlier start found free, so that devices find the broker again; 0 where it is lost."""
    text = ""
    with suppress(OSError, UnicodeDecodeError):
        text = durable.read(folder / "port", 6).decode()
    if not text.isdecimal() or not 0 < int(text) <= 65535:
        return 0
    try:
        _require_port(host, int(text))
    except TransportError:
        logger.warning("broker: port %s of the last start is taken now; another one is used", text)
        return 0
    return int(text)


def _listening(host: str, port: int) -> socket.socket:
    """A socket there. Raises OSError where the port is taken, else :class:`TransportError`."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        if error.errno == EADDRINUSE:
            raise
        raise TransportError(
            f"broker: {at(host, port)} cannot be opened ({error.strerror}); [broker] host must be an address of this "
            "machine, and port one that this user may open, as any above 1023"
        ) from None


def _free_port(host: str) -> int:
    with _listening(host, 0) as probe:
        return int(probe.getsockname()[1])


def _require_port(host: str, port: int, patience: float = 3.0) -> None:
    """Raise where the port is taken. Waits a little: a broker of a coordinator just killed may still be leaving."""
    end = time.monotonic() + patience
    while True:
        try:
            with _listening(host, port):
                return
        except OSError as error:
            if time.monotonic() > end:
                raise TransportError(
                    f"broker: {at(host, port)} cannot be opened ({error.strerror}); "
                    f"`ss -ltnp 'sport = :{port}'` names the program that holds it. Stop that program, or set "
                    f"[broker] port = 0 for a free port, or url = 'mqtt://{at(host, port)}' to use the broker there"
                ) from None
        time.sleep(0.1)


def _account(data: Path, binary: Path) -> tuple[str | None, tuple[int, int]]:
    """The account that Mosquitto runs under when started by root, and its ids: its own where it can reach its
    folder."""
    if os.geteuid() != 0:
        return None, (-1, -1)
    try:
        account = pwd.getpwnam("mosquitto")
    except KeyError:
        return "root", (-1, -1)
    way = [*data.resolve().parents, binary.resolve(), *binary.resolve().parents]
    if all(place.stat().st_mode & stat.S_IXOTH for place in way):
        os.chown(data, account.pw_uid, account.pw_gid)
        for file in data.iterdir():
            os.chown(file, account.pw_uid, account.pw_gid, follow_symlinks=False)  # that account may have made it
        return "mosquitto", (account.pw_uid, account.pw_gid)
    logger.warning("mosquitto runs as root: %s or %s lies below a folder that only root may enter", data, binary)
    return "root", (-1, -1)


@contextmanager
def _mosquitto(
    binary: Path, host: str, port: int, folder: Path, security: Path | None, told: Callable[..., str]
) -> Iterator[Broker]:
    if port:
        _require_port(host, port)
    data, log, config = folder / "persistence", folder / "mosquitto.log", folder / "mosquitto.conf"
    with _writing(folder):
        if (
            os.geteuid() == 0
            and folder.stat().st_mode & stat.S_IRWXU == stat.S_IRWXU
            and not folder.stat().st_mode & stat.S_IXOTH
        ):
            folder.chmod(folder.stat().st_mode | stat.S_IXOTH)
        data.mkdir(mode=0o700, exist_ok=True)
        if security is not None:
            mosquitto.copy(security, data)
        (user, ids), keys = _account(data, binary), None if security is None else data
    for attempt in (1, 2, 3):
        chosen = port or _free_port(host)
        with _writing(folder):
            text = told(host, chosen, data, user=user, security=keys)
            durable.write(config, text.encode(errors="surrogateescape"), mode=0o666)
            if user is not None:
                os.chown(config, *ids)  # under a umask of 077 nobody else may read it
        # A port below 1024 is root's: Mosquitto opens it and changes its user itself.
        account = ids if chosen >= 1024 else (-1, -1)
        answers = partial(_answers, host=host, port=chosen)
        with _writing(folder):
            child = Keeper([str(binary), "-c", str(config)], log, answers, account, partial(mosquitto.forget, data))
        try:
            if child.ready():
                url = f"mqtts://{at(reached(host), chosen)}" if security else f"mqtt://{at(host, chosen)}"
                yield Broker(url, "mosquitto", log, child.process, partial(_reload, child, security, data), child.tend)
                return
        finally:
            child.stop()
        if port or attempt == 3:
            tail = " | ".join(log.read_text(errors="replace").splitlines()[-3:])
            raise TransportError(
                f"broker: {binary} did not start on {at(host, chosen)}: {tail or 'no output'}. Its log is {log}; "
                "mend what it names, or use broker='amqtt'"
            )


def _reload(child: Keeper, security: Path | None, data: Path) -> None:
    if security is not None:
        mosquitto.copy(security, data)
        child.signal(signal.SIGHUP)


def reached(host: str) -> str:
    """Where a listener on ``host`` is reached from the same machine."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _answers(child: subprocess.Popen[bytes], host: str, port: int) -> bool:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and child.poll() is None:
        try:
            socket.create_connection((reached(host), port), timeout=1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return child.poll() is None
    return False


@contextmanager
def _amqtt(host: str, port: int) -> Iterator[Broker]:
    try:
        import amqtt.broker  # noqa: F401
    except ImportError:
        raise TransportError(
            "broker: neither Mosquitto nor amqtt is installed; run `apt install mosquitto`, or "
            "`pip install 'talaria[coordinator]'`, or give the URL of a broker"
        ) from None
    chosen = port or _free_port(host)
    _require_port(host, chosen)
    thread = _AmqttThread(host, chosen)
    thread.start()
    try:
        thread.ready.wait(START_SECONDS)
        if thread.failure or not thread.ready.is_set():
            raise TransportError(f"broker: amqtt did not start on {at(host, chosen)}: {thread.failure or 'no answer'}")
        yield Broker(f"mqtt://{at(host, chosen)}", "amqtt")
    finally:
        thread.stop()


class _AmqttThread(threading.Thread):
    """amqtt in an event loop of its own, so that a busy coordinator does not keep its devices waiting."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(name="amqtt", daemon=True)
        self.host, self.port = host, port
        self.ready = threading.Event()
        self.failure: str | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._leave: asyncio.Event | None = None

    def run(self) -> None:
        # One line per packet is no log for people.
        for name in ("amqtt", "transitions"):
            logging.getLogger(name).setLevel(logging.ERROR)
        try:
            asyncio.run(self._serve())
        finally:
            self.ready.set()

    async def _serve(self) -> None:
        from amqtt.broker import Broker as Server
        from amqtt.errors import BrokerError

        self._loop, self._leave = asyncio.get_running_loop(), asyncio.Event()
        config = {
            "listeners": {"default": {"type": "tcp", "bind": f"{self.host}:{self.port}", "max_connections": 0}},
            "plugins": {"amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True}},
        }
        server = Server(config)
        try:
            await server.start()
        except BrokerError as error:
            self.failure = str(error)
            return
        self.ready.set()
        await self._leave.wait()
        await server.shutdown()

    def stop(self) -> None:
        """Shut the broker down and wait for the thread."""
        if self._loop and self._leave:
            with suppress(RuntimeError):  # its event loop has ended meanwhile, or before
                self._loop.call_soon_threadsafe(self._leave.set)
        self.join(STOP_SECONDS)
