"""Body, adapters, head: resolved once, from dotted prefixes to exact state-dict keys."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from talaria.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from torch.nn import Module

Part = Literal["body", "adapters", "head"]
WHOLE: tuple[Part, ...] = ("body", "adapters", "head")
"""All parts, which are a model."""
Buffers = Literal["local", "aggregate"]


@dataclass(frozen=True)
class Split:
    """Which part of a model each state-dict key belongs to; exact keys, disjoint, covering all.

    ``statistics`` are the floating-point buffers (BatchNorm running mean and variance) among those keys:
    they stay on the device under ``buffers="local"``. ``counters`` are what no mean is taken of, the integer buffers
    and those that hold infinity, such as a causal mask: they never travel.
    """

    body: tuple[str, ...]
    adapters: tuple[str, ...]
    head: tuple[str, ...]
    statistics: frozenset[str] = frozenset()
    counters: frozenset[str] = frozenset()
    buffers: Buffers = "local"

    def __post_init__(self) -> None:
        keys = [*self.body, *self.adapters, *self.head]
        if len(keys) != len(set(keys)):
            twice = sorted({k for k in keys if keys.count(k) > 1})
            raise ModelError(f"split: {twice} belong to more than one part; give each key to one part")
        stray = (self.statistics | self.counters) - set(keys)
        if stray:
            raise ModelError(f"split: buffers {sorted(stray)} belong to no part; give each key to one part")
        if self.buffers not in ("local", "aggregate"):
            raise ConfigError(f"buffers={self.buffers!r} is unknown; use 'local' or 'aggregate'")

    @property
    def keys(self) -> tuple[str, ...]:
        """All state-dict keys, body first."""
        return (*self.body, *self.adapters, *self.head)

    def of(self, *parts: Part) -> tuple[str, ...]:
        """All keys of the named parts, buffers included."""
        return tuple(k for part in parts for k in getattr(self, part))

    def parameters(self, *parts: Part) -> tuple[str, ...]:
        """The trainable keys of the named parts."""
        return tuple(k for k in self.of(*parts) if k not in self.statistics and k not in self.counters)

    def travels(self, *parts: Part) -> tuple[str, ...]:
        """The keys of the named parts that may leave the device under the buffer policy."""
        kept_home = self.counters if self.buffers == "aggregate" else self.counters | self.statistics
        return tuple(k for k in self.of(*parts) if k not in kept_home)

    def stays(self, *parts: Part) -> tuple[str, ...]:
        """Every key that does not travel when the named parts are shared."""
        gone = set(self.travels(*parts))
        return tuple(k for k in self.keys if k not in gone)


ADAPTER = "adapter"
"""The dotted component that marks a tensor as part of an adapter."""


def under(key: str, prefix: str) -> bool:
    """True where ``prefix`` is ``key`` itself or a whole dotted beginning of it, never a mere substring.

    >>> under("head.weight", "head"), under("header.weight", "head")
    (True, False)
    """
    return key == prefix or key.startswith(prefix + ".")


def split_model(
    model: Module,
    head: str | Iterable[str] = "head",
    adapters: str | Iterable[str] | None = None,
    buffers: Buffers = "local",
) -> Split:
    """The parts of ``model``.

    ``head`` and ``adapters`` are dotted prefixes of modules or tensors. Without ``adapters``, every tensor that
    has a component named ``adapter`` (what :func:`talaria.model.adapters.insert` makes) is one, outside the head.
    Everything else is body. Raises :class:`~talaria.errors.ModelError` where a prefix names nothing, with the
    candidates, and where one key would fall into two parts.
    """
    keys = tuple(model.state_dict(keep_vars=True))
    heads = _resolve(model, keys, "head", head)
    if adapters is None:
        tuned = {k for k in keys if k not in heads and ADAPTER in k.split(".")}
    else:
        tuned = _resolve(model, keys, "adapters", adapters)
        both = sorted(heads & tuned)
        if both:
            raise ModelError(f"split: {both[:4]} are named as head and as adapters; name each tensor once")
    if len(heads) == len(keys):
        raise ModelError(
            f"split: head={head!r} covers the whole model, so nothing could be shared; name its last layer, "
            "or put a layer before it where it is the only one"
        )
    floats = {
        name: buffer.is_floating_point() and bool(buffer.isfinite().all())
        for name, buffer in model.named_buffers(remove_duplicate=False)
    }
    kept = set(keys)
    return Split(
        body=tuple(k for k in keys if k not in heads and k not in tuned),
        adapters=tuple(k for k in keys if k in tuned),
        head=tuple(k for k in keys if k in heads),
        statistics=frozenset(k for k, is_float in floats.items() if is_float and k in kept),
        counters=frozenset(k for k, is_float in floats.items() if not is_float and k in kept),
        buffers=buffers,
    )


def tied(module: Module) -> list[list[str]]:
    """The names of each weight that has several, as that of a last layer which is the embedding's too."""
    names: dict[int, list[str]] = {}
    for name, weight in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(weight), []).append(name)
    return [found for found in names.values() if len(found) > 1]


def torn(module: Module, names: Container[str]) -> tuple[str, str] | None:
    """Of the first weight that ``names`` have under some of its names alone: one of these, and one of the others."""
    for every in tied(module):
        within, without = ([name for name in every if (name in names) is there] for there in (True, False))
        if within and without:
            return within[0], without[0]
    return None


def _resolve(model: Module, keys: tuple[str, ...], part: str, prefixes: str | Iterable[str]) -> set[str]:
    found: set[str] = set()
    for prefix in [prefixes] if isinstance(prefixes, str) else list(prefixes):
        matched = {k for k in keys if under(k, prefix)}
        if not matched:
            require_layers(model, "split: the model")
            raise ModelError(
                f"split: {part}={prefix!r} names no layer with weights in {type(model).__name__}; "
                f"candidates: {', '.join(candidates(model) or keys) or 'none, the model has no parameters'}"
            )
        found |= matched
    return found


def require_layers(model: Module, what: str) -> None:
    """Raise :class:`~talaria.errors.ModelError`, beginning with ``what``, where ``model`` is one layer of torch's."""
    if not any(model.children()) and type(model).__module__.startswith("torch.nn."):
        raise ModelError(
            f"{what} is one layer, {type(model).__name__}, without a name and with nothing before it; put layers "
            "before it, in a torch.nn.Sequential"
        )


def candidates(model: Module) -> list[str]:
    """Names that could be a head: the top-level modules with weights, and the last three linear layers."""
    from torch.nn import Linear

    tops = [name for name, child in model.named_children() if next(iter(child.state_dict()), None) is not None]
    linear = [name for name, child in model.named_modules() if isinstance(child, Linear) and name]
    return list(dict.fromkeys([*tops, *linear[-3:]]))
