"""``talaria bench load``: what one coordinator on one machine carries, and what that costs.

A Mosquitto, a coordinator as it is started by hand, and many light devices (:mod:`.fake_devices`) in a few processes:
the protocol and the bytes are real, the learning is not. With ``--cuts`` one device fetches one large global model over
a link that is cut so often.
"""

from __future__ import annotations

import asyncio
import json
import resource
import shutil
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from talaria.errors import ConfigError
from talaria_bench import bars
from talaria_bench.fleet import meters, replay, secure_devices
from talaria_bench.fleet.fake_devices import CODE, Job
from talaria_bench.fleet.files import FLEET, new_folder
from talaria_bench.fleet.meters import MIB
from talaria_bench.fleet.programs import Program, running
from talaria_bench.fleet.secure_devices import value_of
from talaria_bench.fleet.synthetic import begun_with, first_value, run_of, write_config, write_updates
from talaria_coordinator.broker import open_broker
from talaria_coordinator.config.fleet import load_config
from talaria_coordinator.fleet.drain import AWAY_RETRIES, AWAY_S

INGEST = "talaria_coordinator.server.ingest"
STALL_S = 600.0
WARM_UP = 0.1
"""The share of the rounds before memory is looked at; at least three of them."""
LEAVE_S = 180.0
STEPS = (1, 2, 3, 4)
"""Of a secure round, in which devices leave."""


