"""The work that every candidate does, and how it is measured: FedAvg over all clients of a data set, by SGD.

Imported by the candidates, each in a venv of its own; Talaria gives them the samples and the first model alone.
"""

import json
import os
import socket
import sys
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.nn import Module
from torch.nn import functional as F

from talaria.data import Federated, load
from talaria.data.presets import default_of
from talaria.model import zoo
from talaria.model.spec import ModelSpec
from talaria.model.state import tensor_of

BATCH, LR = 10, 0.01
RECIPE = {
    "epochs": 1,
    "batch": BATCH,
    "lr": LR,
    "momentum": 0.0,
    "weight_decay": 0.0,
    "smoothing": 0.0,
    "augment": "none",
}
"""What :func:`epoch` is to Talaria, whatever a data set's own recipe says."""


def asked() -> dict[str, Any]:
    """What the command line says: the data set, the partition or None, rounds."""
    name, partition, rounds = sys.argv[1:4]
    return {"name": name, "partition": partition if partition != "-" else None, "rounds": int(rounds)}


def data_of(name: str, partition: str | None) -> Federated:
    """The data set; the partition fixes which images are whose. PEERS_CLIENTS may keep the first few clients."""
    data = load(name) if partition is None else load(name, partition=Path(partition))
    few = int(os.environ.get("PEERS_CLIENTS", len(data.clients)))
    return replace(data, clients=dict(list(data.clients.items())[:few]))


def spec_of(data: Federated) -> ModelSpec:
    """The data set's own model, the same first weights for everybody."""
    model = default_of(data.name).model
    if model is None:
        raise SystemExit(f"{data.name}: has no model of its own; take smartwatch or fashion-mnist")
    return ModelSpec(model, data.input_shape, data.classes)


def model_of(data: Federated) -> Module:
    """That model."""
    torch.set_num_threads(1)
    return zoo.build(spec_of(data))


def epoch(model: Module, x: torch.Tensor, y: torch.Tensor) -> None:
    """One epoch as one writes it by hand."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for index in torch.randperm(len(y)).split(BATCH):
        optimizer.zero_grad()
        F.cross_entropy(model(x[index]), y[index]).backward()
        optimizer.step()


def accuracy(model: Module, data: Federated) -> float:
    """The mean over clients of the global model's accuracy on their test samples."""
    model.eval()
    found = []
    with torch.no_grad():
        for client in data.clients.values():
            found.append(float((model(tensor_of(client.test.x)).argmax(1) == tensor_of(client.test.y)).float().mean()))
    return sum(found) / len(found)


def free_port() -> int:
    """A port of this machine alone that nobody listens at."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Meter:
    """CPU seconds, wall seconds and memory of this process and all below it, round by round; the first begins with the
    process, so that what is imported and prepared is in it.

    ``reaped`` counts also those who came and went between two rounds, as the one who started them has it in its books:
    for a peer that has a process for each training, none of which is there when a round is over.
    """

    def __init__(self, reaped: bool = False) -> None:
        self.rounds: list[dict[str, float]] = []
        self._fields = 4 if reaped else 2
        self._gone: dict[tuple[int, float], float] = {}
        self._cpu, self._wall = 0.0, time.monotonic() - (time.time() - psutil.Process().create_time())

    def round(self) -> None:
        """A round is over."""
        cpu, wall = self._spent(), time.monotonic()
        self.rounds.append({"cpu_s": cpu - self._cpu, "wall_s": wall - self._wall, "memory_mb": _memory()})
        self._cpu, self._wall = self._spent(), time.monotonic()

    def _spent(self) -> float:
        for one in _family():
            try:
                self._gone[one.pid, one.create_time()] = sum(one.cpu_times()[: self._fields])
            except psutil.Error:
                continue
        return sum(self._gone.values())

    def tell(self, score: float, packages: tuple[str, ...] = (), **more: Any) -> None:
        """Print what was measured, as the last line of stdout."""
        versions = {name: version(name) for name in ("torch", "numpy", *packages)}
        told = {"rounds": self.rounds, "accuracy": score, "versions": versions, **more}
        print(f"\nmeasured {json.dumps(told)}", flush=True)


def _family() -> list[psutil.Process]:
    own = psutil.Process(os.getpid())
    return [own, *own.children(recursive=True)]


def _memory() -> float:
    """Proportional set sizes in MB: what processes share counts once."""
    total = 0
    for one in _family():
        try:
            total += one.memory_full_info().pss
        except psutil.Error:
            continue
    return total / 1e6
