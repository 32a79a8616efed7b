"""A run that begins from what another has learned, under the same members; a device that goes on under another plan.

The body goes on as it is; adapters and a head may be new, or a head may have more classes. What cannot be carried over
is refused by name, and a private part that does not fit begins anew on its device, by name too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from talaria.aggregate.validation import is_reserved
from talaria.errors import ConfigError, ModelError
from talaria.federated import device_task, run_model, targets
from talaria.federated.run import MOST_BEFORE, Member, Run
from talaria.model import masks
from talaria.model.importance import choose
from talaria.model.masks import ChannelMask
from talaria.planning.plan import Plan
from talaria.tensors import Array, Tensors, prefixed, under
from talaria.wire import download, feedback

_SAME = ("algorithm", "task", "asynchronous", "buffers")


@dataclass(frozen=True)
class Carried:
    """The tensors that a run begins from. ``grown`` are those whose first rows are the old ones, ``fresh`` those that
    begin as in any new run, ``dropped`` those that have no place any more."""

    tensors: Tensors
    grown: tuple[str, ...]
    fresh: tuple[str, ...]
    dropped: tuple[str, ...]

    def facts(self) -> dict[str, list[str]]:
        """As it is logged."""
        return {"grown": list(self.grown), "fresh": list(self.fresh), "dropped": list(self.dropped)}


def following(old: Run, new: Run) -> Run:
    """``new`` as it goes on after ``old``, which it names.

    Raises :class:`~talaria.errors.ConfigError`, naming the field, where the two have nothing to carry over."""
    for name in _SAME:
        if getattr(old, name) != getattr(new, name):
            raise ConfigError(
                f"next: {name}={getattr(new, name)!r} must stay {getattr(old, name)!r}: what devices keep for "
                "themselves would have no meaning; found a new fleet for it"
            )
    for name in ("name", "input_shape", "seed", "pretrained"):  # of the last two is what all have alike and never send
        if getattr(old.spec, name) != getattr(new.spec, name):
            raise ConfigError(
                f"next: spec.{name}={getattr(new.spec, name)!r} must stay {getattr(old.spec, name)!r}: the body is "
                "carried over; adapters, classes, hparams and recipe may change"
            )
    if new.spec.classes < old.spec.classes:
        raise ConfigError(
            f"next: spec.classes={new.spec.classes} is below the {old.spec.classes} that were learned; a head may "
            "grow, and not shrink"
        )
    return replace(new, follows=(old.identity, *old.follows)[:MOST_BEFORE])


def carried(old: Run, new: Run, shared: Tensors) -> Carried:
    """What ``new`` begins from, given the last ``shared`` tensors of ``old``.

    Raises :class:`~talaria.errors.ConfigError`, naming tensor and shapes, where one of the body does not fit."""
    first = run_model.first_shared(new)
    found = _fitted(first, {name: value for name, value in shared.items() if name in first or not is_reserved(name)})
    body = {*run_model.split_of(new).of("body")}
    lost = [name for name in (*found.fresh, *found.grown) if name in body]
    if lost:
        there = shared[lost[0]].shape if lost[0] in shared else "not there"
        raise ConfigError(
            f"next: {lost[0]} of the body is {there} in the last model and {first[lost[0]].shape} in the new one; keep "
            "the model, and change its adapters or classes alone"
        )
    if found.dropped and old.spec.adapters == new.spec.adapters:
        raise ConfigError(
            f"next: {found.dropped[0]} of the last model has no place in the new one; keep the model, and change its "
            "adapters or classes alone"
        )
    # What the rule left alone stands still over the change too, and devices go on from their own values of it.
    sizes = run_model.layout_of(new.spec).sizes if run_model.algorithm_of(new).card.prunes else {}
    said = {group: bits for group, bits in under(shared, masks.PREFIX).items() if sizes.get(group) == len(bits)}
    return replace(found, tensors=download.rounded(found.tensors, new.download) | prefixed(said, masks.PREFIX))


def private_of(run: Run, member: Member, shared: Tensors, old: Tensors) -> Carried:
    """A device's private state in ``run``, given that of a run which it follows and the global model."""
    sizes = {group: len(bits) for group, bits in under(old, masks.PREFIX).items()}
    same = sizes == dict(run_model.layout_of(run.spec).sizes)
    kept = {name: value for name, value in old.items() if same and name.startswith(masks.PREFIX)}
    scale = {name: value for name, value in old.items() if name.startswith(targets.PREFIX)}
    own = device_task.own_of(old)
    found = _fitted(device_task.begun_private(run, member, shared, kept), own)
    beside = _beside(run, own)
    dropped = tuple(name for name in found.dropped if name not in beside)
    return replace(found, tensors={**kept, **found.tensors, **beside, **scale}, dropped=dropped)


