"""What a fleet of light devices pretends to learn: a global model of a given size, and updates made from one
template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from talaria.federated import global_model, rounds
from talaria.federated.run import Run
from talaria.model.spec import ModelSpec
from talaria.types import Recipe, Update
from talaria.wire import codec
from talaria_bench.fleet.files import CLASSES, write_fleet
from talaria_bench.fleet.meters import MIB
from talaria_coordinator.storage.blobs import FolderBlobs
from talaria_coordinator.storage.store import Store

HIDDEN, REST = 128, 128 + 128 * 64 + 64 + 64 * CLASSES + CLASSES
"""Of ``mlp``: outputs of its first layer, and parameters beside that layer's weights."""


def run_of(model_mib: float, count: int, fraction: float) -> Run:
    """``count`` rounds of plain averaging over a global model of about ``model_mib`` MiB."""
    features = max(1, round((model_mib * MIB / 4 - REST) / HIDDEN))
    spec = ModelSpec("mlp", (features,), CLASSES, seed=1)
    return Run(spec=spec, algorithm="fedavg", rounds=count, fraction=fraction, recipe=Recipe(epochs=1, batch=8))


def write_updates(folder: Path, run: Run, device: str) -> int:
    """Updates of ``device`` for every round, in two parts (:class:`~.fake_devices.Job`); the size of one in bytes."""
    folder.mkdir(parents=True)
    shared, _ = rounds.start(run)
    size = 0
    for round in range(1, run.rounds + 1):
        update = Update(tensors=shared, weight=1.0, client=device, base_version=round - 1)
        data = codec.encode_update(update, "raw", compress=False)
        at = 8 + int.from_bytes(data[:8], "little")
        (folder / f"head-{round}").write_bytes(data[:at])
        if round == 1:
            (folder / "tail").write_bytes(data[at:])
        size = len(data)
    return size


def write_config(
    folder: Path, run: Run, devices: int, url: str, *, retry_s: float, quorum: float = 1.0,
    more: Mapping[str, Mapping[str, Any]] | None = None,
) -> Path:  # fmt: skip
    """``fleet.toml``: learn once all devices are there, and wait long for each."""
    limits = {"deadline_s": 3600, "quorum": quorum, "retry_s": retry_s, "max_update": 1 << 30}
    return write_fleet(folder, run, url, fleet={"devices": devices}, rounds=limits, more=more)


def first_value(state: Path, fleet: str) -> float | None:
    """The value of the last global model at the place that each device makes its own: the first in the file."""
    with Store(state / "coordinator.db") as store:
        known = store.fleets.get(fleet)
    if known is None:
        return None
    return _first(Run.from_json(known.run, allow=None), FolderBlobs(state / "blobs").get(known.model_digest))


def begun_with(run: Run) -> float:
    """That value of the model that a run begins with."""
    return _first(run, global_model.encode_model(rounds.start(run)[0], run.download))


def _first(run: Run, data: bytes) -> float:
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    (name,) = (k for k, v in header.items() if k != "__metadata__" and v["data_offsets"][0] == 0)
    return float(global_model.decode_model(run, data)[name].flatten()[0])