def load(
    devices: Annotated[int, typer.Option(help="Light devices, all connected.", min=1, max=9999)] = 1000,
    rounds: Annotated[int, typer.Option(help="Rounds of learning.", min=1, max=9999)] = 50,
    ask: Annotated[int, typer.Option(help="Devices asked each round; 0: a fifth.", min=0)] = 0,
    model_mib: Annotated[
        float, typer.Option(help="Size of the global model, and of each update.", min=0.1, max=512)
    ] = 1.0,
    processes: Annotated[int, typer.Option(help="Processes that hold the devices.", min=1, max=64)] = 4,
    retry_s: Annotated[float, typer.Option(help="[rounds] retry_s of the fleet.", min=0.1)] = 10.0,
    cuts: Annotated[
        int, typer.Option(help="Instead: one device fetches the global model over as many cuts.", min=0)
    ] = 0,
    chunk_kib: Annotated[
        int,
        typer.Option(
            help="[broker] chunk_kib of the fleet; 120 is what a fleet has that says nothing.", min=4, max=1024
        ),
    ] = 1024,
    workers: Annotated[int, typer.Option(help="[ingest] workers of the fleet.", min=0, max=16)] = 0,
    secure: Annotated[bool, typer.Option("--secure", help="Rounds open only as sums.")] = False,
    degree: Annotated[int, typer.Option(help="With --secure: neighbours of a device (even); 0: all.", min=0)] = 0,
    leaving: Annotated[
        float,
        typer.Option(help="With --secure and one round: the share of devices that die in its midst.", min=0, max=0.33),
    ] = 0.0,
    plot: Annotated[
        Path | None, typer.Option(help="Draw CPU times for each MiB received here, as SVG.", callback=bars.place)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Load one coordinator with many devices and real bytes: no loss, memory, CPU per MiB. Needs Mosquitto."""
    if plot is not None and (cuts or rounds < 2):
        raise ConfigError(
            "load: plot draws CPU for each MiB received from round to round; give two rounds, and leave cuts out"
        )
    folder = new_folder("load")
    try:
        if cuts:
            from talaria_bench.fleet.cuts import fetched

            found = asyncio.run(fetched(folder, model_mib, cuts, retry_s=min(retry_s, 1.0)))
        else:
            if ask > devices:
                raise ConfigError(f"load: --ask {ask} is more than --devices {devices}; ask at most so many")
            asked = ask or max(1, devices // 5)
            hidden = Hidden(degree, round(leaving * devices)) if secure else None
            if hidden is None and (degree or leaving):
                raise ConfigError("load: degree and leaving are of secure rounds; give --secure too")
            if hidden is not None and hidden.leaving and (rounds > 1 or asked < devices):
                raise ConfigError("load: leaving is for one round that asks everybody; give --rounds 1, and --ask all")
            found = asyncio.run(
                Load(folder, devices, rounds, asked, model_mib, processes, retry_s, chunk_kib, workers, hidden).run()
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if plot is not None and "round_s" in found:
        bars.draw({f"{devices} devices, {found['asked']} asked": _times(found)}, "CPU ms for each MiB", plot)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        _show(found)
    raise typer.Exit(0 if found["kept"] else 1)


@dataclass
class Sample:
    """The processes at the end of one round; ``rss_mib`` and ``cpu_s`` are of the coordinator without its workers."""

    at: float
    rss_mib: float
    cpu_s: float
    broker_cpu_s: float
    broker_rss_mib: float
    workers_cpu_s: dict[int, float]
    """Of each ingest worker, by process."""


@dataclass(frozen=True)
class Hidden:
    """Secure rounds: how many neighbours a device has (0: all others), and how many devices die on the way."""

    degree: int
    leaving: int


@dataclass
class Load:
    """One run in ``folder``."""

    folder: Path
    devices: int
    rounds: int
    asked: int
    model_mib: float
    processes: int
    retry_s: float
    chunk_kib: int
    workers: int = 0
    hidden: Hidden | None = None
    _samples: list[Sample] = field(default_factory=list, init=False)
    _receipts: list[replay.Receipt] = field(default_factory=list, init=False)
    _outcomes: Counter[str] = field(default_factory=Counter, init=False)
    _tallies: list[dict[str, Any]] = field(default_factory=list, init=False)
    _moved: float = field(default=0.0, init=False)
    _events: Counter[str] = field(default_factory=Counter, init=False)
    _began_cpu_s: float = field(default=0.0, init=False)

    async def run(self) -> dict[str, Any]:
        """Everything, from the broker's start to the report."""
        room()
        before = meters.plain_loop()
        names = [f"dev-{i:04}" for i in range(self.devices)]
        run = self._run = run_of(self.model_mib, self.rounds, self.asked / self.devices)
        size = write_updates(self.folder / "updates", run, names[0])
        begin, chunk = time.monotonic(), self.chunk_kib << 10
        with open_broker("mosquitto", state=self.folder / "broker", devices=self.devices, chunk=chunk) as self._broker:
            url, hidden = self._broker.url, self.hidden
            more = {} if hidden is None else secure_devices.made(self.folder, run, names, url, hidden.degree)
            more = {**more, "broker": {**more.get("broker", {}), "chunk_kib": self.chunk_kib}}
            if self.workers:
                more = {**more, "ingest": {"workers": self.workers}}
            quorum = 1.0 if hidden is None or not hidden.leaving else 0.5
            config = write_config(self.folder, run, self.devices, url, retry_s=self.retry_s, quorum=quorum, more=more)
            load_config(config)  # what the coordinator refuses is no promise that breaks
            self._coordinator = Program(
                "coordinator", ["coordinator", "serve", str(config), "--json"], self.folder, self._heard
            )
            programs = [self._coordinator, *self._light(names)]
            async with running(programs):
                stuck = await self._wait(programs)
        found = self._report(size, time.monotonic() - begin, stuck)
        return found | {"plain_loop_s": [round(took, 3) for took in (before, meters.plain_loop())]}

    def _light(self, names: list[str]) -> list[Program]:
        leaving = 0 if self.hidden is None else self.hidden.leaving
        staying, going = names[leaving:], names[:leaving]
        groups = [(0, staying[number :: self.processes]) for number in range(self.processes)]
        groups += [(step, going[number :: len(STEPS)]) for number, step in enumerate(STEPS)]
        found = list[Program]()
        for leaves, group in groups:
            job = Job(
                FLEET, self._broker.url, group, self.retry_s, self.rounds,
                updates=str(self.folder / "updates"), alike=names[0],
                secure="" if self.hidden is None else str(self.folder), leaves=leaves,
            )  # fmt: skip
            if group:
                name = f"light-{len(found)}"
                found.append(Program(name, [job.dump()], self.folder, self._heard, code=CODE))
        return found

    def _heard(self, name: str, event: dict[str, Any]) -> None:
        kind = event.get("event", "")
        self._events[kind] += 1
        if name == "coordinator":
            if kind == "round-closed":
                self._moved = time.monotonic()
                self._sample()
                typer.echo(f"round {len(self._samples)} of {self.rounds} closed", err=True)
            elif kind == "round-opened":
                self._moved = time.monotonic()
                if not self._began_cpu_s and self._coordinator.process is not None:
                    self._began_cpu_s = meters.cpu_s(self._coordinator.process.pid)
        elif kind == "received":
            self._outcomes[event["outcome"]] += 1
            if event["outcome"] == "stored":
                self._receipts.append((event["device"], int(event["attempt"])))
        elif kind == "over":
            self._tallies.append(event)

    def _sample(self) -> None:
        own, broker = self._coordinator.process, self._broker.pid
        if own is not None and broker is not None:
            self._samples.append(
                Sample(
                    time.monotonic(), meters.rss_mib(own.pid), meters.cpu_s(own.pid),
                    meters.cpu_s(broker), meters.rss_mib(broker), meters.children_cpu_s(own.pid, INGEST),
                )
            )  # fmt: skip

    async def _wait(self, programs: list[Program]) -> list[str]:
        self._moved = time.monotonic()
        while len(self._samples) < self.rounds:
            if time.monotonic() - self._moved > STALL_S:
                last = {p.name: list(p.errors)[-3:] for p in programs if p.errors}
                return [f"nothing happened for {STALL_S:g} s after round {len(self._samples)}; last words: {last}"]
            if self._coordinator.starts > 1:
                return [f"the coordinator ended: {list(self._coordinator.errors)[-3:]}"]
            await asyncio.sleep(0.2)
        patience = 0.0  # the coordinator's, with those who do not come back
        if self.hidden is not None and self.hidden.leaving:
            patience = max(AWAY_S, AWAY_RETRIES * self.retry_s)
        end = time.monotonic() + patience + LEAVE_S
        while not all(p.done.is_set() for p in programs) and time.monotonic() < end:
            await asyncio.sleep(0.2)
        return [f"{p.name} did not leave: {list(p.errors)[-3:]}" for p in programs if not p.done.is_set()]

    def _report(self, size: int, lived: float, stuck: list[str]) -> dict[str, Any]:
        ledger = replay.promised(self.folder / "state", FLEET, self._receipts)
        due, leaving = self.rounds * self.asked, 0 if self.hidden is None else self.hidden.leaving
        value, expected = first_value(self.folder / "state", FLEET), self._expected()
        wrong = [*stuck, *ledger.wrong]
        # Who leaves once its masked update is here counts all the same.
        if not due - leaving <= ledger.counted <= due:
            wrong.append(f"{ledger.counted} of {due} updates counted")
        if value is None or expected is None or abs(value - expected) > 1e-6 * self.rounds:
            wrong.append(f"the last model's first value is {value}, and {expected} what was counted comes to")
        if self._coordinator.starts != 1:
            wrong.append(f"the coordinator was started {self._coordinator.starts} times")
        warm = min(max(3, int(WARM_UP * self.rounds)), max(0, self.rounds - 2))
        tail = self._samples[warm:]
        received = size * self.asked * max(0, len(tail) - 1) / MIB
        down, last_models, up = (sum(t[way] for t in self._tallies) / MIB for way in ("down", "last", "up"))
        found: dict[str, Any] = {
            "devices": self.devices,
            "asked": self.asked,
            "rounds": ledger.rounds,
            "model_mib": self.model_mib,
            "chunk_kib": self.chunk_kib,
            "update_bytes": size,
            "counted": ledger.counted,
            "receipts": ledger.receipts,
            "outcomes": dict(self._outcomes),
            "lost": ledger.lost,
            "twice": ledger.twice,
            "down_mib": round(down, 1),
            "last_models_mib": round(last_models, 1),
            "down_of_asked": round((down - last_models) / (due * self.model_mib), 3),
            "up_mib": round(up, 1),
            "sent_again": round(up * MIB / (size * due) - 1, 4),
            "dropped": sum(t["dropped"] for t in self._tallies),
            "links_lost": self._events["cut"],
            "seconds": round(lived, 1),
            "coordinator_cpu_s_a_round": self._cpu_a_round(),
            "workers": self.workers,
            "secure": None if self.hidden is None else asdict(self.hidden),
            "light_cpu_s": round(sum(t["cpu_s"] for t in self._tallies), 1),
        }
        if len(tail) >= 2:
            first, last = tail[0], tail[-1]
            rss = [sample.rss_mib for sample in tail]
            found |= {
                "round_s": round((last.at - first.at) / (len(tail) - 1), 2),
                "rss_slope_mib": round(meters.slope(rss), 4),
                "rss_mib": {"first": round(rss[0], 1), "last": round(rss[-1], 1), "most": round(max(rss), 1)},
                "coordinator_ms_per_mib": round(1000 * (last.cpu_s - first.cpu_s) / received, 2),
                "workers_ms_per_mib": [
                    round(1000 * (used - first.workers_cpu_s.get(pid, 0.0)) / received, 2)
                    for pid, used in last.workers_cpu_s.items()
                ],
                "broker_ms_per_mib_received": round(1000 * (last.broker_cpu_s - first.broker_cpu_s) / received, 2),
                "broker_ms_per_mib_carried": round(1000 * last.broker_cpu_s / (2 * up + down), 2),
                "broker_rss_mib": round(last.broker_rss_mib, 1),
                "rss_by_round": [round(sample.rss_mib, 1) for sample in self._samples],
            }
        plain = {name: round(value, 3) for name, value in meters.plain_copy().items()}
        return found | {"plain_ms_per_mib": plain, "wrong": wrong, "kept": not wrong}

    def _cpu_a_round(self) -> float | None:
        """Of the coordinator, from the first round's beginning to the last one's end."""
        return round((self._samples[-1].cpu_s - self._began_cpu_s) / len(self._samples), 2) if self._samples else None

    def _expected(self) -> float | None:
        """The first value of the last model: the mean of what was sent for it, or, of steps, all of them."""
        means = [sum(map(value_of, who)) / len(who) for who in replay.counted_in(self.folder / "state", FLEET)]
        if self.hidden is None or not means:
            return means[-1] if means else None
        return begun_with(self._run) + sum(means)


def room() -> None:
    """As many open files as this user may have: each device is one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _times(found: dict[str, Any]) -> dict[str, float]:
    """Who spends what on a MiB of update, and what a plain copy of it takes."""
    workers = {f"ingest worker {n}": ms for n, ms in enumerate(found["workers_ms_per_mib"])}
    own = {"coordinator": found["coordinator_ms_per_mib"], **workers, "broker": found["broker_ms_per_mib_received"]}
    return own | {f"plain: {name.replace('_', ' ')}": ms for name, ms in found["plain_ms_per_mib"].items()}


def _show(found: dict[str, Any]) -> None:
    for name, value in found.items():
        if name not in ("wrong", "kept", "rss_by_round"):
            typer.echo(f"{name:28} {value}")
    for line in found["wrong"]:
        typer.echo(f"wrong: {line}")
    typer.echo("kept" if found["kept"] else "a promise broke")
