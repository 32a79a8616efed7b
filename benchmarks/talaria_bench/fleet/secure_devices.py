"""What a light device brings to secure rounds: its keys, and its part as the agent plays it, on flash before a word is
said. What it learned is a step of its own in the first value of each tensor, and zeros."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from talaria.errors import DataError
from talaria.federated.private_rule import coordinates_of
from talaria.federated.run import Run
from talaria.privacy.in_process import Contribution
from talaria.privacy.terms import Terms
from talaria.protocol import actions as a
from talaria_bench.fleet import keys
from talaria_edge.agent.asked import asked_of
from talaria_edge.agent.secure import Part, Said
from talaria_edge.config import DeviceConfig
from talaria_edge.data import DeviceData, Given
from talaria_edge.identity.connection import credentials_of

RUN = "run.json"
STEP_S = 60.0


def value_of(device: str) -> float:
    """The value that ``device`` puts into its update, exact in 32 bits."""
    return int(sha256(device.encode()).hexdigest()[:4], 16) / 65536


def made(folder: Path, run: Run, devices: Sequence[str], url: str, degree: int) -> Mapping[str, Mapping[str, Any]]:
    """Make the keys of a fleet and its devices, and say the run; what ``fleet.toml`` says of it."""
    tables = keys.made(folder, devices, url)
    (folder / RUN).write_text(run.to_json())
    return {**tables, "privacy": {**tables["privacy"], "degree": degree, "step_s": STEP_S}}


def nothing() -> DeviceData:
    """Light devices have no samples."""
    raise DataError("a light device learns nothing")


class SecurePart:
    """One light device's part in secure rounds."""

    def __init__(self, folder: Path, fleet: str, device: str) -> None:
        self._device, self._folder = device, folder
        own = credentials_of(folder / f"id-{device}", fleet, device)
        self.keys: dict[str, Any] = {"signer": own.signer, "coordinator_key": own.coordinator_key}
        state = folder / "parts" / device
        state.mkdir(parents=True, exist_ok=True)
        where = {"device": device, "fleet": fleet, "broker": "mqtt://127.0.0.1:1", "state": state}
        config = DeviceConfig(**where, source=Given(nothing), identity=folder / f"id-{device}")  # type: ignore[arg-type]
        self._part = Part(config)

    @cached_property
    def _run(self) -> Run:
        return Run.from_json((self._folder / RUN).read_text(), allow=None)

    def beginning(self, action: a.Train) -> Callable[[], Said | None]:
        """What works out its first word."""
        asked = asked_of(action.spec)
        base = action.model_digest.hex()
        return partial(self._part.begin, self._run, asked.terms, action.attempt, asked.round, base, self._brought)

    def answering(self, attempt: int, data: bytes) -> Callable[[], Said | None]:
        """What works out its answer to the coordinator's word."""
        return partial(self._part.answer, self._run, attempt, data)

    def _brought(self, terms: Terms) -> Contribution:
        steps = {name: np.zeros(shape, np.float32) for name, shape in coordinates_of(self._run).shapes.items()}
        for step in steps.values():
            step.reshape(-1)[0] = value_of(self._device)
        return Contribution(steps)
