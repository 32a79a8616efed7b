"""``talaria bench chaos``: a real fleet of real processes under random faults, and what it still kept.

A Mosquitto, a coordinator and some agents run as processes of their own, with a proxy between them and the broker.
Programs are killed and started again, links are cut, delayed, doubled and turned round, disks fill up, clocks jump.
Afterwards every promise is looked up in the store, and all rounds are learned again in this process, undisturbed,
from the same contributions: each global model must be the same to the byte.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Annotated, Any, cast
from urllib.parse import urlsplit

import typer

from talaria import valid
from talaria.federated.run import ENGINES, Engine
from talaria_bench.fleet import faults as f
from talaria_bench.fleet import files as fl
from talaria_bench.fleet import keys, replay
from talaria_bench.fleet.forkserver import Nursery
from talaria_bench.fleet.programs import Program, running
from talaria_bench.fleet.proxy import Proxy, Trouble
from talaria_coordinator.broker import Broker, open_broker

DEADLINE_S, RETRY_S = 30.0, 0.3
STALL_S, LEAVE_S, WORKER_S = 600.0, 180.0, 60.0
"""Without a committed round for so long, or still here so long after the last one, something is stuck."""
FAULTS_PER_ROUND = 2


def chaos(
    faults: Annotated[int, typer.Option(help="How many faults happen.", min=1)] = 200,
    seed: Annotated[int, typer.Option(help="Decides which, when and to whom; a failing run is run again by it.")] = 1,
    devices: Annotated[int, typer.Option(help="Agents, each a process.", min=2, max=64)] = 4,
    rounds: Annotated[int, typer.Option(help="Rounds of learning; 0: half as many as faults.", min=0)] = 0,
    algorithm: Annotated[str, typer.Option(help="What is learned; fedper, and fedavg where sums are secure.")] = "",
    workers: Annotated[int, typer.Option(help="[ingest] workers, which are killed too.", min=0, max=16)] = 0,
    secure: Annotated[bool, typer.Option(help="Devices with keys, whose updates open only as a sum.")] = False,
    engine: Annotated[str, typer.Option(help="Who trains in the agents: torch, onnx, or both in turn.")] = "torch",
    fresh: Annotated[bool, typer.Option(help="Start each program anew instead of forking a warm one.")] = False,
    folder: Annotated[Path | None, typer.Option(help="Keep all state and journals here; a new folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Disturb a real fleet by random faults: nothing lost, nothing counted twice, the same bytes. Needs Mosquitto."""
    count = rounds or max(6, -(-faults // FAULTS_PER_ROUND))
    valid.among("chaos", "engine", engine, (*ENGINES, "both"))

    def told(text: str) -> None:
        if not as_json:
            typer.echo(text, err=True)

    if secure:
        keys.require(algorithm or keys.LEARNED, devices)
    place = fl.new_folder("chaos", folder)
    learned = algorithm or (keys.LEARNED if secure else "fedper")
    found: dict[str, Any] = {}
    try:
        disturbed = Chaos(place, faults, seed, devices, count, learned, told, fresh, engine, secure, workers)
        found = asyncio.run(disturbed.run())
    finally:
        fl.leave(place, folder, kept=found.get("kept", False))
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        _show(found)
    raise typer.Exit(0 if found["kept"] else 1)


class Chaos:
    """One run in ``folder``, which is made."""

    def __init__(
        self,
        folder: Path,
        faults: int,
        seed: int,
        devices: int,
        rounds: int,
        algorithm: str,
        told: Callable[[str], None],
        fresh: bool = False,
        engine: str = "torch",
        secure: bool = False,
        workers: int = 0,
    ) -> None:
        self._workers: dict[str, int | None] = {str(number): None for number in range(workers)}
        """The process of each ingest worker, by its number."""
        self._nursery = None if fresh else Nursery()
        self.folder, self.seed, self._say, self._engine, self._secure = folder, seed, told, engine, secure
        self.devices = tuple(f"edge-{i:02}" for i in range(devices))
        in_turn = ENGINES if engine == "both" else (cast(Engine, engine),)
        self._trains = {name: in_turn[i % len(in_turn)] for i, name in enumerate(self.devices)}
        self.faults = f.draw(seed, faults, self.devices, rounds, workers)
        self._fleet_run = fl.run_of(algorithm, rounds, seed)
        self._programs: dict[str, Program] = {}
        self._troubles: list[tuple[f.Fault, Trouble]] = []
        self._happened: list[f.Fault] = []
        self._background: set[asyncio.Task[None]] = set()
        self._round = asyncio.Condition()
        self._opened = self._closed = 0
        self._moved = 0.0
        self._receipts: list[replay.Receipt] = []
        self._began: set[tuple[str, int]] = set()
        self._restarts: list[dict[str, float]] = []
        self._chunks_kept = 0
        self._events: Counter[str] = Counter()

    async def run(self) -> dict[str, Any]:
        """Start all, disturb it, wait for its end, look at what it left."""
        self.folder.mkdir(parents=True, exist_ok=True)
        began, cpu = time.monotonic(), time.process_time()
        with (
            open_broker("mosquitto", state=self.folder / "broker") as self._broker,
            (self.folder / "journal.jsonl").open("w") as self._journal,
        ):
            self._proxy = Proxy(urlsplit(self._broker.url).port or 1883, self.seed)
            await self._proxy.open()
            if self._nursery is not None:
                await self._nursery.open()
            self._write()
            try:
                async with running(self._programs.values()) as failed:
                    try:
                        stuck = await self._disturbed()
                    finally:
                        for task in self._background:
                            task.cancel()
            finally:
                if self._nursery is not None:
                    await self._nursery.close()
                await self._proxy.close()
        stuck += [f"the bench itself failed: {why!r}" for why in failed]
        lived = time.monotonic() - began
        self._say("learning all rounds again, undisturbed")
        members = {name: fl.member(self.folder / f"{name}.npz", name, self._trains[name]) for name in self.devices}
        ledger = await asyncio.to_thread(
            replay.audit,
            self.folder / "state", fl.FLEET, self._fleet_run, members, self.folder / "state", self._receipts,
            self._began, keys.PRIVACY if self._secure else None,
        )  # fmt: skip
        return self._report(ledger, stuck, lived, time.process_time() - cpu)

    def _write(self) -> None:
        url = f"mqtt://127.0.0.1:{self._proxy.port}"
        more = keys.made(self.folder, self.devices, url) if self._secure else {}
        if self._workers:
            more = {**more, "ingest": {"workers": len(self._workers)}}
        config = fl.write_fleet(
            self.folder,
            self._fleet_run,
            url,
            fleet={"members": list(self.devices)},
            rounds={"deadline_s": DEADLINE_S, "quorum": 0.5, "retry_s": RETRY_S},
            more=more,
        )
        self._add(f.COORDINATOR, "coordinator", "serve", str(config), "--json")
        for number, name in enumerate(self.devices):
            fl.write_data(self.folder / f"{name}.npz", 1000 * self.seed + number)
            path = fl.write_device(self.folder, name, url, retry_s=RETRY_S, engine=self._trains[name])
            if self._secure:
                keys.given(path, name)
            self._add(name, "edge", "run", str(path), "--json", "--threads", "1")

    def _add(self, name: str, *arguments: str) -> None:
        self._programs[name] = Program(name, arguments, self.folder, self._heard, nursery=self._nursery)

    # -- what the programs tell

    def _heard(self, name: str, event: dict[str, Any]) -> None:
        self._journal.write(json.dumps({"of": name, "t": round(time.monotonic(), 3), **event}) + "\n")
        kind = event.get("event", "")
        self._events[kind] += 1
        if name != f.COORDINATOR:
            if kind == "training":
                self._began.add((name, int(event["round"])))
            if kind == "received" and event["outcome"] == "stored":
                self._receipts.append((name, int(event["attempt"])))
            return
        program = self._programs[name]
        if kind == "ingest":
            self._workers[str(event["worker"])] = int(event["pid"])
        elif kind == "ended":
            self._workers = dict.fromkeys(self._workers)  # they end with it: their numbers may be others' soon
        if kind == "started" and program.starts > 1:
            self._chunks_kept += int(event["chunks"])
        elif kind == "connected" and program.starts > 1 and program.began:
            took = asyncio.get_running_loop().time() - program.began
            self._restarts.append({"seconds": took, "cpu_s": program.cpu_s(), "calm": float(program.calm)})
            program.began = 0.0
        elif kind in ("round-opened", "round-closed"):
            self._note_round(kind, int(event["round"]))

    def _note_round(self, kind: str, round: int) -> None:
        if kind == "round-closed":
            self._closed, self._moved = max(self._closed, round), time.monotonic()
        self._opened = max(self._opened, round)
        self._behind(self._notify())

    async def _notify(self) -> None:
        async with self._round:
            self._round.notify_all()

    # -- the disturbance

    async def _disturbed(self) -> list[str]:
        """Let all faults happen and the run end; what is stuck, in words."""
        self._moved = time.monotonic()
        for fault in self.faults:
            while self._opened < fault.round:
                if why := await self._wait():
                    return [why]
            if self._all_done():
                return [f"the run ended before fault {fault.number} of {len(self.faults)}; give it more rounds"]
            await asyncio.sleep(fault.after)
            await self._happen(fault)
            if (fault.number + 1) % 20 == 0:
                self._say(f"{fault.number + 1} faults, {self._closed} rounds")
        while self._closed < self._fleet_run.rounds:
            if why := await self._wait():
                return [why]
        end = time.monotonic() + LEAVE_S
        while not self._all_done() and time.monotonic() < end:
            await asyncio.sleep(0.1)
        return [
            f"{name} did not leave within {LEAVE_S:g} s of the last round: {list(program.errors)[-3:]}"
            for name, program in self._programs.items()
            if not program.done.is_set()
        ]

    async def _wait(self) -> str:
        """Wait a little for the next round; why it will not come, if so."""
        with suppress(TimeoutError):
            async with self._round:
                await asyncio.wait_for(self._round.wait(), 1.0)
        if time.monotonic() - self._moved > STALL_S:
            last = {name: list(p.errors)[-3:] for name, p in self._programs.items() if p.errors}
            return f"no round was committed for {STALL_S:g} s after round {self._closed}; last words: {last}"
        return ""

    def _all_done(self) -> bool:
        return all(program.done.is_set() for program in self._programs.values())

    async def _happen(self, fault: f.Fault) -> None:
        self._journal.write(json.dumps({"of": "chaos", "t": round(time.monotonic(), 3), **asdict(fault)}) + "\n")
        victim = self._programs.get(fault.target)
        if victim is None or fault.kind in ("kill-broker", *f.LINKS):
            for program in self._programs.values():
                program.calm = program.calm and fault.target not in ("all", program.name)
        else:
            victim.calm = False
        match fault.kind:
            case "kill-worker":
                if not await self._kill_worker(fault.target):
                    return
            case "kill-broker":
                await self._kill_broker(self._broker, fault.seconds)
            case "kill-coordinator" | "kill-edge" if victim is not None:
                with suppress(TimeoutError):  # one that is away just now is killed as soon as it is back
                    await asyncio.wait_for(victim.alive.wait(), 10)
                victim.kill(fault.seconds)
            case "disk-full" if victim is not None:
                victim.full(int(fault.strength))
                self._behind(self._room(victim, fault.seconds))
            case "clock-jump" if victim is not None:
                victim.off(fault.strength)
            case _:
                trouble = Trouble(fault.kind, fault.target, fault.seconds, fault.strength)
                self._troubles.append((fault, trouble))
                self._proxy.make(trouble)
                return
        self._happened.append(fault)

    async def _kill_worker(self, number: str) -> bool:
        """SIGKILL, once the worker is there: its coordinator may be away just now, and it with it. Whether one was."""
        end = time.monotonic() + WORKER_S
        while (pid := self._workers[number]) is None:
            if time.monotonic() > end:
                return False
            await asyncio.sleep(0.05)
        self._workers[number] = None
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:  # it died in this moment
            return await self._kill_worker(number)
        return True

    async def _kill_broker(self, broker: Broker, seconds: float) -> None:
        """SIGKILL; its keeper starts it again, and nobody reaches it for ``seconds``."""
        self._proxy.make(Trouble("cut", "all", seconds))
        if broker.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(broker.pid, signal.SIGKILL)

    async def _room(self, program: Program, seconds: float) -> None:
        await asyncio.sleep(seconds)
        program.full(None)

    def _behind(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # -- the report

    def _report(self, ledger: replay.Ledger, stuck: list[str], lived: float, cpu: float) -> dict[str, Any]:
        happened = [*self._happened, *(fault for fault, trouble in self._troubles if trouble.touched)]
        wrong = [*stuck, *ledger.wrong]
        if len(happened) < len(self.faults):
            wrong.append(f"only {len(happened)} of {len(self.faults)} faults happened")
        restarts = self._restarts
        calm = [r["seconds"] for r in restarts if r["calm"]]
        return {
            "seed": self.seed,
            "algorithm": self._fleet_run.algorithm,
            "engine": self._engine,
            "secure": self._secure,
            "workers": len(self._workers),
            "devices": len(self.devices),
            "faults": len(happened),
            "by_kind": f.tally(happened),
            "packets_touched": {
                kind: sum(t.touched for fault, t in self._troubles if fault.kind == kind) for kind in f.LINKS
            },
            "rounds": ledger.rounds,
            "rounds_failed": ledger.failed,
            "stored": ledger.stored,
            "counted": ledger.counted,
            "receipts": ledger.receipts,
            "lost": ledger.lost,
            "twice": ledger.twice,
            "equal": ledger.equal,
            "models_equal": ledger.models_equal,
            "updates_equal": ledger.updates_equal,
            "private_equal": ledger.private_equal,
            "final": ledger.final,
            "audit_log": ledger.log,
            "starts": {name: program.starts for name, program in self._programs.items()},
            "restart": {
                "of": "the coordinator, from its start to its link being up",
                "fresh": self._nursery is None,
                "restarts": len(restarts),
                "undisturbed": len(calm),
                "median_s": round(median(calm), 3) if calm else None,
                "max_s": round(max(calm), 3) if calm else None,
                "max_disturbed_s": round(max((r["seconds"] for r in restarts), default=0.0), 3),
                "median_cpu_s": round(median(r["cpu_s"] for r in restarts), 3) if restarts else None,
                "chunks_kept": self._chunks_kept,
            },
            "quarantined": self._events["quarantined"],
            "seconds": round(lived, 1),
            "bench_cpu_s": round(cpu, 1),
            "wrong": wrong,
            "kept": not wrong and ledger.lost == ledger.twice == 0 and ledger.equal,
        }


def _show(found: dict[str, Any]) -> None:
    kinds = ", ".join(f"{n} {kind}" for kind, n in found["by_kind"].items())
    typer.echo(f"{found['faults']} faults by seed {found['seed']} ({kinds}) over {found['rounds']} rounds")
    typer.echo(
        f"{found['receipts']} receipts, {found['lost']} lost, {found['twice']} counted twice; "
        f"{found['models_equal']} of {found['rounds']} global models equal to the undisturbed ones"
    )
    restart = found["restart"]
    if restart["undisturbed"]:
        typer.echo(
            f"coordinator back in {restart['median_s']} s (at most {restart['max_s']} s) of {restart['undisturbed']} "
            f"undisturbed restarts, with {restart['chunks_kept']} chunks kept in all"
        )
    for line in found["wrong"]:
        typer.echo(f"wrong: {line}")
    typer.echo("all guarantees kept" if found["kept"] else "a guarantee broke")
