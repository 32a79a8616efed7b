"""What an update must be before any rule may read it.

The rule of names: each floating-point tensor of the shared state must come back in every update, except those
under a reserved prefix. ``mask/`` and ``stats/`` belong to the aggregator that wrote them or asks for them, and
``frozen/`` holds what is sent once and never trained (a common head): no update may carry them here. Integer
tensors (counters) may be left out; where they come, the largest wins.
"""

from collections.abc import Iterable, Iterator
from typing import Literal

import numpy as np

from talaria.errors import AggregationError, ConfigError
from talaria.model.masks import PREFIX, ChannelLayout, ChannelMask, dense_shape
from talaria.tensors import Array, Tensors, is_float
from talaria.types import Update

RESERVED = (PREFIX, "stats/", "frozen/")
"""Prefixes of shared names that no update may carry to a plain rule."""

Weighting = Literal["samples", "uniform"]

_BLOCK = 1 << 16
"""Values that are looked at at once: what is said of each stays in the cache."""


def is_reserved(name: str) -> bool:
    """True for a name that the rules leave alone."""
    return name.startswith(RESERVED)


def is_statistic(name: str) -> bool:
    """True for BatchNorm's running statistics: averaged where they travel, but no direction to step or measure in."""
    return name.endswith(("running_mean", "running_var"))


def trained(shared: Tensors) -> tuple[str, ...]:
    """The floating-point names that every update must carry, in the order of ``shared``."""
    return tuple(k for k, v in shared.items() if is_float(v) and not is_reserved(k))


def counters(shared: Tensors) -> tuple[str, ...]:
    """The integer names, which an update may carry: the largest wins."""
    return tuple(k for k, v in shared.items() if not is_float(v) and not is_reserved(k))


def positions(name: str, mask: ChannelMask | None) -> tuple[Array | None, ...] | None:
    """Kept positions per dimension, or None where ``mask`` keeps the whole tensor."""
    if mask is None:
        return None
    where = mask.indices.get(name, ())
    for kept in where:
        if kept is not None:
            return where
    return None


def check(shared: Tensors, update: Update, known: ChannelLayout | None = None, *, finite: bool = True) -> None:
    """Raise :class:`~talaria.errors.AggregationError` unless ``update`` fits ``shared``; the error names the client.

    It looks at one update alone, so that a coordinator can turn a bad one away on arrival, before it could
    spoil a round. Costs one pass over the values, unless ``finite`` is False: then the caller sees NaN and infinity
    in what it makes of them. ``known`` is a layout that was found to fit ``shared``.
    """
    who = f"update of client {update.client!r}"
    for name in update.tensors:
        if name not in shared or is_reserved(name):
            why = "is reserved for the server" if is_reserved(name) else "is not in the shared state"
            raise AggregationError(f"{who}: tensor {name!r} {why}; send only {_few(_allowed(shared))}")
    for name in trained({name: value for name, value in shared.items() if name not in update.tensors}):
        raise AggregationError(
            f"{who}: tensor {name!r} is missing; send every trained tensor, or keep the ones that never come back "
            f"under the prefix 'frozen/' of the shared state"
        )
    if update.mask is not None and update.mask.layout is not known:
        _check_layout(shared, update.mask.layout, who)
    for name, value in update.tensors.items():
        dense = shared[name]
        where = positions(name, update.mask)
        want = dense.shape
        if where is not None:
            want = tuple(size if i is None else len(i) for i, size in zip(where, want, strict=True))
        if value.shape != want:
            under = "" if update.mask is None else f" under its mask {update.mask.digest[:8]}"
            raise AggregationError(
                f"{who}: tensor {name!r} has shape {value.shape}, expected {want}{under}; "
                f"gather it from the shared state with the mask that the update carries"
            )
        if value.dtype != dense.dtype and (is_float(value) != is_float(dense) or value.dtype.kind not in "fiub"):
            raise AggregationError(
                f"{who}: tensor {name!r} has dtype {value.dtype}, expected {dense.dtype}; convert it before sending"
            )
        if (finite or is_variance(name)) and not is_finite(value):
            raise not_finite(update.client, name)
        if update.kind == "value" and is_variance(name) and bool((value < 0).any()):
            raise AggregationError(
                f"{who}: tensor {name!r} holds a negative variance {float(value.min()):.3g}, expected at least 0; "
                f"drop this update"
            )


