"""Learning that is exact: each device adds whole numbers of its own, so that a global model says who counted in it,
and how often. All that stands around it (staging, checks on arrival, folds, commits) is the programs' own.

A global model is ``marks``, one per device of :data:`NAMES` (how often it counted), and ``notes`` (sums of what the
updates say of their round). A device's private part counts its own rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from talaria.errors import WireError
from talaria.federated.run import Run
from talaria.federated.warm_start import Carried
from talaria.model.spec import ModelSpec
from talaria.tensors import Tensors
from talaria.types import Update
from talaria.wire import codec
from talaria_coordinator.fleet.aggregation import Learning
from talaria_edge.agent.training import Learner
from talaria_edge.storage.state import Private

NAMES = ("anna", "bela", "carl", "dora", "emil", "fred")
ZERO: Tensors = {"marks": np.zeros(len(NAMES)), "notes": np.zeros(2)}
SCHEMA = codec.schema_of(ZERO)
POISON = 13.0
"""A mark that is well-formed on arrival and that no fold takes."""


def run_of(rounds: int) -> Run:
    """What the fleet of a history learns."""
    return Run(
        spec=ModelSpec("imu_cnn", (6, 32), 3),
        algorithm="fedavg",
        rounds=rounds,
    )


def shares(device: str, round: int, private: int) -> Tensors:
    """What an honest device adds in round ``round``, its ``private``-th."""
    marks, notes = np.zeros_like(ZERO["marks"]), np.zeros_like(ZERO["notes"])
    marks[NAMES.index(device)] = 1.0
    notes[0], notes[1] = float(round * 8191 % 997), float(private)
    return {"marks": marks, "notes": notes}


def added(model: Tensors, update: Update) -> Tensors:
    """The global model with one update more."""
    return {name: model[name] + update.tensors[name] for name in model}


def opened(data: bytes) -> Tensors:
    """A global model's tensors."""
    return codec.decode_tensors(data, schema=SCHEMA)


def checked(data: bytes, device: str) -> Update:
    """The update in ``data``, which ``device`` must have made."""
    return codec.decode_update(data, schema=SCHEMA, client=device)


@dataclass(frozen=True)
class ExactLearning(Learning):
    """The coordinator's side: its maths, and nothing of what stands around them."""

    @property
    def dense(self) -> int:
        return sum(v.nbytes for v in ZERO.values())

    @property
    def least(self) -> int:
        return 1

    def _start(self) -> tuple[Tensors, Tensors]:
        return dict(ZERO), {}

    def _carried(self, old: Run, data: bytes, state: Path) -> Carried:
        return Carried(opened(data), (), (), ())

    def _first_server(self, shared: Tensors) -> Tensors:
        return {}

    def _model(self, data: bytes) -> Tensors:
        return opened(data)

    def _opened(self, data: bytes, device: str, most: int | None, size: int) -> Update:
        return checked(data, device)

    def _require(self, shared: Tensors, update: Update) -> None:
        """The codec has looked at names, shapes and norms."""

    def _close(self, shared: Tensors, server: Tensors, updates: Iterator[Update]) -> tuple[Tensors, Tensors]:
        model = shared
        for update in updates:
            if POISON in update.tensors["marks"]:
                raise WireError("there is an update that cannot be folded")
            model = added(model, update)
        return model, server


@dataclass(frozen=True)
class ExactLearner(Learner):
    """A device's side; ``lie`` says what is wrong with its updates from now on, if anything, and ``refuses`` whether
    its gate lets the bundle of this run not pass."""

    lie: Callable[[], str] = field(default=lambda: "", compare=False)
    refuses: Callable[[Run], bool] = field(default=lambda run: False, compare=False)

    def _own(self, private: Private | None, model_digest: bytes) -> Tensors | None:
        return None if private is None else private.tensors

    def keeps(self, last: bool = False) -> bytes:
        """All: there are no channels here."""
        return b""

    def finish(self, model_digest: bytes) -> dict[str, Any]:
        """What the gate says of the model, after all that a device does before it on flash."""
        self.store.publish()
        private = self.private()
        self.model(model_digest)
        deployed = not self.refuses(self.run)
        said = {"deployed": deployed, "worse": not deployed, "why": "as the history says"}
        return {"rounds": 0 if private is None else private.round, **said}

    def _trained(self, round: int, model: bytes, own: Tensors | None) -> tuple[bytes, Tensors, dict[str, float]]:
        opened(self.model(model))
        done = 0 if own is None else int(own["rounds"])
        name, lie = self.config.device, self.lie()
        tensors, private = shares(name, round, done + 1), {"rounds": np.array(done + 1, np.float32)}
        if lie == "poison":
            tensors["marks"][NAMES.index(name)] = POISON
        elif lie == "huge":
            tensors["notes"][0] = 1e9
        update = Update(
            tensors=tensors,
            weight=1.0,
            client="nobody" if lie == "name" else name,
            base_version=round if lie == "base" else round - 1,
            kind="delta",
        )
        before = self.store.folder / "replayed"
        if lie == "replay" and before.exists():
            return before.read_bytes(), private, {}
        sent = codec.encode_update(update)
        if lie == "replay":
            before.write_bytes(sent)
        return sent, private, {}
