"""Compact adapters: a few trainable weights beside or behind frozen layers, merged away where that is exact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.nn import Module


@dataclass(frozen=True)
class AdapterSpec:
    kind: str = "lowrank"
    rank: int = 8
    where: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "rank": self.rank, "where": list(self.where)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> AdapterSpec:
        return cls(data["kind"], data["rank"], tuple(data["where"]))


def insert(model: Module, spec: AdapterSpec, skip: Sequence[str] = ()) -> Module:
    return model
