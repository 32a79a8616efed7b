"""Starts ingest workers, and is their program: ``python -m talaria_coordinator.server.ingest``, whose standard input is
the socket to the coordinator. It ends when that closes, whatever became of the coordinator."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from talaria import malloc, plugins, stopping
from talaria.errors import TalariaError, TransportError
from talaria.federated.fedbuff_run import Buffering
from talaria.federated.run import Run
from talaria.identity import credentials
from talaria.privacy.rule import Privacy
from talaria.wire.mqtt import Mqtt
from talaria_coordinator.broker import Broker
from talaria_coordinator.config.fleet import FleetConfig
from talaria_coordinator.config.ingest import require_workers
from talaria_coordinator.config.privacy import PrivacyConfig
from talaria_coordinator.config.store import StoreConfig
from talaria_coordinator.fleet import blueprints
from talaria_coordinator.fleet.ingest.pool import Colleague, Recruit
from talaria_coordinator.fleet.ingest.words import Alive, Linked, Word, packed, words
from talaria_coordinator.fleet.ingest.worker import Worker
from talaria_coordinator.fleet.life import learning_of
from talaria_coordinator.fleet.uploads import Uploads
from talaria_coordinator.identity import membership
from talaria_coordinator.server.open_state import open_blobs

PROGRAM = "talaria_coordinator.server.ingest"
AGAIN_S = 1.0
"""Seconds until a broker that does not answer at the start is asked again."""


@dataclass(frozen=True)
class Post:
    """All that a worker is told when it starts. Paths are absolute; no field holds a secret."""

    number: int
    url: str
    name: str
    run: str
    state: str
    store: dict[str, Any]
    identity: str | None
    username: str | None
    password_file: str | None
    aggregator: str | None
    buffering: dict[str, Any] | None
    privacy: dict[str, Any] | None
    devices: int
    grows: bool
    deadline_s: float
    max_update: int
    gateways: dict[str, int]
    beside: tuple[str, ...]
    """Folders in which models of one's own are looked for."""

    @classmethod
    def of(cls, config: FleetConfig, url: str, number: int) -> Post:
        """Worker ``number`` of a fleet whose broker is at ``url``."""
        store = config.store
        where = None if store.password_file is None else str(store.password_file.resolve())
        return cls(
            number=number, url=url, name=config.name, run=config.run.to_json(), state=str(config.state.resolve()),
            store=asdict(store) | {"password_file": where},
            identity=None if config.identity is None else str(config.identity.resolve()),
            username=config.username,
            password_file=None if config.password_file is None else str(config.password_file.resolve()),
            aggregator=config.aggregator,
            buffering=None if config.buffering is None else asdict(config.buffering),
            privacy=None if config.privacy is None else asdict(config.privacy.rule),
            devices=config.expected, grows=config.grows, deadline_s=config.deadline_s, max_update=config.max_update,
            gateways=dict(config.gateways), beside=plugins.beside(),
        )  # fmt: skip

    def config(self) -> FleetConfig:
        """What of the fleet's settings a worker needs."""
        return FleetConfig(
            name=self.name, run=Run.from_json(self.run, allow=None), state=Path(self.state), broker=self.url,
            store=StoreConfig(**self.store), identity=_path(self.identity), username=self.username,
            password_file=_path(self.password_file), aggregator=self.aggregator,
            buffering=None if self.buffering is None else Buffering(**self.buffering),
            privacy=None if self.privacy is None else PrivacyConfig(rule=Privacy(**self.privacy)),
            devices=self.devices, grows=self.grows, deadline_s=self.deadline_s, max_update=self.max_update,
            gateways=self.gateways,
        )  # fmt: skip


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


# -- in the coordinator


def require(config: FleetConfig) -> None:
    """Give each worker its own means to come to the broker, before that starts. Raises :class:`ConfigError` where that
    is not possible."""
    if config.workers and config.identity is not None and config.username is None:
        membership.staff(config.identity, config.workers)


def recruits(config: FleetConfig, broker: Broker) -> Recruit | None:
    """What starts the workers of a fleet; None where it has none."""
    if not config.workers:
        return None
    require_workers(config.workers, False, broker.kind)
    return partial(_started, config, broker.url)


async def _started(config: FleetConfig, url: str, number: int) -> Colleague:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", PROGRAM],
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in a terminal is for the coordinator, also while this still imports
        )
    reader, writer = await asyncio.open_connection(sock=ours)
    writer.write(json.dumps(asdict(Post.of(config, url, number))).encode() + b"\n")
    return Colleague(process, reader, writer)


# -- the program


def main() -> None:
    """Work until the coordinator is gone."""
    for name in stopping.asked_by():  # where all of a service are told: the coordinator says when to go
        signal.signal(name, signal.SIG_IGN)
    malloc.settle()
    try:
        asyncio.run(_live(socket.socket(fileno=os.dup(0))))
    except (TalariaError, BaseExceptionGroup) as error:
        sys.exit(f"talaria: ingest worker: {error}")
    os._exit(0)  # nobody waits for what its threads still do


async def _live(line: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=line, limit=1 << 24)

    def say(word: Word) -> None:
        writer.write(packed(word))

    try:
        if post := await reader.readline():  # empty: the coordinator ended before it said a word
            await _work(Post(**json.loads(post)), reader, writer, say)
    except TalariaError as error:
        say(Linked(False, str(error)))
        await writer.drain()
        raise


async def _work(
    post: Post, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, say: Callable[[Word], None]
) -> None:
    for folder in post.beside:
        plugins.look_in(Path(folder))
    config = post.config()
    blueprints.prepare(config.run, config.state)
    learning = learning_of(config, config.run, open_blobs(config))
    uploads = Uploads(config.state / "uploads", config.max_update)
    worker = Worker(config.name, post.number, uploads, learning, say, writer.drain)
    link = _link(post, config, worker.filters)
    if await _begun(link, say, writer.is_closing):
        await worker.run(link, words(reader))


async def _begun(link: Mqtt, say: Callable[[Word], None], gone: Callable[[], bool]) -> bool:
    """Whether the broker answers; not where the coordinator is ``gone`` before it does."""
    told = ""
    while not gone():
        try:
            await link.start()
        except TransportError as error:
            if str(error) != told:
                told = str(error)
                say(Linked(False, told))
            say(Alive())
            await asyncio.sleep(AGAIN_S)
        else:
            return True
    return False


def _link(post: Post, config: FleetConfig, filters: tuple[str, ...]) -> Mqtt:
    own = config.identity if config.username is None else None
    return Mqtt(
        post.url,
        f"{config.name}.{membership.WORKER.format(post.number)}",
        filters,
        username=config.username,
        password=credentials.password_in(config.password_file),
        tls=None if own is None else membership.worker_tls(own, post.number),
        threaded=False,
        as_published=True,
    )


if __name__ == "__main__":
    main()
