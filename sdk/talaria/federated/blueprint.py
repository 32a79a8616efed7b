"""What only torch can say of a run's model: where all begin, which channels it has, what is body and what head.

As a file it serves a program that never trains and so needs no torch. A process of its own makes it (:func:`made`):
``python -m talaria.federated.blueprint < RUN.JSON > FILE``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from talaria import plugins
from talaria.errors import ConfigError, StateError, TalariaError, WireError
from talaria.foreign import parsed
from talaria.model.masks import ChannelLayout
from talaria.model.split import Split
from talaria.tensors import Tensors, only
from talaria.wire import strict_safetensors
from talaria.wire.codec import TensorSpec

VERSION = 1
MOST = 40_000
"""Tensors that a file may hold."""
_META = "talaria-blueprint"
_REFUSED = 3
"""How the process ends where the run is to blame; its last line says why."""


@dataclass(frozen=True)
class Blueprint:
    """``schema`` of the shared state in its own order, the model's channel groups and its parts; ``first`` gives the
    shared state that all begin from."""

    schema: Mapping[str, TensorSpec]
    layout: ChannelLayout
    split: Split
    first: Callable[[], Tensors] = field(repr=False)


def encode(shared: Tensors, layout: ChannelLayout, split: Split) -> bytes:
    """The file: ``shared`` as safetensors, with all else in its header."""
    parts = asdict(split) | {"statistics": sorted(split.statistics), "counters": sorted(split.counters)}
    about = {
        "v": VERSION,
        "names": list(shared),
        "sizes": dict(layout.sizes),
        "axes": {key: [[list(part) for part in axis] for axis in axes] for key, axes in layout.axes.items()},
        "split": parts,
    }
    return strict_safetensors.pack(shared, {_META: json.dumps(about, separators=(",", ":"))})


def decode(data: bytes, first: Callable[[], Tensors] | None = None) -> Blueprint:
    """The blueprint in a file; ``first`` reads the shared state again when it is asked for (None: it is kept).

    Raises :class:`StateError` for anything that :func:`encode` does not write.
    """
    try:
        entries, meta = strict_safetensors.unpack(data, most=MOST)
        about = parsed(meta[_META])
        if about["v"] != VERSION:
            raise StateError(f"blueprint: version {about['v']}, this Talaria reads {VERSION}; make it again")
        schema = {name: TensorSpec(entries[name].shape, entries[name].dtype) for name in about["names"]}
        axes = {k: tuple(tuple((g, n) for g, n in axis) for axis in v) for k, v in about["axes"].items()}
        parts: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in about["split"].items()}
        sets: dict[str, Any] = {name: frozenset(parts[name]) for name in ("statistics", "counters")}
        split = Split(**parts | sets)
    except (KeyError, TypeError, ValueError, AttributeError, WireError) as error:
        raise StateError(f"blueprint: damaged ({type(error).__name__}: {str(error)[:100]}); make it again") from None
    kept = first or (lambda: only({name: entry.array() for name, entry in entries.items()}, schema))
    return Blueprint(schema, ChannelLayout(about["sizes"], axes), split, kept)


def made(run_json: str) -> bytes:
    """The file of a run (:meth:`talaria.federated.run.Run.to_json`), made in a process of its own, which ends with it.

    Raises :class:`ConfigError`, as that process says it, where the run's model cannot be had.
    """
    asked = json.dumps({"run": run_json, "beside": plugins.beside()})
    # The run is our own settings' and was read from them; the process is this very program.
    done = subprocess.run(
        [sys.executable, "-m", "talaria.federated.blueprint"], input=asked.encode(), capture_output=True, check=False
    )
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        if done.returncode == _REFUSED:
            raise ConfigError(said[-1])
        raise ConfigError(f"run: its model cannot be worked out (exit {done.returncode}): {said[-1][:300]}")
    return done.stdout


def main() -> int:
    """What the process does: a run's JSON from standard input, its blueprint to standard output."""
    from pathlib import Path

    from talaria.federated import rounds
    from talaria.federated.run import Run

    asked: dict[str, Any] = json.load(sys.stdin)
    for folder in asked["beside"]:
        plugins.look_in(Path(folder))
    out = sys.stdout.buffer
    sys.stdout = sys.stderr  # what a model of somebody's own prints is no part of the file
    try:
        run = Run.from_json(asked["run"], allow=None)
        out.write(encode(rounds.first_shared(run), rounds.layout_of(run.spec), rounds.split_of(run)))
    except TalariaError as error:
        sys.stderr.write(f"\n{' '.join(str(error).split())}\n")
        return _REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main())
