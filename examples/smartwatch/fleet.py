"""A real fleet on this machine: one coordinator process, several edge processes, a broker between them.

Each wearer's agent has its own connection, identity, folder and data file; only what the wire format can hold
leaves it.
"""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import numpy as np
import psutil

from talaria.data import Client
from talaria.errors import TalariaError
from talaria.federated.run import Run
from talaria.planning.plan import Plan

FLEET = "watch"
_DEVICE = [sys.executable, "-c", "import sys; sys.modules['torch'] = None; import talaria.cli.main as m; m.main()"]
"""``talaria``, where torch is not installed: a wearer's watch has no room for it."""
Event = dict[str, Any]


class FleetError(TalariaError):
    """A process of the fleet ended before its work was done."""


@dataclass
class Process:
    """A program of the fleet; its events arrive in ``events``, what it says on stderr is kept in a file."""

    name: str
    command: Sequence[str]
    log: Path
    events: "Queue[Event | None]" = field(default_factory=Queue)

    def __post_init__(self) -> None:
        self._log = self.log.open("w")
        self.child = subprocess.Popen(self.command, stdout=subprocess.PIPE, stderr=self._log, text=True)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.child.stdout is not None
        for line in self.child.stdout:
            self.events.put(json.loads(line))
        self.events.put(None)

    def memory_mb(self) -> float:
        """Resident memory now; 0 once it has ended."""
        try:
            return float(psutil.Process(self.child.pid).memory_info().rss) / 1e6
        except psutil.Error:
            return 0.0

    def stop(self) -> None:
        """SIGTERM, and SIGKILL for one that does not listen."""
        self.child.terminate()
        try:
            self.child.wait(20)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()
        self._log.close()

    def failed(self) -> FleetError:
        """What to tell of a process that ended too early."""
        said = self.log.read_text().strip().splitlines()[-6:]
        return FleetError(f"{self.name} ended early (exit {self.child.wait()}); it said:\n" + "\n".join(said))


def write_data(path: Path, client: Client) -> None:
    """One wearer's samples, as that wearer's own device holds them."""
    arrays = {}
    for part in ("train", "val", "test"):
        samples = getattr(client, part)
        arrays |= {f"x_{part}": samples.x, f"y_{part}": samples.y}
    np.savez(path, **arrays)


def device_toml(folder: Path, name: str, broker: str, plan: Plan, labels: Sequence[str]) -> Path:
    """The settings of one agent."""
    path = folder / f"{name}.toml"
    widths = "\n".join(f'"{group}" = {width}' for group, width in plan.widths.items())
    path.write_text(
        f'[device]\nid = "{name}"\nstate = "state/{name}"\nbundle = "../bundles/{name}.talaria"\n'
        f'labels = {json.dumps(list(labels))}\nvariants = ["fp32"]\n'
        f'[fleet]\nname = "{FLEET}"\nbroker = "{broker}"\n'
        f'[data]\nsource = "npz"\npath = "{name}.npz"\n'
        f"[plan.widths]\n{widths}\n"
    )
    return path


def fleet_toml(folder: Path, run: Run, members: Sequence[str], broker: str) -> Path:
    """The settings of the coordinator."""
    path = folder / "fleet.toml"
    spec = run.spec
    hparams = "\n".join(f"{k} = {json.dumps(v)}" for k, v in run.hparams.items())
    recipe = {k: v for k, v in vars(run.recipe).items() if v is not None}
    path.write_text(
        f'[fleet]\nname = "{FLEET}"\nmembers = {json.dumps(list(members))}\n[broker]\nurl = "{broker}"\n'
        f'[run]\nalgorithm = "{run.algorithm}"\nrounds = {run.rounds}\nseed = {run.seed}\n'
        f'buffers = "{run.buffers}"\ncodec = "{run.codec}"\ndownload = "{run.download}"\n'
        f'[run.spec]\nname = "{spec.name}"\ninput_shape = {list(spec.input_shape)}\nclasses = {spec.classes}\n'
        f"seed = {spec.seed}\n"
        f"[run.hparams]\n{hparams}\n"
        f"[run.recipe]\n" + "\n".join(f"{k} = {json.dumps(v)}" for k, v in recipe.items()) + "\n"
    )
    return path


@contextmanager
def coordinator(config: Path) -> Iterator[tuple[Process, str, str]]:
    """A running coordinator: its process, the broker's URL, and the broker's kind."""
    process = Process("the coordinator", [*_talaria(), "coordinator", "serve", str(config), "--json"], _log(config))
    try:
        event = process.events.get(timeout=120)
        if event is None or event.get("event") != "ready":
            raise process.failed()
        yield process, event["broker"], event["kind"]
    finally:
        process.stop()


def run_devices(
    groups: Sequence[Sequence[Path]], watch: Callable[[Event], None], beside: Process
) -> tuple[Mapping[str, Event], float]:
    """Run one edge process per group of agents to the end; what came of each agent, by name, and the most memory that
    these processes had together, in MB.

    ``watch`` is given every event of the agents and of the coordinator ``beside`` them.
    """
    processes = [
        Process(
            f"edge process {i}",
            [*_DEVICE, "edge", "run", "--json", "--threads", "1", *map(str, group)],
            _log(group[0]),
        )
        for i, group in enumerate(groups, 1)
    ]
    done: dict[str, Event] = {}
    wanted, peak = sum(map(len, groups)), 0.0
    try:
        while len(done) < wanted:
            peak = max(peak, sum(process.memory_mb() for process in processes))
            for process in (*processes, beside):
                for event in _drain(process):
                    watch(event)
                    if event["event"] == "done" and "device" in event:
                        done[event["device"]] = event
                    if event["event"] == "failed" or (event["event"] == "done" and "error" in event):
                        raise FleetError(f"{event.get('device')}: {event['error']}")
            threading.Event().wait(0.05)
    finally:
        for process in processes:
            process.stop()
    return done, peak


def _drain(process: Process) -> Iterator[Event]:
    while True:
        try:
            event = process.events.get_nowait()
        except Empty:
            return
        if event is None:
            if process.child.wait() != 0:
                raise process.failed()
            return
        yield event


def _talaria() -> list[str]:
    return [str(Path(sys.executable).with_name("talaria"))]


def _log(config: Path) -> Path:
    return config.with_suffix(".log")
