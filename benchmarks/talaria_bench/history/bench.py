"""``talaria bench history``: thousands of fleets, each a history that one seed decides, and what each still kept."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from talaria.errors import ConfigError
from talaria_bench.history.faults import Plan, draw
from talaria_bench.history.shorten import shortened
from talaria_bench.history.story import LAST_WORDS, Outcome, lived
from talaria_bench.history.world import Flaw


@contextmanager
def empty_folder() -> Iterator[Path]:
    """In memory where the machine has such a place: nothing here needs to last."""
    memory = Path("/dev/shm")
    place = memory if memory.is_dir() and os.access(memory, os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="talaria-history-", dir=place)).resolve()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def live(plan: Plan, *, keep: int = LAST_WORDS, flaw: Flaw | None = None) -> Outcome:
    """What becomes of a plan. ``keep`` of its last events are told; ``flaw`` is planted into each coordinator."""
    with empty_folder() as folder:
        return lived(plan, folder, keep=keep, flaw=flaw)


def shortest(plan: Plan, broken: str, *, flaw: Flaw | None = None) -> Plan:
    """``plan`` with the fewest faults that still break the promise ``broken``."""
    numbers = shortened(
        [fault.number for fault in plan.faults],
        lambda some: live(plan.only(frozenset(some)), keep=0, flaw=flaw).broken == broken,
    )
    return plan.only(frozenset(numbers))


@dataclass
class Tally:
    """What many histories came to."""

    lived: int = 0
    rounds: int = 0
    events: int = 0
    virtual_s: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    recovered: list[float] = field(default_factory=list)
    failed: list[dict[str, Any]] = field(default_factory=list)
    traces: Any = field(default_factory=hashlib.sha256, repr=False)

    def take(self, plan: Plan, outcome: Outcome) -> None:
        """One history more, in order of seeds."""
        self.lived += 1
        self.rounds += outcome.rounds
        self.events += outcome.events
        self.virtual_s += outcome.seconds
        self.faults.update(fault.kind for fault in plan.faults)
        self.traces.update(outcome.trace.encode())
        if not outcome.broken:
            self.recovered.append(outcome.recovered)


def history(
    seeds: Annotated[int, typer.Option(help="How many histories.", min=1)] = 1000,
    first: Annotated[int, typer.Option(help="The first seed.", min=0)] = 0,
    seed: Annotated[int | None, typer.Option(help="Live through this one alone, and tell all of it.", min=0)] = None,
    only: Annotated[str, typer.Option(help="With --seed: these of its faults and no others, as 2,5.")] = "",
    workers: Annotated[int, typer.Option(help="Processes.", min=1, max=256)] = 1,
    failures: Annotated[int, typer.Option(help="Stop after so many failing histories.", min=1)] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Whole fleets on a virtual clock, under faults drawn from a seed: exactly once, nothing lost, nobody shut out, and
    learning goes on. A seed replays to the byte; a failing history is shortened."""
    if seed is not None:
        raise typer.Exit(_one(seed, only, as_json))
    if only:
        raise ConfigError(f"history: --only {only} is of one seed's faults; give --seed with it")
    began, cpu = time.monotonic(), os.times()
    tally = Tally()
    for plan, outcome in _all(range(first, first + seeds), workers):
        tally.take(plan, outcome)
        if outcome.broken:
            typer.echo(f"seed {plan.seed}: {outcome.why}", err=True)
            tally.failed.append(_failure(plan, outcome))
            typer.echo(_story(tally.failed[-1]), err=True)
        if len(tally.failed) == failures:
            break
        if tally.lived % 50 == 0:
            typer.echo(
                f"{tally.lived} histories, {len(tally.failed)} failed, {time.monotonic() - began:.0f} s", err=True
            )
    now = os.times()
    used = sum((now.user, now.system, now.children_user, now.children_system)) - sum(cpu[:4])
    found = {
        "first": first,
        "seeds": tally.lived,
        "kept": not tally.failed,
        "failed": tally.failed,
        "rounds": tally.rounds,
        "events": tally.events,
        "virtual_s": round(tally.virtual_s),
        "faults": dict(sorted(tally.faults.items())),
        "recovered_s": {
            "median": round(median(tally.recovered), 1) if tally.recovered else None,
            "max": round(max(tally.recovered), 1) if tally.recovered else None,
        },
        "trace": tally.traces.hexdigest(),
        "seconds": round(time.monotonic() - began, 1),
        "cpu_s": round(used, 1),
    }
    typer.echo(json.dumps(found, indent=1) if as_json else _words(found))
    raise typer.Exit(0 if found["kept"] else 1)


