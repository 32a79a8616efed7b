"""An operator's orders to a running coordinator (:class:`Order`), and their effect: pure functions of its state.

``pause`` opens no further round; the open one runs to its end. ``abort`` also calls off the open round, or one that is
closed and cannot be committed: nothing of it counts. Either way the last committed global model stays and is served,
and ``resume`` goes on from it. ``extend`` lets the run go on for more rounds, ``next`` begins another from its last
model (:mod:`talaria_coordinator.fleet.life`). ``quarantine`` shuts a device out, ``release`` lets it in again;
``retire`` lets it leave for good, and ``readmit`` takes it in again.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from talaria import time
from talaria.errors import ConfigError, TalariaError
from talaria.foreign import shown
from talaria.protocol import events as e
from talaria.protocol.coordinator.machine import CoordinatorState
from talaria_coordinator.storage.records import Fleet

Verb = Literal["pause", "resume", "abort", "extend", "next", "retire", "readmit", "quarantine", "release"]
Status = Literal["running", "paused", "aborted"]
CALLED_OFF = "called off by the operator"
_FROM: dict[Verb, tuple[str, ...]] = {
    "pause": ("running", "paused"),
    "resume": ("running", "paused", "aborted"),
    "abort": ("running", "paused", "aborted"),
}
_INSTEAD = {
    "done": "no round opens any more; `extend` lets it learn more rounds, `next` begins another run",
    "aborted": "no round opens before `resume`",
}
"""What a fleet does that an order does not fit, and what fits, by its status."""
_TO: dict[Verb, Status] = {"pause": "paused", "resume": "running", "abort": "aborted"}


@dataclass(frozen=True)
class Order:
    """One order; ``answer`` is the fleet's status afterwards, or why not."""

    verb: Verb
    device: str = ""
    reason: str = ""
    rounds: int = 0
    """How many more, of ``extend`` and ``next``."""
    run: str = ""
    """The run that is ``next``, as JSON; empty: the present one, with ``classes`` where that is not 0."""
    classes: int = 0
    canary: str = ""
    """How that run is tried: ``[canary]`` as JSON, null for not at all; empty: as the coordinator was started."""
    answer: Future[str] = field(default_factory=Future, compare=False, repr=False)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Hand an error to whoever asked, instead of raising it here."""
        try:
            yield
        except TalariaError as error:
            self.answer.set_exception(error)

    def done(self, status: str) -> None:
        """It is carried out."""
        self.answer.set_result(status)


def decide(order: Order, fleet: Fleet, state: CoordinatorState) -> tuple[Status | None, object | None]:
    """The fleet's new status (None: the same) and the event for the machine (None: none).

    Raises :class:`~talaria.errors.ConfigError` where the order does not fit what is.
    """
    if order.verb in ("quarantine", "release"):
        return None, _about_device(order, state)
    if fleet.status not in _FROM[order.verb]:
        raise ConfigError(f"fleet {fleet.name!r} is {fleet.status}, it cannot {order.verb}: {_INSTEAD[fleet.status]}")
    status = _TO[order.verb]
    open_ = state.attempt
    event = None
    if order.verb == "abort" and open_ is not None and open_.phase in ("open", "closed"):
        event = e.AbortRound(time.monotonic(), open_.number, order.reason or CALLED_OFF)
    return (None if fleet.status == status else status), event


def unknown(device: str) -> ConfigError:
    """The error to raise for a device that was never here."""
    return ConfigError(
        f"device {shown(device)} is not known to the fleet; `talaria coordinator status` lists its devices"
    )


def _about_device(order: Order, state: CoordinatorState) -> object:
    peer = state.peers.get(order.device)
    if peer is None:
        raise unknown(order.device)
    if order.verb == "quarantine" and peer.out:
        raise ConfigError(
            f"device {order.device!r} is in quarantine already ({peer.out}); there is nothing to shut out"
        )
    if order.verb == "quarantine":
        return e.Revoke(time.monotonic(), order.device, order.reason or "shut out by the operator")
    if not peer.out:
        raise ConfigError(f"device {order.device!r} is not in quarantine; there is nothing to release")
    return e.Release(time.monotonic(), order.device)
