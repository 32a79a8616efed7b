"""``talaria bench fuzz``: hostile bytes for every decoder, guided by coverage, for as long as is asked."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from talaria.errors import ConfigError
from talaria_bench.folders import kept_in

_COVERAGE = re.compile(r"cov: (\d+) ft: \d+ corp: (\d+)")
_NONE = {"taken": 0, "refused": 0, "runs": 0, "slowest_s": 0.0, "memory_mib": 0.0}


def fuzz(
    seconds: Annotated[float, typer.Option(help="How long.", min=1)] = 300.0,
    seed: Annotated[int, typer.Option(help="Of the mutations.", min=1)] = 1,
    runs: Annotated[int, typer.Option(help="Inputs for each target at most; 0 for as many as fit.", min=0)] = 0,
    corpus: Annotated[
        Path | None, typer.Option(help="A folder that keeps what was found, to go on from.", callback=kept_in)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Fuzz all decoders that a stranger can reach: frames, messages, tensors, updates, enrolment, bundles, both halves.

    Coverage-guided (atheris, libFuzzer), from seeds that the code writes itself. A decoder may only refuse, by its own
    error, in bounded time and memory; anything else is a crash, is printed with its input, and ends this with status 1.
    """
    found = measure(seconds, seed, runs, corpus)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        typer.echo(f"{'target':22} {'runs':>9} {'taken':>9} {'refused':>9} {'edges':>7} {'slowest':>9}")
        for name, row in found["targets"].items():
            slowest = f"{1000 * row['slowest_s']:.1f} ms"
            typer.echo(f"{name:22} {row['runs']:9} {row['taken']:9} {row['refused']:9} {row['edges']:7} {slowest:>9}")
        typer.echo(
            f"{found['runs']} inputs, {found['edges']} edges, corpus of {found['corpus']}, "
            f"at most {found['memory_mib']:.0f} MiB more memory, {len(found['crashes'])} crashes"
        )
        for crash in found["crashes"]:
            typer.echo(f"\n{crash['target']}: {crash['error']}\ninput (hex): {crash['input']}")
    if found["crashes"]:
        raise typer.Exit(1)


def measure(
    seconds: float, seed: int = 1, runs: int = 0, corpus: Path | None = None, targets: str | None = None
) -> dict[str, Any]:
    """The figures as plain data; ``targets`` is ``module:function`` for others than those installed.

    Raises :class:`ConfigError` where atheris is not installed.
    """
    if find_spec("atheris") is None:
        raise ConfigError("fuzz: needs atheris, which has wheels for Linux on x86-64; pip install 'talaria[fuzz]'")
    with tempfile.TemporaryDirectory() as temporary:
        folder = corpus or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for old in (*folder.glob("*/stats.json"), *folder.glob("*/log")):
            old.unlink()
        for old in folder.glob("*/*-*"):  # an input that failed then is tried again, and may pass by now
            old.replace(old.parent / "corpus" / old.name)
        args = [sys.executable, "-P", "-m", "talaria_bench.fuzz.loop", folder, seconds, runs, seed]
        args += [] if targets is None else [targets]
        done = subprocess.run(
            list(map(str, args)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        rows, crashes = {}, []
        for log in sorted(folder.glob("*/log")):
            said, stats = log.read_text(errors="replace"), log.with_name("stats.json")
            seen = (_COVERAGE.findall(said) or [(0, 0)])[-1]
            row = json.loads(stats.read_text()) if stats.exists() else dict(_NONE)
            rows[log.parent.name] = row | {"edges": int(seen[0]), "corpus": int(seen[1])}
            failed = [file.read_bytes().hex() for file in log.parent.glob("*-*")]
            for data in failed or [""] * (not stats.exists()):  # it ended at a seed of its own, or was killed
                crashes.append({"target": log.parent.name, "input": data, "error": _error(said)})
        if done.returncode and not crashes:
            crashes.append({"target": "", "input": "", "error": done.stdout[-4000:]})
    total = {name: sum(row[name] for row in rows.values()) for name in ("runs", "edges", "corpus")}
    most = max((row["memory_mib"] for row in rows.values()), default=0.0)
    return {"seconds": seconds, "seed": seed, **total, "memory_mib": most, "crashes": crashes, "targets": rows}


def _error(said: str) -> str:
    """The traceback, or the last that was said."""
    begin = said.find(" === Uncaught Python exception: ===")
    return said[begin:][:4000].strip() if begin >= 0 else said[-2000:]
