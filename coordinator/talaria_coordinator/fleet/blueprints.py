"""What the service must know of a run's model, worked out once beside the state: the service imports no torch."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import talaria
from talaria import durable
from talaria.errors import StateError
from talaria.federated import blueprint, make_blueprint, run_model
from talaria.federated.run import Run
from talaria.wire.messages import MAX_TRANSFER
from talaria.wire.strict_safetensors import MAX_HEADER

LARGEST = 8 + MAX_HEADER + MAX_TRANSFER
"""Bytes of a blueprint: of a model that travels, and its header."""


def prepare(run: Run, state: Path) -> None:
    """Let :mod:`talaria.federated.run_model` know the run's model, from ``blueprint`` in the state folder or, the first
    time, from a process that makes it; where this one has imported torch already, for a model of its own or a rule
    that trains, it is that process. Several threads then ask for what one has worked out.

    Raises :class:`~talaria.errors.ConfigError` where the model cannot be had, and
    :class:`~talaria.errors.StateError` where the folder cannot be written.
    """
    path = beside(state, "blueprint", run)

    def read() -> blueprint.Blueprint:
        return blueprint.decode(durable.read(path, LARGEST))

    try:
        known = read()
    except (FileNotFoundError, StateError):
        data = make_blueprint.made(run.to_json()) if sys.modules.get("torch") is None else make_blueprint.here(run)
        durable.write_as("fleet:", path, data)
        known = blueprint.decode(data)
    except OSError as error:
        raise StateError(f"fleet: cannot read {path}: {error.strerror}; mend its rights") from None
    # Its tensors are needed once, if at all: they are read again instead of kept.
    run_model.adopt(run, blueprint.Blueprint(known.schema, known.layout, known.split, lambda: read().first()))


def beside(state: Path, what: str, run: Run) -> Path:
    """Where ``what`` is worked out of a run lies in the state folder; one for a run, however long it goes on: `extend`
    needs no other."""
    known = f"{talaria.__version__} {run.identity}"
    return state / f"{what}-{hashlib.sha256(known.encode()).hexdigest()[:16]}"
