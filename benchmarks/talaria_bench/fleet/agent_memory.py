"""``talaria bench agent``: what a device's agent takes where torch is not, from its start to its last round.

A Mosquitto and a coordinator on this machine, and agents in processes of their own that get their kit over MQTT, learn
imu_cnn by FedRep on made-up windows, and personalize. Each agent's memory and CPU are read as it tells its events.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from talaria.errors import StateError
from talaria.federated.run import Run
from talaria.model.spec import ModelSpec
from talaria.types import Recipe
from talaria_bench import bars
from talaria_bench.fleet import meters
from talaria_bench.fleet.files import new_folder, write_fleet
from talaria_bench.fleet.programs import ENVIRONMENT, TALARIA

SHAPE, CLASSES, WINDOWS, BATCH = (6, 100), 7, 210, 16
WITHOUT = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "torchvision", "functorch"):
            raise ImportError(f"{name} is not here")
sys.meta_path.insert(0, Hidden())
"""
END_S = 300.0


@dataclass(frozen=True)
class Moment:
    """What a process had used when it told an event: CPU seconds, and MiB of memory: resident now, of it anonymous, and
    the most resident so far."""

    event: str
    cpu_s: float
    rss_mb: float
    anonymous_mb: float
    peak_mb: float


def agent(
    devices: Annotated[int, typer.Option(help="Agents, each a process of its own.", min=1, max=16)] = 2,
    rounds: Annotated[int, typer.Option(help="Rounds of learning.", min=1, max=999)] = 5,
    python: Annotated[
        Path | None,
        typer.Option(
            help="Of a venv after `pip install .`; this one, without torch, unless given.", exists=True, dir_okay=False
        ),
    ] = None,
    bundle: Annotated[bool, typer.Option("--bundle", help="Write bundles too, which takes onnx.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw memory by event here, as SVG.", callback=bars.place)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Measure agents without torch: CPU until connected, and memory as they learn imu_cnn. Linux; needs Mosquitto."""
    folder = new_folder("agent")
    try:
        found = measured(folder, devices, rounds, python, bundle)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if plot is not None:
        panels = {name: {one["event"]: one["rss_mb"] for one in moments} for name, moments in found["agents"].items()}
        bars.draw(panels, "MiB", plot)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    for device, moments in found["agents"].items():
        typer.echo(f"\n{device:16}{'CPU s':>8}{'MiB':>8}{'anonymous':>11}{'peak':>8}")
        for one in moments:
            typer.echo(
                f"{one['event']:16}{one['cpu_s']:>8.2f}{one['rss_mb']:>8.1f}"
                f"{one['anonymous_mb']:>11.1f}{one['peak_mb']:>8.1f}"
            )


def measured(
    folder: Path, devices: int, rounds: int, python: Path | None = None, bundle: bool = False
) -> dict[str, Any]:
    """The moments of each agent; plain data."""
    names = [f"device{i}" for i in range(devices)]
    run = Run(
        spec=ModelSpec("imu_cnn", SHAPE, CLASSES, seed=1),
        algorithm="fedrep", rounds=rounds, seed=0, recipe=Recipe(batch=BATCH, epochs=1),
    )  # fmt: skip
    config = write_fleet(folder, run, "mosquitto", fleet={"members": names}, rounds={"retry_s": 0.5})
    serve = [sys.executable, "-c", TALARIA, "coordinator", "serve", str(config), "--json"]
    coordinator = subprocess.Popen(serve, stdout=subprocess.PIPE, text=True, env=os.environ | ENVIRONMENT)
    agents: dict[str, _Watched] = {}
    try:
        ready = (told["broker"] for told in map(json.loads, coordinator.stdout or ()) if told["event"] == "ready")
        if (url := next(ready, None)) is None:
            coordinator.communicate()
            raise StateError("agent: the coordinator ended before it was ready; what it said is above")
        threading.Thread(target=lambda: list(coordinator.stdout or ()), daemon=True).start()
        agents = {name: _Watched(_files(folder, name, i, url, bundle), python) for i, name in enumerate(names)}
        found = {name: one.end() for name, one in agents.items()}
        coordinator.wait(END_S)
    finally:
        for process in (coordinator, *(one.process for one in agents.values())):
            process.kill()
            process.wait()
    return {"agents": found, "load": os.getloadavg()[0], "rounds": rounds}


def _files(folder: Path, device: str, seed: int, url: str, bundle: bool) -> Path:
    rng = np.random.default_rng(seed)
    y = np.arange(WINDOWS) % CLASSES
    x = (rng.standard_normal((WINDOWS, *SHAPE)) + 0.3 * y[:, None, None]).astype(np.float32)
    np.savez(folder / f"{device}.npz", x=x, y=y)
    path = folder / f"{device}.toml"
    into = f'bundle = "{device}.talaria"\n' if bundle else ""
    path.write_text(
        f'[device]\nid = "{device}"\nengine = "onnx"\n{into}[fleet]\nname = "bench"\nbroker = "{url}"\nretry_s = 0.5\n'
        f'[data]\nsource = "npz"\npath = "{device}.npz"\n'
    )
    return path


class _Watched:
    """An agent whose memory is read at each of its events."""

    def __init__(self, file: Path, python: Path | None) -> None:
        code = TALARIA if python is not None else WITHOUT + TALARIA
        command = [str(python or sys.executable), "-c", code, "edge", "run", str(file), "--json"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | ENVIRONMENT)
        self._moments: list[Moment] = []
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        for line in self.process.stdout or ():
            if (found := moment(self.process.pid, json.loads(line)["event"])) is not None:
                self._moments.append(found)

    def end(self) -> list[dict[str, Any]]:
        self._thread.join(END_S)
        if self.process.wait(END_S):
            raise StateError(f"agent: one ended with status {self.process.returncode}; what it said is above")
        return [asdict(one) for one in self._moments]


def moment(pid: int, event: str) -> Moment | None:
    """What process ``pid`` has used so far; None where it has ended."""
    try:
        rollup = _kib(Path(f"/proc/{pid}/smaps_rollup"))
        return Moment(event, meters.cpu_s(pid), rollup["Rss"] / 1024, rollup["Anonymous"] / 1024, meters.peak_mib(pid))
    except (OSError, KeyError):
        return None


def _kib(path: Path) -> dict[str, int]:
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) == 3 and words[2] == "kB"}
