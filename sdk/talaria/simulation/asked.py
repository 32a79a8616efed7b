"""What a simulation is asked for, in the several forms that a person may give it: data, task, model, plans, buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch.nn import Module

from talaria import tasks, valid
from talaria.aggregate.base import Aggregator
from talaria.aggregate.registry import required
from talaria.data import registry
from talaria.data.federated import Federated
from talaria.data.presets import default_of
from talaria.errors import ConfigError, some_of
from talaria.federated import plan_compat
from talaria.federated.fedbuff_run import Buffering
from talaria.federated.run import Run
from talaria.federated.server_rule import rule_named
from talaria.foreign import shown
from talaria.model import several, zoo
from talaria.model.spec import AdapterSpec, ModelSpec
from talaria.options import taken_apart
from talaria.planning.plan import Plan

BUFFER = 10
"""Updates that make a version of an asynchronous run where no ``buffer`` is given, or one of each member if fewer."""


Factory = Callable[[tuple[int, ...], int], Module]
"""Makes a network for an input shape and a number of outputs."""


def data_of(data: str | Federated, options: Mapping[str, Any] | None) -> Federated:
    """The data that was named, loaded with ``options``, or given."""
    if isinstance(data, str):
        return registry.load(data, **table_of("data_options", options))
    if options:
        raise ConfigError(f"simulate: data_options={dict(options)!r} are for a dataset's name; data is an object")
    if not isinstance(data, Federated):
        raise ConfigError(
            f"simulate: data={shown(data)} must be a dataset's name or a Federated; Federated.from_arrays "
            "makes one of arrays"
        )
    return data


def of_one_class(data: Federated) -> list[str]:
    """The clients that train on one class alone: they take part in a simulation, and a device would decline."""
    if tasks.of(data.task).name != tasks.CLASSIFICATION:
        return []
    return [name for name, one in data.clients.items() if len(np.unique(one.train.y)) < 2]


def task_of(data: Federated, task: str | None) -> str:
    """The task that was asked for, which must be one of the data's kind, else the data's own."""
    if task is None:
        return data.task
    if tasks.of(task).name != tasks.of(data.task).name:
        raise ConfigError(
            f"task={task!r}, but the targets of {data.name!r} are for {data.task!r}; leave it out, or load "
            "the data for that task (data_options={'task': ...}, Federated.from_arrays(..., task=...))"
        )
    return task


def table_of(name: str, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """``given`` as a dict; None: an empty one."""
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(f"simulate: {name}={shown(given)} must be a table of values by name")
    return dict(given or {})


def rule_of(run: Run, aggregator: str | Aggregator | None) -> Aggregator | None:
    """The rule that was asked for by name, or given; None: the algorithm's own."""
    if isinstance(aggregator, str):
        return rule_named(run, aggregator)
    return None if aggregator is None else required("aggregator", aggregator)


def plans_of(plans: Plan | Mapping[str, Plan] | str | Sequence[str] | None, clients: Iterable[str]) -> dict[str, Plan]:
    """Each client's plan; of texts, ``CLIENT=FILE`` and, for the clients that none of these names, ``FILE``."""
    names = dict.fromkeys(clients)
    if isinstance(plans, Plan):
        return dict.fromkeys(names, plans)
    if isinstance(plans, str):
        plans = [plans]
    if isinstance(plans, Mapping):
        for name, plan in plans.items():
            if name not in names or not isinstance(plan, Plan):
                known = some_of(list(names), 20)
                raise ConfigError(f"simulate: plans[{shown(name)}] must be the Plan of a client; clients are {known}")
        return dict(plans)
    if plans is not None and not (isinstance(plans, list | tuple) and all(isinstance(text, str) for text in plans)):
        raise ConfigError(
            f"simulate: plans={shown(plans)} must be a Plan, Plans by client, or the names of their files"
        )
    one: dict[str, Plan] = {}
    every: dict[str, Plan] = {}
    for text in plans or ():
        client, equals, path = text.partition("=")
        own = bool(equals) and client in names
        if (own and client in one) or (every and not own):
            raise ConfigError(f"--plan {text!r}: a plan was given before for the same; leave one of them out")
        if own:
            one[client] = plan_compat.read(Path(path))
        elif equals and not Path(text).exists():
            raise ConfigError(
                f"--plan {text!r}: there is no client {client!r}; choose one of {some_of(sorted(names), 20)}"
            )
        else:
            every = dict.fromkeys(names, plan_compat.read(Path(text)))
    return {**every, **one}


