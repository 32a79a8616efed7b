"""A layer that a network holds under two names keeps those that its pass needs.

A block may hold its convolutions as attributes and in a Sequential too, and call that alone. A state would have their
tensors twice, and a program could not tell which it writes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from torch.nn import Module

from talaria import seeds
from talaria.model.cloning import clone
from talaria.model.dependency_groups import TRACE_ERRORS


def spare(module: Module, example: Tensor) -> tuple[str, ...]:
    """Names of layers with weights that have another one, and without which ``module`` answers ``example`` as before.
    ``module`` stays as it is, and torch's global generator too."""
    if _of_two(module, ()) is None:
        return ()
    twin, found, needed = clone(module).eval(), list[str](), set[str]()
    wanted = _answer(twin, example)
    while wanted is not None and (name := _of_two(twin, needed)) is not None:
        less = without(clone(twin), [name])
        answer = _answer(less, example)
        if answer is not None and torch.equal(answer, wanted):
            found.append(name)
            twin = less
        else:
            needed.add(name)
    return tuple(found)


def without(module: Module, names: Sequence[str]) -> Module:
    """``module``, in which these names are gone."""
    for name in names:
        owner, _, own = name.rpartition(".")
        del module.get_submodule(owner)._modules[own]
    return module


def _of_two(module: Module, needed: Collection[str]) -> str | None:
    """The first name of a layer with weights that has another one, and is not among ``needed``."""
    every = [(name, one) for name, one in module.named_modules(remove_duplicate=False) if one.state_dict()]
    many = [id(one) for _, one in every]
    return next((name for name, one in every if many.count(id(one)) > 1 and name not in needed), None)


def _answer(module: Module, example: Tensor) -> Tensor | None:
    with torch.no_grad(), seeds.aside():
        try:
            found = module(example)
        except TRACE_ERRORS:
            return None
    return found if isinstance(found, Tensor) else None
