"""``talaria bench stranger``: a fleet of real processes at a broker that lets everybody speak, and somebody who does.

A Mosquitto without rights or passwords, a coordinator with keys and some agents run as processes of their own. A
stranger hears all that is said and publishes without end: frames by the grammar, real ones changed and replayed, lists
in lists, noise; much of it retained. No program may end, memory stays flat, rounds complete, and nobody is shut out.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from talaria.errors import StateError
from talaria.wire.mqtt import Arrival, Mqtt
from talaria_bench.fleet import files as fl
from talaria_bench.fleet.meters import rss_mib
from talaria_bench.fleet.programs import Program, running
from talaria_bench.fuzz.grammar import Stranger
from talaria_coordinator.broker import Broker, open_broker
from talaria_coordinator.identity import membership

ROUNDS, DEADLINE_S, RETRY_S, START_S = 100_000, 20.0, 0.3, 120.0
_ASK = """
import sys
from pathlib import Path
from talaria.identity.enrolment import Code
from talaria_edge.identity.enroll import ask
for pair in sys.argv[1:]:
    folder, code = pair.rsplit("=", 1)
    print(ask(Path(folder), Code.parse(code)))
"""
_FINISH = """
import sys
from pathlib import Path
from talaria_edge.identity.enroll import finish
for folder in sys.argv[1:]:
    finish(Path(folder), (Path(folder) / "answer").read_bytes())
"""
FLAT_MIB = 64.0
"""A program may have so much more at the end than when half of the time was over."""


def stranger(
    seconds: Annotated[float, typer.Option(help="How long the stranger speaks.", min=1)] = 600.0,
    seed: Annotated[int, typer.Option(help="Of what it says.")] = 1,
    devices: Annotated[int, typer.Option(help="Agents, each a process.", min=2, max=16)] = 3,
    rate: Annotated[float, typer.Option(help="Messages a second, at most.", min=1)] = 100.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Let a stranger with a broker and no key say anything: no program ends, memory is flat, rounds complete.

    Needs Mosquitto. Ends with status 1 where something was not kept.
    """
    place = fl.new_folder("stranger")
    try:
        found = asyncio.run(Visit(place, seconds, seed, devices, rate).run())
    finally:
        shutil.rmtree(place, ignore_errors=True)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        typer.echo(
            f"{found['said']} messages in {found['seconds']:.0f} s, {found['retained']} retained; "
            f"{found['refused']} were refused by the coordinator, {found['refused_by_devices']} by devices\n"
            f"rounds: {found['rounds']} completed, {found['failed']} failed; "
            f"shut out: {', '.join(found['quarantined']) or 'nobody'}"
        )
        for name, row in found["programs"].items():
            typer.echo(f"{name:12} {row['starts']} start, {row['middle_mib']:.0f} -> {row['end_mib']:.0f} MiB")
        for text in found["broken"]:
            typer.echo(f"NOT KEPT: {text}")
    raise typer.Exit(1 if found["broken"] else 0)


