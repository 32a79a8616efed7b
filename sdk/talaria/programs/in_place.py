"""What a pass changes in place, as new values that take the old ones' names: whoever reads one later reads the new one.

A piece of what is changed, or what a changed piece is of, would be read as it was before: that is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import fx

from talaria.programs.layers.base import refused
from talaria.programs.layers.laid_out import EMPTY, ZEROS
from talaria.programs.layers.placing import METHODS, all_of, are_alike

_FRESH = (ZEROS, "new_zeros", torch.zeros_like, EMPTY, "new", "new_empty", torch.empty_like)
"""What makes a tensor of which each place is then given a value."""
_UNMADE = (EMPTY, "new", "new_empty", torch.empty_like)


def changes(target: Any) -> str:
    """What a method that changes its tensor does, such as ``add`` of ``add_``; nothing of any other call."""
    name = target[:-1] if isinstance(target, str) and target.endswith("_") else ""
    return name if name in METHODS else ""


class Filling:
    """Places of one dimension of a new tensor, each with its value."""

    def __init__(self, axis: int, many: int, unmade: bool) -> None:
        self.axis, self.many, self._unmade = axis, many, unmade
        self.values: dict[int, Any] = {}

    @staticmethod
    def of(x: Any, index: Any) -> Filling | None:
        """The places of ``x`` that are beginning to be filled where ``index`` is; None where ``x`` is no new tensor, or
        ``index`` not one place of one dimension."""
        found = _place(index)
        if found is None or x.node.target not in _FRESH:
            return None
        wide = x.shape
        many = wide[found[0]] if found[0] < len(wide) else None
        return Filling(found[0], many, x.node.target in _UNMADE) if isinstance(many, int) else None

    def take(self, index: Any, value: Any, wide: tuple[Any, ...]) -> bool:
        """Keep a value that stands at one place, if it does; ``wide`` is the whole tensor's shape."""
        found = _place(index)
        if found is None or found[0] != self.axis or not -self.many <= found[1] < self.many:
            return False
        rest = wide[: self.axis] + wide[self.axis + 1 :]
        if not isinstance(value, fx.Proxy) or not are_alike(cast(Any, value.shape), rest):
            return False
        self.values[found[1] % self.many] = value
        return True

    def whole(self) -> Any:
        """All places one beside the other; zeros where there is no value."""
        first = next(iter(self.values.values()))
        if self._unmade and len(self.values) < self.many:
            raise refused("setitem", "leaves places of a tensor without a value", "begin with torch.zeros")
        each = [self.values[i] if i in self.values else torch.zeros_like(first) for i in range(self.many)]
        return torch.stack(each, self.axis)


def _place(index: Any) -> tuple[int, int] | None:
    """The dimension and the place that ``index`` names, if it is one, and takes all of others."""
    each = list(index) if isinstance(index, tuple) else [index]
    while each and (each[-1] is Ellipsis or all_of(each[-1])):
        each.pop()
    if not each or type(each[-1]) is not int or not all(map(all_of, each[:-1])):
        return None
    return len(each) - 1, each[-1]


_VIEWS = (
    operator.getitem, getattr,
    "view", "reshape", "flatten", "transpose", "permute", "unsqueeze", "squeeze", "expand", "chunk", "split",
    "unbind", "detach", "contiguous",
    torch.flatten, torch.reshape, torch.transpose, torch.permute, torch.unsqueeze, torch.squeeze, torch.chunk,
    torch.split, torch.unbind,
)  # fmt: skip
"""What gives the same values, or some of them, in another form."""


def require_seen(graph: fx.Graph, changed: Mapping[fx.Node, fx.Node]) -> None:
    """Refuse what reads, after a change in place, a piece as it was, or the whole of a piece that was changed.

    ``changed`` has, by what was changed, what it became.
    """
    order = {node: place for place, node in enumerate(graph.nodes)}
    for old, new in changed.items():
        ahead, seen = _pieces(old, new), set[fx.Node]()
        base: Any = old
        while base.target in _VIEWS and isinstance(base.args[0], fx.Node):
            base = base.args[0]
            ahead.append(base)
        for one in ahead:
            seen.update(user for user in one.users if order[user] > order[new])
        if seen:
            name = min(seen, key=order.__getitem__).name
            what = f"is read by {name!r} after a part of it, or what it is a part of, is changed in place"
            raise refused(old.name, what, "change a copy, x.clone(), or make a new one")


def _pieces(node: fx.Node, new: fx.Node) -> list[fx.Node]:
    """What shares its values with ``node``, but what it became."""
    found = list[fx.Node]()
    for user in node.users:
        if user.target in _VIEWS and user is not new:
            found += [user, *_pieces(user, new)]
    return found
