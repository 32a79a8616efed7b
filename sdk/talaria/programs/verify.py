"""Proof of a program on this machine: within the limits, and its test vector gives what float64 gave."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from talaria.programs import vector
from talaria.programs.program import Program
from talaria.programs.shapes import Limits

SIGMAS = 4
"""A projection under drawn signs goes beyond so many times the error that it measures once in ten thousand."""


@dataclass(frozen=True)
class Report:
    """What was found; ``ok`` where the replayed step deviates no more than ``allowed``."""

    digest: str
    model: str
    trained: str
    file_bytes: int
    operators: int
    memory_bytes: int
    multiply_adds: int
    parity: dict[str, float]
    deviation: float
    allowed: float

    @property
    def ok(self) -> bool:
        """Whether a device may train with it."""
        return self.deviation <= self.allowed and self.parity["program"] <= self.allowed / SIGMAS

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"ok": self.ok, **vars(self)}


def verify(path: Path, limits: Limits = Limits()) -> Report:
    """Open ``path`` within ``limits`` and replay its test vector.

    Raises :class:`~talaria.errors.WireError` for a file that is no program or that ONNX Runtime cannot run.
    """
    program = Program.open(path, limits)
    manifest = program.manifest
    found = vector.projections(program.run(vector.inputs(program.graph, manifest)))
    return Report(
        program.digest,
        str(manifest.model.get("name"))[:80],
        manifest.trained[:80],
        program.file_bytes,
        len(program.graph.nodes),
        program.cost.memory_bytes,
        program.cost.multiply_adds,
        dict(manifest.parity),
        vector.deviation(found, manifest.expected),
        SIGMAS * manifest.allowed,
    )