class Visit:
    """One run in ``folder``."""

    def __init__(self, folder: Path, seconds: float, seed: int, devices: int, rate: float) -> None:
        self.folder, self.seconds, self.seed, self.rate = folder, seconds, seed, rate
        self.devices = tuple(f"edge-{i:02}" for i in range(devices))
        self._events: Counter[tuple[str, str]] = Counter()
        self._last: list[dict[str, Any]] = []
        self._quarantined: set[str] = set()
        self._news = asyncio.Event()
        self._said = self._retained = 0

    async def run(self) -> dict[str, Any]:
        """Start all, let the stranger speak, and say what came of it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open_broker("mosquitto", state=self.folder / "broker") as broker:
            programs = self._programs(broker)
            async with running(programs):
                try:
                    async with asyncio.timeout(START_S):
                        await self._until(lambda: self._closed() >= 1)
                except TimeoutError:
                    last = {program.name: list(program.errors)[-3:] for program in programs if program.errors}
                    raise StateError(f"stranger: no round was closed in the first {START_S:g} s; {last}") from None
                before = self._closed()
                half = await self._speak(broker, self.seconds / 2, self.seed)
                middle = self._memory(programs)
                await self._speak(broker, self.seconds - half, self.seed + 1)
                end, done = self._memory(programs), self._closed() - before
                starts = {program.name: program.starts for program in programs}
        rows = {
            name: {"starts": starts[name], "middle_mib": middle[name], "end_mib": end[name]} for name in starts
        }  # fmt: skip
        return self._found(rows, done)

    def _found(self, rows: dict[str, dict[str, float]], done: int) -> dict[str, Any]:
        broken = [f"{name} ended: {self._ended(name)}" for name, row in rows.items() if row["starts"] != 1]
        broken += [
            f"{name} grew from {row['middle_mib']:.0f} to {row['end_mib']:.0f} MiB"
            for name, row in rows.items()
            if row["end_mib"] > row["middle_mib"] + FLAT_MIB
        ]
        broken += [] if done else ["no round completed"]
        broken += [] if self._said else ["the stranger could say nothing"]
        broken += [f"{name} was shut out" for name in sorted(self._quarantined)]
        return {
            "seconds": self.seconds, "seed": self.seed, "said": self._said, "retained": self._retained,
            "rounds": done, "failed": self._events["coordinator", "round-failed"],
            "refused": self._events["coordinator", "refused"],
            "refused_by_devices": sum(self._events[name, "refused"] for name in self.devices),
            "quarantined": sorted(self._quarantined), "programs": rows, "broken": broken,
        }  # fmt: skip

    def _ended(self, name: str) -> str:
        return next((str(item["errors"])[-300:] for item in self._last if item["name"] == name), "")

    def _programs(self, broker: Broker) -> list[Program]:
        """A coordinator and agents with keys, at a broker without."""
        keys, run = self.folder / "keys", fl.run_of("fedavg", ROUNDS, self.seed)
        membership.create(keys, fl.FLEET, "mqtts://localhost:8883", ["localhost"])
        rounds = {"deadline_s": DEADLINE_S, "quorum": 1 / len(self.devices), "retry_s": RETRY_S}
        path = fl.write_fleet(
            self.folder, run, broker.url, fleet={"members": list(self.devices)}, rounds=rounds
        )  # fmt: skip
        _with_keys(path, keys)
        programs = [Program("coordinator", ("coordinator", "serve", str(path), "--json"), self.folder, self._hear)]
        folders = {name: self.folder / f"keys-{name}" for name in self.devices}
        codes = [f"{own}={membership.enroll(keys, name).text()}" for name, own in folders.items()]
        for request in _joined(_ASK, codes).splitlines():
            own = Path(request).parent
            (own / "answer").write_bytes(membership.admit(keys, Path(request).read_bytes()).encode())
        _joined(_FINISH, [str(own) for own in folders.values()])
        for i, (name, own) in enumerate(folders.items()):
            fl.write_data(self.folder / f"{name}.npz", self.seed + i)
            config = fl.write_device(self.folder, name, broker.url, retry_s=RETRY_S)
            _with_keys(config, own)
            programs.append(Program(name, ("edge", "run", str(config), "--json"), self.folder, self._hear))
        return programs

    def _hear(self, name: str, item: dict[str, Any]) -> None:
        self._events[name, item["event"]] += 1
        if item["event"] == "ended":
            self._last.append({"name": name, **item})
        if item["event"] == "quarantined":
            self._quarantined.add(item["device"])
        self._news.set()

    def _closed(self) -> int:
        return self._events["coordinator", "round-closed"]

    async def _until(self, true: Callable[[], bool]) -> None:
        while not true():
            self._news.clear()
            await self._news.wait()

    async def _speak(self, broker: Broker, seconds: float, seed: int) -> float:
        """Hear and speak for so long; the seconds."""
        filters, grammar = (f"fl/1/{fl.FLEET}/#",), Stranger(seed, fl.FLEET, self.devices)
        link = Mqtt(broker.url, "stranger", filters, backoff=(0.2, 1.0))
        await link.start()

        async def hear() -> None:
            while True:
                item = await link.receive()
                if isinstance(item, Arrival):
                    grammar.hears(item.topic, item.payload)

        hearing, begin = asyncio.create_task(hear()), time.monotonic()
        try:
            count = 0
            while (spent := time.monotonic() - begin) < seconds:
                if count > spent * self.rate:
                    await asyncio.sleep(1 / self.rate)
                    continue
                topic, payload, retain = grammar.says()
                count += 1
                if await link.publish(topic, payload, retain=retain):
                    self._said += 1
                    self._retained += retain
        finally:
            hearing.cancel()
            await link.close()
        return time.monotonic() - begin

    def _memory(self, programs: list[Program]) -> dict[str, float]:
        found = {}
        for program in programs:
            found[program.name] = 0.0
            with suppress(psutil.Error):
                found[program.name] = rss_mib(program.process.pid) if program.process is not None else 0.0
        return found


def _joined(code: str, arguments: list[str]) -> str:
    """What a device's side of the enrolment says; it is the agents' own, in a process of theirs."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def _with_keys(config: Path, folder: Path) -> None:
    config.write_text(f'{config.read_text()}\n[identity]\nfolder = "{folder}"\n')
