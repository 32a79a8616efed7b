"""A plan on this very device: what the planner needs is measured first, once per machine and family."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from torch import Tensor
from torch.nn import Module

from talaria.errors import ConfigError
from talaria.model import zoo
from talaria.model.sensitivity import worth
from talaria.model.spec import ModelSpec
from talaria.planning import latency_model, planner
from talaria.planning import profile as profiles
from talaria.planning.budget import Budget
from talaria.planning.cost import Cost
from talaria.planning.layer_stats import anatomy
from talaria.planning.onnx_runtime import Exporter
from talaria.planning.plan import Plan
from talaria.planning.profile import Profile

VERSION = 3
"""Of how costs are measured; those of another one are measured anew."""


def plan(
    spec: ModelSpec,
    budget: Budget,
    *,
    profile: Profile | None = None,
    export: Exporter | None = None,
    batch: int = 32,
    fresh: bool = False,
) -> Plan:
    """The plan of ``spec`` for this device; see :func:`talaria.planning.planner.plan`. It names the model that it is
    for.

    ``accuracy_drop`` goes into the plan as it is: no planner knows it without samples. It is measured where the model
    is made: by :class:`talaria.personalizer.Personalizer`, and on the device before it deploys.

    ``profile`` and the family's latency are measured where they are not cached; the latter only where the budget limits
    it, with ``export`` or the installed exporter.
    """
    device = profile or profiles.cached()
    found = costed(spec, device, export=export, fresh=fresh) if budget.limits_latency else None
    made = planner.plan(spec, budget, device, found, batch=batch)
    return replace(made, accuracy_drop=budget.accuracy_drop, model=planner.adapted(spec, made).to_json())


def weighed(
    spec: ModelSpec,
    budget: Budget,
    made: Plan,
    model: Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    profile: Profile | None = None,
) -> Plan:
    """``made`` with the channels that ``model``, the planned one with all its channels and after some learning, needs
    most for ``batches`` of (inputs, labels); see :func:`talaria.planning.planner.weighed`."""
    if not made.widths:
        return made
    whole = planner.adapted(spec, made)
    found = worth(model, zoo.layout(whole), batches)
    names = anatomy(zoo.plain(spec)).renamed(anatomy(whole))
    device = profile or profiles.cached()
    measured = costed(spec, device) if budget.limits_latency else None
    limits = replace(budget, accuracy_drop=made.accuracy_drop)
    again = planner.weighed(spec, limits, made, device, measured, {own: found[theirs] for own, theirs in names.items()})
    return replace(again, accuracy_drop=made.accuracy_drop, model=made.model)


def costed(
    spec: ModelSpec,
    device: Profile,
    *,
    export: Exporter | None = None,
    fresh: bool = False,
    folder: Path | None = None,
) -> Cost:
    """The measured latency model of the family of ``spec`` on this machine, from the cache or measured now."""
    family = json.dumps(zoo.plain(spec).to_json(), sort_keys=True)
    if zoo.GROUP.is_foreign(spec.name):  # its code may have changed since it was measured
        parts = anatomy(zoo.plain(spec))
        family += repr((sorted(parts.shapes.items()), parts.layers))
    name = hashlib.sha256(f"{VERSION} {family} {device.machine} {device.block}".encode()).hexdigest()[:16]
    path = (folder or profiles.cache_folder()) / f"cost-{spec.name}-{name}.json"
    stored = None if fresh else profiles.read(path)
    if stored is not None:
        try:
            return Cost.from_json(stored)
        except ConfigError:  # from another version: measured anew
            pass
    found = latency_model.measure(spec, device.block, export=export)
    profiles.write(path, found.to_json())
    return found
