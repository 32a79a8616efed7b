"""What needs torch and is asked for where torch is not wanted: made by a process of its own, which ends with it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from talaria import plugins
from talaria.errors import ConfigError, TalariaError

if TYPE_CHECKING:
    from talaria.federated.run import Run

_REFUSED = 3
"""How the process ends where the run is to blame; its last line says why."""


def made(module: str, run_json: str, failed: str) -> bytes:
    """What ``python -m MODULE``, whose main is :func:`main`, makes of the JSON of a run.

    Raises :class:`ConfigError`, as that process says it, or ``failed`` with what it said last where it ended otherwise.
    """
    asked = json.dumps({"run": run_json, "beside": plugins.beside()})
    # The run is our own settings' and was read from them; the process is this very program. Ctrl-C in a terminal is for
    # who asks: in a session of its own this one does not hear it.
    done = subprocess.run(
        [sys.executable, "-m", module], input=asked.encode(), capture_output=True, check=False, start_new_session=True
    )
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        if done.returncode == _REFUSED:
            raise ConfigError(said[-1])
        raise ConfigError(f"{failed} (exit {done.returncode}): {said[-1][:300]}")
    return done.stdout


def main(make: Callable[[Run], bytes]) -> int:
    """What the process does: a run's JSON from standard input, what ``make`` makes of it to standard output."""
    from talaria.federated.run import Run

    asked: dict[str, Any] = json.load(sys.stdin)
    for folder in asked["beside"]:
        plugins.look_in(Path(folder))
    out = sys.stdout.buffer
    sys.stdout = sys.stderr  # what a model of somebody's own prints is no part of the file
    try:
        out.write(make(Run.from_json(asked["run"], allow=None)))
    except TalariaError as error:
        sys.stderr.write(f"\n{' '.join(str(error).split())}\n")
        return _REFUSED
    return 0
