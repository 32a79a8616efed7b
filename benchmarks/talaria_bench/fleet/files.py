"""The files of a small fleet: its configuration and, for every device, its own and its data."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import typer

from talaria.errors import ConfigError
from talaria.federated.run import Engine, Member, Run
from talaria.model.spec import ModelSpec
from talaria.types import Recipe, Samples
from talaria_bench.folders import made

FLEET = "bench"
FEATURES, CLASSES = 768, 3
"""The global model of ``mlp`` on so many features is four chunks long."""


def run_of(algorithm: str, rounds: int, seed: int) -> Run:
    """What the fleet learns: a small network, one short epoch a round."""
    spec = ModelSpec("mlp", (FEATURES,), CLASSES, seed=1)
    return Run(spec=spec, algorithm=algorithm, rounds=rounds, seed=seed, recipe=Recipe(batch=8, epochs=1))


def new_folder(bench: str, given: Path | None = None) -> Path:
    """An empty folder for a broker's state and more: that ``given``, or one with ``bench`` in its name."""
    if given is not None:
        if given.exists() and (not given.is_dir() or any(given.iterdir())):  # a fleet of before would go on there
            raise ConfigError(f"--folder {given}: is there already and not empty; give the name of a new folder")
        return made(f"--folder {given}", given)
    folder = Path(tempfile.mkdtemp(prefix=f"talaria-{bench}-"))
    folder.chmod(0o711)  # so that Mosquitto, where root starts it, can be another user
    return folder


def leave(folder: Path, given: Path | None, *, kept: bool) -> None:
    """Remove the :func:`new_folder` that nobody named where all was ``kept``, or nothing begun; else say where it is,
    also of what was interrupted."""
    begun = folder.exists() and any(folder.iterdir())
    if given is None and (kept or not begun):
        shutil.rmtree(folder)
    elif begun and not kept:
        typer.echo(f"talaria: what it left is in {folder}", err=True)


def write_data(path: Path, seed: int) -> None:
    """Samples of one device, from ``seed``."""
    rng = np.random.default_rng(seed)
    y = np.arange(36) % CLASSES
    x = (rng.standard_normal((36, FEATURES)) + y[:, None]).astype(np.float32)
    np.savez(
        path, x_train=x[:24], y_train=y[:24], x_val=x[24:30], y_val=y[24:30], x_test=x[30:], y_test=y[30:],
    )  # fmt: skip


def member(path: Path, device: str, engine: Engine = "torch") -> Member:
    """The same device as the simulator sees it."""
    with np.load(path, allow_pickle=False) as found:
        train, val = (Samples(found[f"x_{part}"], found[f"y_{part}"]) for part in ("train", "val"))
    return Member(device, train, val, engine=engine)


def write_fleet(
    folder: Path, run: Run, url: str, *, fleet: Mapping[str, Any], rounds: Mapping[str, Any],
    more: Mapping[str, Mapping[str, Any]] | None = None,
) -> Path:  # fmt: skip
    """``fleet.toml`` in ``folder``, with what ``[fleet]`` says beside the name, what ``[rounds]`` does, and ``more``
    tables."""
    spec, recipe = run.spec, run.recipe
    learned = {"algorithm": run.algorithm, "rounds": run.rounds, "seed": run.seed, "fraction": run.fraction}
    shape = list(spec.input_shape)
    tables: dict[str, Mapping[str, Any]] = {
        "fleet": {"name": FLEET, "stay": False, **fleet},
        "broker": {"url": url},
        "rounds": rounds,
        "run": learned,
        "run.spec": {"name": spec.name, "input_shape": shape, "classes": spec.classes, "seed": spec.seed},
        "run.recipe": {"epochs": recipe.epochs, "batch": recipe.batch},
    }
    for name, values in (more or {}).items():
        tables[name] = {**tables.get(name, {}), **values}
    path = folder / "fleet.toml"
    # Plain values read alike in TOML and JSON.
    lines = ([f"[{table}]", *(f"{k} = {json.dumps(v)}" for k, v in values.items())] for table, values in tables.items())
    path.write_text("\n".join(line for table in lines for line in table) + "\n")
    return path


def write_device(folder: Path, device: str, url: str, *, retry_s: float, engine: Engine = "torch") -> Path:
    """``DEVICE.toml`` in ``folder``."""
    path = folder / f"{device}.toml"
    path.write_text(
        f"""
[device]
id = "{device}"
engine = "{engine}"
[fleet]
name = "{FLEET}"
broker = "{url}"
retry_s = {retry_s}
[data]
source = "npz"
path = "{device}.npz"
"""
    )
    return path
