"""What the algorithms have in common that share some parts of one model and keep the rest."""

from collections.abc import Collection

from torch.nn import Module

from talaria.errors import ConfigError
from talaria.tensors import only
from talaria.training.loop import state_of
from talaria.types import Part, Split, Task, Tensors, Update

WHOLE: tuple[Part, ...] = ("body", "adapters", "head")
PERSONAL = "personal/"
"""Prefix of a second, private model among a device's private tensors."""


def parted(model: Module, split: Split, *parts: Part) -> tuple[Tensors, Tensors]:
    """``(shared, private)``: the keys of ``parts`` that may travel, and all the rest."""
    state = state_of(model)
    return only(state, split.travels(*parts)), only(state, split.stays(*parts))


def update(task: Task, state: Tensors, keys: Collection[str], **metrics: float) -> Update:
    """The update that sends the values of ``keys``, weighted by the number of training samples."""
    return Update(
        only(state, keys),
        weight=float(len(task.train)),
        client=task.client,
        mask=task.mask,
        metrics=metrics,
    )


def require(algorithm: str, **fields: tuple[bool, object, str]) -> None:
    """Raise :class:`ConfigError` for the first field whose condition fails: ``name=(ok, value, "must ...")``."""
    for name, (ok, value, rule) in fields.items():
        if not ok:
            raise ConfigError(f"{algorithm}: {name}={value!r} {rule}")


def refuse_neutral(algorithm: str, field: str, value: object, effect: str, allowed: bool) -> None:
    """Refuse a value that switches the method off, unless ``allow_degenerate`` asks for it."""
    if not allowed:
        raise ConfigError(
            f"{algorithm}: {field}={value!r} {effect}; choose another value, or set allow_degenerate=true to compare"
        )
