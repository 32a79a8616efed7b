"""Every way in which an enrolled device can lie in an update, as changes of one that was learned honestly."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator

import numpy as np

from talaria.aggregate import class_statistics
from talaria.federated import run_model
from talaria.federated.run import Run
from talaria.model.masks import ChannelMask
from talaria.tensors import Array, Tensors, is_float
from talaria.types import Update
from talaria.wire.codec import encode_update
from talaria.wire.strict_safetensors import pack, unpack

DEEP = 20_000
"""Lists in lists: more than any reader's stack."""


def lies(run: Run, update: Update) -> dict[str, bytes]:
    """The lies that there are for this update, by what they do; each as bytes of the wire."""
    found = {**dict(_of_facts(update)), **dict(_of_masks(run, update))}
    if any(is_float(v) for v in update.tensors.values()):
        found |= dict(_of_tensors(update))
    if update.kind == "value":
        found |= dict(_of_variances(update))
    if class_statistics.COUNT in update.tensors:
        found |= dict(_of_statistics(update))
    return found


# -- what is said of it


def _of_facts(update: Update) -> Iterator[tuple[str, bytes]]:
    yield "the other kind", said(update, kind="delta" if update.kind == "value" else "value")
    for name, value in (
        ("weight", 0), ("weight", -1), ("weight", math.nan), ("weight", 1e9), ("weight", "much"), ("weight", True),
        ("base_version", 7), ("base_version", -1), ("base_version", 2**60), ("base_version", 0.5),
        ("client", "anna"), ("client", ""),
        ("kind", "both"), ("mask", "0" * 64), ("metrics", {"a": math.inf}), ("metrics", {"a": "b"}), ("v", 1),
    ):  # fmt: skip
        yield f"{name} {value!r:.20}", said(update, **{name: value})
    for name in ("v", "client", "weight", "base_version", "kind", "metrics", "mask"):
        yield f"{name} nested deep", told(update, lambda text, name=name: _deep(text, name))
    yield "a fact more", said(update, more=1)
    yield "no facts", told(update, lambda text: "{}")


def _deep(text: str, name: str) -> str:
    facts = json.loads(text)
    before = json.dumps({name: facts[name]}, separators=(",", ":"))[1:-1]
    assert before in text
    return text.replace(before, f'"{name}":' + "[" * DEEP + "]" * DEEP)


# -- what it holds


def _of_tensors(update: Update) -> Iterator[tuple[str, bytes]]:
    name = max(update.tensors, key=lambda n: update.tensors[n].size * (not n.startswith("stats/")))
    yield "a name missing", held(update, lambda p: p.pop(name))
    yield "a name more", held(update, lambda p: p.update(more=np.zeros(2, np.float32)))
    yield "a name of the server's", held(update, lambda p: p.update({"mask/conv1": np.ones(3, np.uint8)}))
    yield "a name changed", held(update, lambda p: p.update({name + "x": p.pop(name)}))
    yield "a row less", held(update, lambda p: p.update({name: p[name][:-1]}))
    yield "no shape", held(update, lambda p: p.update({name: np.asarray(p[name].reshape(-1)[0])}))
    yield "a dimension more", held(update, lambda p: p.update({name: p[name][None]}))
    yield "whole numbers", held(update, lambda p: p.update({name: p[name].astype(np.int32)}))
    for value in (math.nan, math.inf, -math.inf, 1e30, -1e30):
        yield f"a value of {value}", held(update, lambda p, value=value: p[name].reshape(-1)[-1:].fill(value))
    yield "a norm that hides in many values", held(update, lambda p: p[name].fill(9e5))


def _of_variances(update: Update) -> Iterator[tuple[str, bytes]]:
    for name in [n for n in update.tensors if n.endswith("running_var")][:1]:
        yield "a negative variance", held(update, lambda p, name=name: p[name][:1].fill(-0.5))


def _of_masks(run: Run, update: Update) -> Iterator[tuple[str, bytes]]:
    layout = run_model.layout_of(run.spec)
    half = ChannelMask(layout, {g: tuple(range(0, n, 2)) for g, n in layout.sizes.items()})
    touched = any(name in layout.axes for name in update.tensors)
    if touched:
        yield "a mask that its tensors do not keep to", encode_update(update.but(mask=half), compress=False)
    masked = update if update.mask is not None else update.but(mask=layout.full())
    group = next(iter(layout.sizes))
    yield "a mask of nothing", held(masked, lambda p: p[f"mask|{group}"].fill(0))
    yield "a mask of less groups", held(masked, lambda p: p.pop(f"mask|{group}"))
    yield "a mask beyond the model", held(masked, lambda p: p.update({f"mask|{group}": np.full(9, 255, np.uint8)}))
    yield "a mask of another name", held(masked, lambda p: p.update({"mask|x": p.pop(f"mask|{group}")}))
    yield "bitmaps without a mask", said(masked, mask=None)


def _of_statistics(update: Update) -> Iterator[tuple[str, bytes]]:
    count, mean, within = class_statistics.SENT

    def spoiled(name: str, change: Callable[[Array], object]) -> bytes:
        return held(update, lambda p: change(p[name]))

    yield "a negative count", spoiled(count, lambda t: t[:1].fill(-3))
    yield "a count that is no whole number", spoiled(count, lambda t: t[:1].fill(1e-20))
    yield "more counted than it weighs", spoiled(count, lambda t: t[:1].fill(1e5))
    yield "a count of NaN", spoiled(count, lambda t: t[:1].fill(math.nan))
    yield "a mean of infinity", spoiled(mean, lambda t: t[:1].fill(math.inf))
    yield "a negative variance of features", spoiled(within, lambda t: t.reshape(-1)[:1].fill(-1))
    yield "no means", held(update, lambda p: p.pop(mean))
    yield "no prior", held(update, lambda p: p.pop(class_statistics.PRIOR))
    if update.tensors[within].ndim == 2:
        yield "a covariance that is none", spoiled(within, lambda t: (t[:1, 1].fill(1e5), t[1, :1].fill(1e5)))
        yield "a covariance that is not symmetric", spoiled(within, lambda t: t[:1, 1].fill(float(t[0, 1]) + 1))


# -- changing bytes


def held(update: Update, change: Callable[[Tensors], object]) -> bytes:
    """The update with its planes changed."""
    entries, meta = unpack(encode_update(update, compress=False), most=10_000)
    planes = {name: entry.array() for name, entry in entries.items()}
    change(planes)
    return pack(planes, meta)


def told(update: Update, change: Callable[[str], str]) -> bytes:
    """The update with the text of its facts changed."""
    entries, meta = unpack(encode_update(update, compress=False), most=10_000)
    planes = {name: entry.array() for name, entry in entries.items()}
    return pack(planes, {"talaria": change(meta["talaria"])})


def said(update: Update, **facts: object) -> bytes:
    """The update with other facts."""
    return told(update, lambda text: json.dumps(json.loads(text) | facts, separators=(",", ":"), sort_keys=True))