def _all(seeds: Iterable[int], workers: int) -> Iterator[tuple[Plan, Outcome]]:
    """In order of seeds, however many work."""
    if workers == 1:
        yield from map(_live_seed, seeds)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        try:
            yield from pool.map(_live_seed, seeds)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _live_seed(seed: int) -> tuple[Plan, Outcome]:
    plan = draw(seed)
    return plan, live(plan, keep=0)


def _failure(plan: Plan, outcome: Outcome) -> dict[str, Any]:
    short = shortest(plan, outcome.broken)
    last = live(short)
    return {
        "seed": plan.seed,
        "broken": outcome.broken,
        "why": last.why,
        "only": [fault.number for fault in short.faults],
        "of": len(plan.faults),
        "devices": list(plan.devices),
        "keyed": plan.keyed,
        "faults": [str(fault) for fault in short.faults],
        "trace": last.trace,
        "last": list(last.last),
    }


def _story(failed: dict[str, Any], last: int = 12) -> str:
    numbers = ",".join(map(str, failed["only"])) or "none"
    lines = [
        f"  {len(failed['devices'])} devices{' with keys' if failed['keyed'] else ''}; "
        f"{len(failed['only'])} of {failed['of']} faults are enough:",
        *(f"    {fault}" for fault in failed["faults"]),
        f"  {failed['why']}",
        "  the last that was told:",
        *(f"    {line}" for line in failed["last"][-last:]),
        f"  again: talaria bench history --seed {failed['seed']} --only {numbers}",
    ]
    return "\n".join(lines)


def _one(seed: int, only: str, as_json: bool) -> int:
    plan = draw(seed)
    if only:
        there = {str(fault.number) for fault in plan.faults}
        asked = set() if only == "none" else set(only.split(","))
        if asked - there:  # else a failure that is replayed by another word would seem to be mended
            raise ConfigError(f"history: --only {only}: seed {seed} has the faults {', '.join(sorted(there, key=int))}")
        plan = plan.only(frozenset(map(int, asked)))
    outcome = live(plan, keep=100_000)
    failed = _failure(plan, outcome) if outcome.broken else None
    if as_json:
        facts = {
            "seed": seed,
            "devices": list(plan.devices),
            "keyed": plan.keyed,
            "faults": [str(fault) for fault in plan.faults],
            "broken": outcome.broken,
            "why": outcome.why,
            "rounds": outcome.rounds,
            "recovered_s": outcome.recovered,
            "trace": outcome.trace,
            "told": list(outcome.last),
            "shortest": failed,
        }
        typer.echo(json.dumps(facts, indent=1))
    else:
        for line in outcome.last:
            typer.echo(line)
        typer.echo(f"seed {seed}: {outcome.why or 'all promises were kept'}; trace {outcome.trace}")
        if failed is not None:
            typer.echo(_story(failed))
    return 1 if outcome.broken else 0


def _words(found: dict[str, Any]) -> str:
    recovered = found["recovered_s"]
    return (
        f"{found['seeds']} histories from seed {found['first']}: {len(found['failed'])} failed\n"
        f"{found['rounds']} rounds, {found['events']} events, {sum(found['faults'].values())} faults in "
        f"{found['virtual_s']} virtual seconds\n"
        f"learning went on {recovered['median']} s after the last fault (median; at most {recovered['max']} s)\n"
        f"{found['seconds']} s, {found['cpu_s']} s of CPU; trace {found['trace'][:16]}"
    )