def not_finite(client: str, name: str) -> AggregationError:
    """The error for an update that holds NaN or infinity."""
    return AggregationError(
        f"update of client {client!r}: tensor {name!r} holds NaN or infinity, expected finite values; "
        f"drop this update and lower the client's learning rate"
    )


def is_variance(name: str) -> bool:
    """True for BatchNorm's running variance, which is never negative."""
    return name.endswith("running_var")


def not_below(name: str, moved: Array) -> Array:
    """``moved`` with variances of at least 0: differences to older versions may add up to less, honestly."""
    return np.asarray(np.maximum(moved, 0.0)) if is_variance(name) else moved


def is_finite(value: Array) -> bool:
    """True where no value is NaN or infinite."""
    if not is_float(value) or value.size <= _BLOCK or not value.flags.c_contiguous:
        return not is_float(value) or bool(np.isfinite(value).all())
    flat, seen = value.reshape(-1), np.empty(_BLOCK, np.bool_)
    return all(
        bool(np.isfinite(part, out=seen[: len(part)]).all())
        for part in (flat[start : start + _BLOCK] for start in range(0, len(flat), _BLOCK))
    )


def lost(before: Tensors, after: Tensors) -> str | None:
    """The first name under which a training brought NaN or infinity in; a network's own buffers, such as a causal
    mask, may hold it before and after."""
    return next((k for k, v in after.items() if not is_finite(v) and (k not in before or is_finite(before[k]))), None)


def same_layout(a: ChannelLayout, b: ChannelLayout) -> bool:
    """True where two masks speak of the same unpruned model."""
    return a is b or (dict(a.sizes) == dict(b.sizes) and dict(a.axes) == dict(b.axes))


def checked(shared: Tensors, updates: Iterable[Update], *, finite: bool = True) -> Iterator[Update]:
    """The updates one by one, each checked (:func:`check`), of one kind and over one model."""
    first: Update | None = None
    layout: ChannelLayout | None = None
    for update in updates:
        check(shared, update, layout, finite=finite)
        first = update if first is None else first
        if update.kind != first.kind:
            raise AggregationError(
                f"update of client {update.client!r}: kind {update.kind!r}, but client {first.client!r} sent "
                f"{first.kind!r}; fold updates of one kind at a time"
            )
        if update.mask is not None:
            layout = update.mask.layout if layout is None else layout
            if not same_layout(layout, update.mask.layout):
                raise AggregationError(
                    f"update of client {update.client!r}: its mask belongs to another model than the masks before it; "
                    f"build every mask of a run from one layout"
                )
        yield update


def check_weighting(owner: str, weighting: str) -> None:
    """Refuse a weighting that is not known."""
    if weighting not in ("samples", "uniform"):
        raise ConfigError(f"{owner}: weighting={weighting!r} is unknown; use 'samples' or 'uniform'")


def check_count(owner: str, name: str, value: object, low: int) -> None:
    """Refuse anything but a whole number of at least ``low``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ConfigError(f"{owner}: {name}={value!r} must be a whole number of at least {low}")


def check_range(owner: str, name: str, value: object, low: float, high: float, ends: str = "[]") -> None:
    """Refuse anything but a number in the interval; ``ends`` says which ends belong to it, such as ``"(]"``."""
    ok = isinstance(value, (int, float)) and not isinstance(value, bool)
    if ok and isinstance(value, (int, float)):
        above = value >= low if ends[0] == "[" else value > low
        below = value <= high if ends[1] == "]" else value < high
        ok = above and below
    if not ok:
        raise ConfigError(f"{owner}: {name}={value!r} must be a number in {ends[0]}{low}, {high}{ends[1]}")


def weight_of(update: Update, weighting: Weighting) -> float:
    """The weight of one update: its samples, or 1."""
    return update.weight if weighting == "samples" else 1.0


def _check_layout(shared: Tensors, layout: ChannelLayout, who: str) -> None:
    for name, axes in layout.axes.items():
        if name not in shared:
            continue
        shape = shared[name].shape
        ruled = tuple(n or size for n, size in zip(dense_shape(layout, name), shape, strict=False))
        if len(axes) != len(shape) or ruled != shape:
            raise AggregationError(
                f"{who}: its mask expects tensor {name!r} to be {ruled}, but the shared state has {shape}; "
                f"build the mask from this model's layout"
            )


def _allowed(shared: Tensors) -> tuple[str, ...]:
    return trained(shared) + counters(shared)


def _few(names: tuple[str, ...]) -> str:
    return f"{list(names[:6])}" + (f" and {len(names) - 6} more" if len(names) > 6 else "")
