"""What a history knows: its plan, its virtual clock, links, disks and machines, and what was told of them."""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from talaria import time
from talaria_bench.history import exact
from talaria_bench.history.broker import Broker, Wire
from talaria_bench.history.disks import Disk, Disks
from talaria_bench.history.faults import COORDINATOR, Fault, Plan
from talaria_bench.history.promises import BrokenError, Promises, Record
from talaria_bench.history.virtual import VirtualLoop
from talaria_coordinator.config.fleet import Canary, FleetConfig
from talaria_coordinator.fleet.operator_commands import Order
from talaria_coordinator.fleet.service import Service
from talaria_coordinator.storage.store import Store

FLEET = "watch"
SHARE, REFUSED = 0.4, 0.4
"""Of a canary: of the members who try, and of the gates that may refuse."""
DAY_S = 86400.0
DEADLINE_S = 600.0
BOUND_S = 400.0
"""So many virtual seconds after the last fault ended, learning must have gone on: links retry after at most a minute,
what failed is tried again after at most two, a lost birth is repeated each minute; and no round may wait for its
deadline because of one that is gone."""
WALL = 1_800_000_000.0
Flaw = Callable[[Service], None]
_DULL = ("progress", "coordinator", "model", "training", "trained", "refused", "connected", "disconnected")


@dataclass
class Machine:
    """A coordinator or a device: its disk, its clocks, the life of its program."""

    name: str
    disk: Disk
    random: Random
    origin: float = 0.0
    set_by: float = 0.0
    task: asyncio.Task[Any] | None = None
    wire: Wire | None = None
    back: float = 0.0
    """Seconds until a killed program is started again."""
    retired: bool = False
    """Nobody starts it again."""
    stop: Callable[[], None] | None = None
    killed: bool = False
    leaves: bool = False
    """Whether it was told to stop in good order."""
    service: Service | None = None
    between: list[Callable[[], None]] = field(default_factory=list)
    """What is done to it while it is off."""

    @property
    def lives(self) -> bool:
        """Whether its program runs."""
        return self.task is not None and not self.task.done()


class World:
    """What the functions of this folder share, and change."""

    def __init__(self, plan: Plan, folder: Path, keep: int, flaw: Flaw | None) -> None:
        self.plan, self.folder, self.flaw = plan, folder, flaw
        self.loop = VirtualLoop(Random(f"{plan.seed}/threads"))
        self.disks = Disks(folder)
        liars = {f.target for f in plan.faults if f.kind in ("lie", "rubbish")}
        self.promises = Promises(FLEET, set(plan.devices) - liars)
        self.broker = Broker(self.loop, Random(f"{plan.seed}/links"), self._witness, self.promises.heard)
        self.trace, self.events = hashlib.sha256(), 0
        self.said: deque[str] = deque(maxlen=keep)
        self.lies: dict[str, str] = {}
        self.gone, self.left = set[str](), set[str]()
        self.broken: BrokenError | None = None
        self.own: BaseException | None = None
        """What went wrong in this bench itself."""
        self.readers: dict[Path, Store] = {}
        self.backups: list[tuple[Path, Record]] = []
        self.worker = ThreadPoolExecutor(1)
        self._tasks: set[asyncio.Task[Any]] = set()
        self.run = exact.run_of(plan.rounds)
        self.runs = 0
        """Runs that the operator has begun after the first."""
        self.refuses: set[int] = set()
        """Seeds of the runs that no gate lets pass."""
        self.orders: asyncio.Queue[Fault] = asyncio.Queue()
        self.state = "co"
        self.machines: dict[str, Machine] = {}
        self.second: Machine | None = None
        """A coordinator that was started by mistake."""
        self.ordered: tuple[Service, Order] | None = None
        """The last order, and who was to take it."""
        names = (COORDINATOR, *plan.devices)
        self.keys = {name: hashlib.sha256(f"{plan.seed}/key/{name}".encode()).digest() for name in names}
        self.enrolments = 0
        self.stores: list[Store] = []

    def clocks(self, machine: Machine) -> time.Clocks:
        """The clocks that the machine's program reads."""
        return time.Clocks(lambda: machine.origin + self.loop.time(), lambda: WALL + machine.set_by + self.loop.time())

    def config(self) -> FleetConfig:
        """How the coordinator is configured now; where fewer devices will come, an operator says so, as it asks for."""
        return FleetConfig(
            name=FLEET,
            run=self.run,
            state=self.folder / COORDINATOR / self.state,
            members=() if self.plan.grows else self.plan.devices,
            devices=len(set(self.plan.first) - self.gone - self.left) if self.plan.grows else 0,
            grows=self.plan.grows,
            away_days=self.plan.away_s / DAY_S,
            canary=Canary(share=SHARE, refused=REFUSED, rounds=1) if self.plan.canary else None,
            deadline_s=DEADLINE_S,
            identity=self.folder / "identity" if self.plan.keyed else None,
        )

    def tell(self, who: str, event: str, **facts: Any) -> None:
        """``who`` tells of an event."""
        text = f"{self.loop.time():8.2f}  {who:<7} {event} " + " ".join(f"{k}={v}" for k, v in facts.items())
        text = text.replace(f"{self.folder}/", "")
        self.trace.update(text.encode())
        self.events += 1
        if event not in _DULL:
            self.said.append(text[:240])

    def _witness(self, name: str, topic: str, payload: bytes) -> None:
        self.trace.update(f"{self.loop.time()!r} {name} {topic} ".encode() + payload)
        self.events += 1

    def break_off(self, broken: BrokenError) -> None:
        """A promise was broken; the first that was ends the history."""
        if self.broken is None:
            self.broken = broken
            self.tell("history", "broken", why=str(broken))

    def behind(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Let ``work`` go on beside the story."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, BrokenError):
            self.break_off(error)
        elif error is not None:
            self.own = error
