"""Parting one model into what is shared and what stays, and the update that sends the shared part."""

from __future__ import annotations

from collections.abc import Collection

from talaria.model.split import WHOLE, Part, Split
from talaria.model.weights import Model
from talaria.tensors import Tensors, arrays, only
from talaria.training.engine import state_of
from talaria.training.interface import Task
from talaria.types import Update

__all__ = ["PERSONAL", "WHOLE", "parted", "update"]

PERSONAL = "personal/"
"""Prefix of a second, private model among a device's private tensors."""


def parted(model: Model, split: Split, *parts: Part) -> tuple[Tensors, Tensors]:
    """``(shared, private)``: the keys of ``parts`` that may travel, and all the rest."""
    state = state_of(model)
    return only(state, split.travels(*parts)), only(state, split.stays(*parts))


def update(task: Task, state: Tensors, keys: Collection[str], **metrics: float) -> Update:
    """The update that sends the values of ``keys``, weighted by the number of training samples."""
    return Update(
        arrays(only(state, keys)),
        weight=float(len(task.train)),
        client=task.client,
        mask=task.mask,
        metrics=metrics,
    )