def under_plan(run: Run, member: Member, shared: Tensors, private: Tensors) -> Tensors:
    """A device's private state under the plan that it has now, given what it kept under an earlier one and the (dense)
    global model.

    Values of channels that both keep stay, as do models beside the large one; a channel that comes back begins as on a
    new device."""
    old, new = mask_before(run, private), mask_now(run, member.plan, private)
    if old == new:
        return private
    own = device_task.own_of(private)
    kept = masks.as_tensors(new)
    dense = device_task.begun_private(run, member, shared, masks.as_tensors(new.layout.full()))
    moved = {
        name: _moved(name, own.get(name), old, new, dense.get(name), value)
        for name, value in device_task.begun_private(run, member, shared, kept).items()
    }
    left = feedback.within(under(private, feedback.PREFIX), old, new, shared)
    scale = {name: value for name, value in private.items() if name.startswith(targets.PREFIX)}
    return {**({} if new.is_full else kept), **moved, **_beside(run, own), **prefixed(left, feedback.PREFIX), **scale}


def _beside(run: Run, own: Tensors) -> Tensors:
    """What of a private state an algorithm makes in its rounds, as its card says."""
    return {name: value for name, value in own.items() if name.startswith(run_model.algorithm_of(run).card.beside)}


def mask_before(run: Run, private: Tensors) -> ChannelMask:
    """The mask under which a device's private state was kept, whatever its plan is by now."""
    return device_task.mask_under(run, None, private) or run_model.layout_of(run.spec).full()


def mask_now(run: Run, plan: Plan | None, private: Tensors) -> ChannelMask:
    """The mask of a device with this private state from now on: the one it has, where that is as wide as ``plan`` says.
    Else channels leave it in the order in which a plan leaves them out, and come back in the order in which it keeps
    them. An algorithm that prunes by itself keeps its own: a plan is its goal.

    Raises :class:`~talaria.errors.ConfigError` where the run cannot keep to the plan."""
    old = mask_before(run, private)
    full, whole = old.layout.full(), old.layout.sizes
    if run_model.algorithm_of(run).card.prunes:
        return old
    if plan is not None:
        device_task.require_plan(run, plan)
    wanted = whole if plan is None else {**whole, **plan.widths}
    if all(len(old.kept[group]) == min(width, whole[group]) for group, width in wanted.items()):
        return old
    scores = {group: np.array(score) for group, score in run_model.first_scores(run).items()}
    for group, score in scores.items():
        score[list(old.kept[group])] += np.ptp(score) + 1
    return choose(scores, full, widths=wanted, block=1)


def _moved(
    name: str, was: Array | None, old: ChannelMask, new: ChannelMask, dense: Array | None, begun: Array
) -> Array:
    """``was`` from mask ``old`` to ``new``; ``dense`` has the values of channels that ``old`` lacks. ``begun`` where no
    mask says how."""
    if was is None or dense is None:
        return begun
    key = name.rpartition("/")[2]  # an algorithm's own copy of the model goes by a prefix
    try:
        found = masks.gather(masks.scatter({key: was}, old, {key: dense}), new)[key]
    except ModelError:
        return begun
    return found if (found.shape, found.dtype) == (begun.shape, begun.dtype) else begun


def _fitted(first: Tensors, old: Tensors) -> Carried:
    tensors: dict[str, Array] = {}
    grown, fresh, used = [], [], set()
    plain = {_plain(name): name for name in old}
    for name, value in first.items():
        there = name if name in old else plain.get(_plain(name), "")
        was = old.get(there)
        used.add(there)
        if was is not None and was.dtype == value.dtype and was.shape == value.shape:
            tensors[name] = was
        elif was is not None and _grows(was, value):
            tensors[name] = np.concatenate([was, value[len(was) :]])
            grown.append(name)
        else:
            tensors[name] = value
            fresh.append(name)
    return Carried(tensors, tuple(grown), tuple(fresh), tuple(name for name in old if name not in used))


def _plain(name: str) -> str:
    """The tensor's name without an adapter around its layer."""
    return ".".join(part for part in name.split(".") if part != "base")


def _grows(old: Array, new: Array) -> bool:
    """Whether ``new`` has the same kind of rows, and more of them: the classes of a head."""
    same = old.dtype == new.dtype and old.ndim == new.ndim >= 1
    return same and old.shape[1:] == new.shape[1:] and len(old) < len(new)