def spec_of(
    data: Federated,
    model: str | ModelSpec | Module | Factory | None,
    plans: Mapping[str, Plan],
    adapters: str | AdapterSpec | None,
    pretrained: bool,
    seed: int,
    dataset: str,
    head: str | None = None,
) -> ModelSpec:
    """The model that was asked for, else the plans' own, else the dataset's, else one that fits; ``head`` names its
    last layer."""
    if isinstance(model, Module):
        if isinstance(model, several.Several):  # before it is called
            several.require_fits(model, data.input_shape, data.meta.get("parts"))
        kept = zoo.keep(model, data.input_shape, data.classes, head=head)
        return replace(kept, adapters=_adapters(adapters), seed=seed, pretrained=pretrained)
    if model is not None and not isinstance(model, str | ModelSpec):
        model = zoo.GROUP.name_of(model)
    found = _named(data, model, plans, adapters, pretrained, seed, dataset)
    return found if head is None else replace(found, head=head)


def _named(
    data: Federated,
    model: str | ModelSpec | None,
    plans: Mapping[str, Plan],
    adapters: str | AdapterSpec | None,
    pretrained: bool,
    seed: int,
    dataset: str,
) -> ModelSpec:
    extra = _adapters(adapters)
    meant = next((plan.model for plan in plans.values() if plan.model is not None), None)
    if isinstance(model, ModelSpec):
        if model.input_shape != data.input_shape:  # which no device would learn
            raise ConfigError(
                f"model: input_shape={model.input_shape}, but the samples have {data.input_shape}; give that"
            )
        return replace(model, adapters=extra or model.adapters, pretrained=pretrained or model.pretrained)
    if model is None and meant is not None:
        zoo.GROUP.require_allowed(meant.get("name"), (), "a plan's file imports nothing: name the model too")
        spec = replace(ModelSpec.from_json(meant), seed=seed)
        for name, own in (("input_shape", data.input_shape), ("classes", data.classes)):
            if getattr(spec, name) != own:
                raise ConfigError(
                    f"plans: their model has {name}={getattr(spec, name)}, the data {own}; plan again with `talaria "
                    "plan --shape --classes`, or --data"
                )
        return replace(spec, adapters=extra or spec.adapters, pretrained=pretrained or spec.pretrained)
    named = model or default_of(dataset).model
    if named is None:
        smallest = min(len(c.train) for c in data.clients.values())
        steps = tasks.of(data.task).name == "per_step"
        fit = zoo.fitting(data.input_shape, data.classes, smallest, seed=seed, each_step=steps)
        return replace(fit, adapters=extra, pretrained=pretrained)
    name, options = taken_apart(named, "--model")
    return ModelSpec(name, data.input_shape, data.classes, extra, seed, pretrained, options=tuple(options.items()))


def _adapters(given: str | AdapterSpec | None) -> AdapterSpec | None:
    """What is given; of a text the adapters of ``KIND`` or ``KIND:OPTION=VALUE,OPTION=VALUE``, such as
    ``lowrank:rank=8``."""
    if not isinstance(given, str):
        return given
    kind, options = taken_apart(given, "--adapters")
    return AdapterSpec.from_json({"kind": kind, **options})


def buffering_of(run: Run, given: Buffering | Mapping[str, Any] | None, members: int) -> Buffering | None:
    """The buffer of an asynchronous run."""
    if run.asynchronous:
        if isinstance(given, Buffering):
            return given
        asked = {"buffer": min(BUFFER, members)} | table_of("buffering", given)
        return Buffering(**valid.options_of(Buffering).read("asynchronous run", asked))
    for name, value in (asdict(given) if isinstance(given, Buffering) else table_of("buffering", given)).items():
        raise ConfigError(f"--{name.replace('_', '-')} {value}: only an asynchronous run has it; add --asynchronous")
    return None
