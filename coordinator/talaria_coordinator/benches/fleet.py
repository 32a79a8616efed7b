"""The files of a small fleet: its configuration and, for every device, its own and its data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from talaria.model.zoo import ModelSpec
from talaria.rounds import Member, Run
from talaria.types import Recipe, Samples

FLEET = "bench"
FEATURES, CLASSES = 768, 3
"""The body of ``mlp`` on so many features is four chunks long."""


def run_of(algorithm: str, rounds: int, seed: int) -> Run:
    """What the fleet learns: a small network, one short epoch a round."""
    spec = ModelSpec("mlp", (FEATURES,), CLASSES, seed=1)
    return Run(spec=spec, algorithm=algorithm, rounds=rounds, seed=seed, recipe=Recipe(batch=8, epochs=1))


def write_data(path: Path, seed: int) -> None:
    """Samples of one device, from ``seed``."""
    rng = np.random.default_rng(seed)
    y = np.arange(36) % CLASSES
    x = (rng.standard_normal((36, FEATURES)) + y[:, None]).astype(np.float32)
    np.savez(
        path, x_train=x[:24], y_train=y[:24], x_val=x[24:30], y_val=y[24:30], x_test=x[30:], y_test=y[30:],
    )  # fmt: skip


def member(path: Path, device: str) -> Member:
    """The same device as the simulator sees it."""
    import torch

    with np.load(path, allow_pickle=False) as found:
        train, val = (
            Samples(torch.from_numpy(found[f"x_{part}"]), torch.from_numpy(found[f"y_{part}"]))
            for part in ("train", "val")
        )
    return Member(device, train, val)


def write_fleet(folder: Path, run: Run, devices: Sequence[str], url: str, *, deadline_s: float, retry_s: float) -> Path:
    """``fleet.toml`` in ``folder``."""
    path = folder / "fleet.toml"
    path.write_text(
        f"""
[fleet]
name = "{FLEET}"
members = {json.dumps(list(devices))}
stay = false
[broker]
url = "{url}"
[rounds]
deadline_s = {deadline_s}
quorum = 0.5
retry_s = {retry_s}
[run]
algorithm = "{run.algorithm}"
rounds = {run.rounds}
seed = {run.seed}
[run.spec]
name = "{run.spec.name}"
input_shape = {list(run.spec.input_shape)}
classes = {run.spec.classes}
seed = {run.spec.seed}
[run.recipe]
epochs = {run.recipe.epochs}
batch = {run.recipe.batch}
"""
    )
    return path


def write_device(folder: Path, device: str, url: str, *, retry_s: float) -> Path:
    """``DEVICE.toml`` in ``folder``."""
    path = folder / f"{device}.toml"
    path.write_text(
        f"""
[device]
id = "{device}"
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
