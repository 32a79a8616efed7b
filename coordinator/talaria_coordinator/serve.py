"""A whole coordinator in one call: its folder, its broker, its service, and a good end on SIGTERM."""

from __future__ import annotations

import asyncio
import fcntl
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from talaria.errors import StateError
from talaria_coordinator.blobs import FolderBlobs
from talaria_coordinator.broker import open_broker
from talaria_coordinator.config import FleetConfig
from talaria_coordinator.service import Report, Service
from talaria_coordinator.store import Store


def database(config: FleetConfig) -> Path:
    """Where the fleet's database lies."""
    return config.state / "coordinator.db"


async def serve(config: FleetConfig, report: Report) -> None:
    """Serve one fleet until SIGTERM, SIGINT, or (with ``stay`` off) its end.

    ``report`` is given every event; the first is ``ready`` with the broker's URL, which devices need. Raises
    :class:`~talaria.errors.TalariaError` where the folder, the broker or the port cannot be had.
    """
    with (
        _held(config.state),
        open_broker(config.broker, host=config.host, port=config.port, state=config.state / "broker") as broker,
    ):
        store = Store(database(config))
        try:
            service = Service(config, store, FolderBlobs(config.state / "blobs"), report=report)
            loop = asyncio.get_running_loop()
            for name in (signal.SIGTERM, signal.SIGINT):
                # Only the main thread can listen to signals; elsewhere the caller stops the service itself.
                with suppress(RuntimeError, ValueError):
                    loop.add_signal_handler(name, service.stop)
            (config.state / "broker.url").write_text(broker.url + "\n")
            ready = {"at": time.time(), "fleet": config.name, "event": "ready", "broker": broker.url}
            report({**ready, "kind": broker.kind, "state": str(config.state)})
            await service.run(broker.url)
        finally:
            store.close()
    report({"at": time.time(), "fleet": config.name, "event": "stopped"})


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """The state folder, for this process alone."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("wb")
    except OSError as error:
        raise StateError(f"fleet: cannot use {folder}: {error.strerror}; give [fleet] state another folder") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StateError(
                f"fleet: {folder} is in use by another coordinator; stop it, or give this one another state folder"
            ) from None
        yield
