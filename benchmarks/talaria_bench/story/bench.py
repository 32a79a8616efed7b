"""``talaria bench story``: what becomes of a fleet in a year, told in some minutes by real programs.

A Mosquitto, a coordinator and agents run as processes of their own. Members join, retire and come back, one run follows
another, trials pass and are called off, the coordinator is restored from a backup while its agents live on. Every order
is given by command. Afterwards all rounds are learned again in this process, along the audit log: each global model
must be the same to the byte, and every receipt must have counted once, or be one that the restore took back.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from talaria.errors import StateError
from talaria.federated import warm_start
from talaria.federated.run import Member, Run
from talaria_bench.fleet import files as fl
from talaria_bench.fleet.forkserver import Nursery
from talaria_bench.fleet.programs import Program
from talaria_bench.story import audit
from talaria_bench.story.plan import CLASSES, FEATURES, TRIAL, Act, Plan, draw, run_of
from talaria_coordinator.broker import open_broker

RETRY_S, STALL_S = 0.3, 300.0
CANARY = {"share": 0.4, "refused": 0.3, "rounds": TRIAL - 1}
COORDINATOR, STATE, GONE, BACKUP = "coordinator", "service", "service-gone", "backup"
TRAIN, VAL, TEST = 24, 16, 8


def story(
    rounds: Annotated[int, typer.Option(help="Rounds of the whole story.", min=1)] = 200,
    devices: Annotated[int, typer.Option(help="Agents, each a process.", min=1, max=64)] = 8,
    seed: Annotated[int, typer.Option(help="Decides who comes and goes, and after which rounds.", min=0)] = 1,
    folder: Annotated[Path | None, typer.Option(help="Keep all state and the journal here; a new folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """A fleet's year: members come and go, runs follow one another, trials, a restore. Nothing is lost but what the
    restore takes back. Needs Mosquitto."""
    plan = draw(seed, devices, rounds)

    def told(text: str) -> None:
        if not as_json:
            typer.echo(text, err=True)

    place = fl.new_folder("story", folder)
    found: dict[str, Any] = {}
    try:
        found = asyncio.run(Story(place, plan, told).run())
    finally:
        fl.leave(place, folder, kept=found.get("kept", False))
    typer.echo(json.dumps(found, indent=1) if as_json else _words(found))
    raise typer.Exit(0 if found["kept"] else 1)


def write_data(path: Path, seed: int, classes: int) -> None:
    """Samples of one device: classes around the same middles for all, each device a little aside."""
    middles = np.random.default_rng(0).standard_normal((CLASSES + 1, FEATURES))
    own = np.random.default_rng([seed, classes])
    aside = 0.3 * np.random.default_rng(seed).standard_normal(FEATURES)
    found: dict[str, Any] = {}
    for part, count in (("train", TRAIN), ("val", VAL), ("test", TEST)):
        y = np.arange(count) % classes
        x = middles[y] + aside + 1.5 * own.standard_normal((count, FEATURES))
        found |= {f"x_{part}": x.astype(np.float32), f"y_{part}": y}
    np.savez(path, **found)


class Story:
    """One story in ``folder``, which is made."""

    def __init__(self, folder: Path, plan: Plan, told: Callable[[str], None]) -> None:
        self.folder, self.plan, self._say = folder, plan, told
        self._nursery = Nursery()
        self._programs: dict[str, Program] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._news = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed, self._done, self._canaries = 0, False, list[dict[str, Any]]()
        self._busy: Counter[str] = Counter()
        self._trained: set[str] = set()
        self._finished: set[str] = set()
        self._receipts: tuple[list[tuple[str, int]], list[tuple[str, int]]] = ([], [])
        self._restored = 0
        self._began: set[tuple[str, int]] = set()
        self._epoch = 0

    async def run(self) -> dict[str, Any]:
        """Start all, live through the plan, look at what it left."""
        self.folder.mkdir(parents=True, exist_ok=True)
        began, wrong = time.monotonic(), list[str]()
        with (
            open_broker("mosquitto", state=self.folder / "broker") as broker,
            (self.folder / "journal.jsonl").open("w", buffering=1) as self._journal,
        ):
            self._url = broker.url
            await self._nursery.open()
            self._write_all()
            try:
                await self._live()
            except StateError as error:
                wrong.append(str(error))
            finally:
                await asyncio.gather(*(program.stop() for program in self._programs.values()))
                ended = await asyncio.gather(*self._keepers, return_exceptions=True)
                await self._nursery.close()
        wrong += [f"the bench itself failed: {why!r}" for why in ended if isinstance(why, Exception)]
        lived = time.monotonic() - began
        used = os.times()
        if wrong or not self._restored:
            return {"kept": False, "seed": self.plan.seed, "wrong": wrong, "seconds": round(lived, 1)}
        self._say("learning all rounds again, undisturbed")
        found = await asyncio.to_thread(self._audit)
        return self._report(found, lived, used.children_user + used.children_system)

    # -- the files

    def _write_all(self) -> None:
        for number, name in enumerate(self.plan.devices):
            for classes in (CLASSES, CLASSES + 1):
                write_data(self.folder / f"{name}-{classes}.npz", 1000 * self.plan.seed + number, classes)
            self._label(name, CLASSES)
            path = fl.write_device(self.folder, name, self._url, retry_s=RETRY_S)
            served = f'stay = true\nbundle = "{name}.talaria"\nvariants = ["fp32"]\n[fleet]'
            path.write_text(path.read_text().replace("[fleet]", served))
        self._write_fleet(run_of(self.plan.seed, self.plan.first), canary=True)

    def _label(self, name: str, classes: int) -> None:
        """The device's samples are those with so many classes, from one moment to the next."""
        shutil.copy(self.folder / f"{name}-{classes}.npz", self.folder / "next.npz")
        (self.folder / "next.npz").replace(self.folder / f"{name}.npz")

    def _write_fleet(self, run: Run, *, canary: bool) -> None:
        recipe = {"lr": run.recipe.lr, "weight_decay": run.recipe.weight_decay}
        fl.write_fleet(
            self.folder,
            run,
            self._url,
            fleet={"devices": len(self.plan.founders), "grows": True, "state": STATE, "stay": True},
            rounds={"deadline_s": 30.0, "quorum": 0.5, "retry_s": RETRY_S},
            more={"run.recipe": recipe, **({"canary": CANARY} if canary else {})},
        )

    # -- what the programs tell

    def _heard(self, name: str, event: dict[str, Any]) -> None:
        self._journal.write(json.dumps({"of": name, **event}) + "\n")
        match event.get("event"), name:
            case "training", _:
                self._began.add((name, int(event["round"])))
                self._trained.add(name)
            case "received", _ if event["outcome"] == "stored":
                self._receipts[self._restored].append((name, int(event["attempt"])))
            case "done", "coordinator":
                self._done = True
            case "done", _:
                self._finished.add(name)
            case "round-closed", _:
                self._closed = int(event["round"])
            case "canary", _:
                self._canaries.append(event)
        self._behind(self._notify())

    async def _notify(self) -> None:
        async with self._news:
            self._news.notify_all()

    def _behind(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _until(self, is_so: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + STALL_S
        while not is_so():
            if time.monotonic() > end:
                last = {name: list(p.errors)[-3:] for name, p in self._programs.items() if p.errors}
                raise StateError(f"story: {what} within {STALL_S:g} s of round {self._closed}; last words: {last}")
            with suppress(TimeoutError):
                async with self._news:
                    await asyncio.wait_for(self._news.wait(), 1.0)

    # -- life

    async def _live(self) -> None:
        self._start(COORDINATOR, "coordinator", "serve", str(self.folder / "fleet.toml"), "--json")
        for name in self.plan.founders:
            self._start_agent(name)
        for act in self.plan.acts:
            await self._until(lambda r=act.round: self._closed >= r, f"round {act.round} was not closed")  # type: ignore[misc]
            self._say(str(act))
            self._journal.write(json.dumps({"of": "operator", "event": str(act), "closed": self._closed}) + "\n")
            await self._do(act)
        await self._until(lambda: self._closed >= self.plan.rounds and self._done, "the last run was not over")
        await self._finish(set(self._here()))

    async def _do(self, act: Act) -> None:
        match act.kind:
            case "join":
                self._start_agent(act.device)
            case "retire":
                await self._order("retire", act.device, "--reason", "away for a season")
                await self._programs.pop(act.device).stop()
            case "readmit":
                await self._order("readmit", act.device)
                self._start_agent(act.device)
            case "extend":
                await self._extend(act.rounds)
            case "back-up":
                await self._order("backup", str(self.folder / BACKUP))
            case "restore":
                await self._restore(act.rounds)
            case "pause" | "resume":
                await self._order(act.kind)
            case "next":
                await self._next(act)

    async def _next(self, act: Act) -> None:
        """Another run; its trial, where it has one, is waited for."""
        await self._until(lambda: self._done, "the run was not over")
        await self._finish(set(self._here()))
        tried = act.what != "cooler"
        if act.what == "a class more":
            for name in self.plan.devices:
                self._label(name, CLASSES + 1)
        self._write_fleet(run_of(self.plan.seed, act.rounds, act.what), canary=tried)
        self._done, known = False, len(self._canaries)
        self._finished.clear()
        self._trained.clear()
        await self._order("next")
        if tried:
            await self._until(lambda: len(self._canaries) > known, "the trial was not over")
        if tried and self._canaries[-1]["called_off"]:
            self._say("  called off by the gates")
            await self._finish(self._trained & set(self._here()))  # they serve the run before again
            self._finished |= set(self._here())

    async def _extend(self, rounds: int) -> None:
        await self._until(lambda: self._done, "the run was not over")
        await self._finish(set(self._here()))
        self._done = False
        self._finished.clear()
        await self._order("extend", "--rounds", str(rounds))

    async def _finish(self, names: set[str]) -> None:
        await self._until(lambda: names <= self._finished, "not everybody has personalized")

    async def _restore(self, rounds: int) -> None:
        """The disk of the coordinator is lost while its agents live on; the order after the backup is given again. The
        operator has had enough of trials."""
        await self._finish(set(self._here()))
        await self._programs.pop(COORDINATOR).stop()
        (self.folder / STATE).rename(self.folder / GONE)
        (at,) = (act for act in self.plan.acts if act.what == "a class more")
        self._write_fleet(run_of(self.plan.seed, at.rounds, at.what), canary=False)
        await self._order("restore", str(self.folder / BACKUP))
        self._restored, self._done = 1, False
        self._closed = 0
        self._start(COORDINATOR, "coordinator", "serve", str(self.folder / "fleet.toml"), "--json")
        await self._until(lambda: self._done, "the coordinator did not come back")
        self._done = False
        await self._order("extend", "--rounds", str(rounds))

    def _here(self) -> list[str]:
        return [name for name in self._programs if name != COORDINATOR]

    def _start_agent(self, name: str) -> None:
        self._finished.discard(name)
        self._start(name, "edge", "run", str(self.folder / f"{name}.toml"), "--json", "--threads", "1")

    def _start(self, name: str, *arguments: str) -> None:
        program = self._programs[name] = Program(name, arguments, self.folder, self._heard, nursery=self._nursery)
        self._keepers.append(asyncio.create_task(program.run()))

    async def _order(self, verb: str, *words: str) -> None:
        """``talaria coordinator VERB FLEET.TOML WORDS``, to its end."""
        arguments = ("coordinator", verb, str(self.folder / "fleet.toml"), *words)
        path = self.folder / "order.log"
        with path.open("wb") as file:
            clock = str(self.folder / f"{COORDINATOR}.clock")
            child = await self._nursery.start(arguments, clock, os.dup(file.fileno()), os.dup(file.fileno()))
        if await child.wait():
            raise StateError(f"story: `talaria {' '.join(arguments)}` failed: {path.read_text()[-500:]}")

    # -- what it left

    def _audit(self) -> audit.Found:
        first = run_of(self.plan.seed, self.plan.first)
        runs, now, learned = dict[str, Run](), first, self.plan.first
        for act in (act for act in self.plan.acts if act.kind == "next"):
            learned += act.rounds
            run = warm_start.following(now, run_of(self.plan.seed, act.rounds, act.what))
            run = replace(run, rounds=learned)
            runs[run.identity] = run
            now = now if act.what == "too tight" else run

        def member(name: str, run: Run) -> Member:
            return fl.member(self.folder / f"{name}-{run.spec.classes}.npz", name)

        devices = {name: self.folder / "state" / name for name in self.plan.devices}
        return audit.audit(
            self.folder / STATE, self.folder / GONE, fl.FLEET, first, runs, member, devices, self._receipts, self._began
        )

    def _report(self, found: audit.Found, lived: float, cpu: float) -> dict[str, Any]:
        ledger, events = found.ledger, found.record.events
        out = [event["device"] for event in events if event["kind"] == "quarantined"]
        of = Counter(event["kind"] for event in events)
        learned, wrong = ledger.rounds - found.rounds_again, list(ledger.wrong)
        planned = [act.what != "too tight" for act in self.plan.acts if act.kind == "next" and act.what != "cooler"]
        passed = [not canary["called_off"] for canary in self._canaries]
        if learned != self.plan.rounds:
            wrong.append(f"{learned} of {self.plan.rounds} rounds were learned")
        if passed != planned:
            wrong.append(f"of the trials {passed} passed, and {planned} should")
        if out:
            wrong.append(f"shut out: {out}")
        restores = [{"after_round": _round_at(events, e), "rounds_lost": found.rounds_again,
                     "receipts_lost": found.lost_by_restore} for e in events if e["kind"] == "restored"]  # fmt: skip
        return {
            "seed": self.plan.seed,
            "devices": len(self.plan.devices),
            "plan": [str(act) for act in self.plan.acts],
            "rounds": learned,
            "rounds_failed": ledger.failed,
            "updates": ledger.counted,
            "receipts": ledger.receipts + found.before.receipts,
            "lost_by_restore": found.lost_by_restore,
            "lost": ledger.lost + found.before.lost,
            "twice": ledger.twice + found.before.twice,
            "shut_out": len(out),
            "members": _members(events),
            "warm_starts": [
                {"after_round": e["round"], "grown": e["grown"], "tried_by": len(e.get("tried_by", ()))}
                for e in events if e["kind"] == "run-followed"
            ],
            "canaries": [
                {"after_round": e["round"], "passed": e["kind"] == "canary-passed", "asked": e["asked"],
                 "answered": e["answered"], "refused": e["refused"]}
                for e in events if e["kind"] in ("canary-passed", "canary-called-off")
            ],
            "restores": restores,
            "extended": of["run-extended"],
            "pauses": of["fleet-paused"],
            "models": ledger.models,
            "models_equal": ledger.models_equal,
            "updates_equal": ledger.updates_equal,
            "private_equal": ledger.private_equal,
            "final": ledger.final,
            "audit_log": ledger.log,
            "seconds": round(lived, 1),
            "cpu_s": round(cpu, 1),
            "wrong": wrong,
            "kept": not wrong and ledger.lost + ledger.twice + found.before.lost + found.before.twice == 0
            and ledger.equal,
        }  # fmt: skip


def _round_at(events: tuple[audit.Event, ...], at: audit.Event) -> int:
    """The last round that was committed before an event."""
    return max((int(e["round"]) for e in events if e["kind"] == "round-closed" and e["seq"] < at["seq"]), default=0)


def _members(events: tuple[audit.Event, ...]) -> list[dict[str, Any]]:
    """How many members there were, from which round on."""
    found, roster = list[dict[str, Any]](), set[str]()
    for event in events:
        match event["kind"]:
            case "roster-fixed":
                now = set(event["roster"])
            case "device-retired":
                now = roster - {event["device"]}
            case "device-readmitted":
                now = roster | {event["device"]}
            case _:
                continue
        facts = {"come": sorted(now - roster), "left": sorted(roster - now)}
        if now != roster:
            found.append({"after_round": _round_at(events, event), "members": len(now), **facts})
        roster = now
    return found


def _words(found: Mapping[str, Any]) -> str:
    if "rounds" not in found:
        return "\n".join((*(f"wrong: {line}" for line in found["wrong"]), "the story did not come to its end"))
    passed = sum(canary["passed"] for canary in found["canaries"])
    lines = [
        f"{found['rounds']} rounds of {found['devices']} devices by seed {found['seed']} in {found['seconds']} s",
        f"{found['receipts']} receipts, {found['lost']} lost, {found['lost_by_restore']} taken back by the restore; "
        f"{found['updates']} updates counted, {found['twice']} of them twice",
        f"{len(found['warm_starts'])} warm starts; of {len(found['canaries'])} trials {passed} passed; "
        f"{len(found['restores'])} restore; members: {', '.join(str(m['members']) for m in found['members'])}",
        f"{found['models_equal']} of {found['models']} global models equal to the undisturbed ones",
        *(f"wrong: {line}" for line in found["wrong"]),
        "all guarantees kept" if found["kept"] else "a guarantee broke",
    ]
    return "\n".join(lines)
