"""``talaria plan``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from talaria import tasks
from talaria.errors import BudgetError, ConfigError, DataError, some_of

if TYPE_CHECKING:
    from talaria.personalizer import Personalizer
    from talaria.planning.budget import AccuracyCheck, Budget
    from talaria.planning.plan import Plan
    from talaria.types import Samples

SHAPES = {"imu_cnn": ((6, 100), 7), "steps_cnn": ((6, 100), 7), "fmnist_cnn": ((1, 28, 28), 10), "mlp": ((64,), 10)}
"""Input and classes of the small models where none are given; the others take 224 pixels and 1000 classes."""


def plan(
    model: Annotated[
        str | None,
        typer.Option(
            "-m",
            "--model",
            help="A model of the zoo, or module:factory[:NAME=VALUE,...]; default: --data's own, or imu_cnn.",
        ),
    ] = None,
    head: Annotated[
        str | None, typer.Option(help="Dotted name of the model's last layer, where it is not found.")
    ] = None,
    budget: Annotated[
        list[str] | None,
        typer.Option(
            "-b",
            "--budget",
            help="NAME=NUMBER, repeatable: latency_ms, latency_ratio, run_memory_mb, "
            "train_memory_mb, bundle_mb, upload_mb, train_s, energy_j, accuracy_drop. Sizes also as _kb, _bytes.",
        ),
    ] = None,
    shape: Annotated[str | None, typer.Option(help="Input without the batch, such as 3,224,224.")] = None,
    classes: Annotated[int | None, typer.Option(help="Number of classes, or of the task's outputs.", min=1)] = None,
    task: Annotated[
        str | None,
        typer.Option(help="classification | regression | multilabel | per_step; default: what --data is for."),
    ] = None,
    batch: Annotated[int, typer.Option(help="Samples per training step.", min=1)] = 32,
    pretrained: Annotated[bool, typer.Option("--pretrained", help="Start from published weights.")] = False,
    watts: Annotated[float | None, typer.Option(help="What training draws; needed for energy_j.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure this device and this model again.")] = False,
    data: Annotated[
        str | None,
        typer.Option(
            help="Check accuracy_drop on these samples: npz:FILE, or a dataset's name. The model learns here."
        ),
    ] = None,
    client: Annotated[str | None, typer.Option(help="Whose samples; default: everybody's together.")] = None,
    epochs: Annotated[
        int | None, typer.Option(help="How long the model learns for that check; default 12.", min=1)
    ] = None,
    by_worth: Annotated[
        bool, typer.Option("--by-worth", help="Give up the channels that --data needs least, instead of evenly.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The plan and its model as one JSON document.")] = False,
) -> None:
    """Choose the largest model that keeps a budget on this device, and how it trains, with reasons.

    Latency is measured: the first plan for a model exports it and times it at 15 widths, once per machine. A budget
    that cannot be kept is refused with the nearest one that can.

    What pruning costs in accuracy is not predicted. With --data the planned model and its unpruned twin learn from the
    same samples, and a plan that loses more than accuracy_drop on the held-out ones is refused; without --data the
    limit travels in the plan, and the device's agent checks it before it deploys.

    A model of your own is measured like the zoo's, each width exported by itself where its graph does not show whose
    weights are whose; what of it cannot be pruned is named, and left whole.

    With --task the outputs are that task's: numbers (--classes of them), labels, or classes for each step; what --data
    says of its task goes without. The limit accuracy_drop is then one of the task's score (R², F1, steps right).

    With --by-worth the model learns from --data for a third of --epochs, and the blocks of channels go that are worth
    least to its loss for the time they take. It pays on large networks with some thousand samples.
    """
    import json

    from talaria.cli.profile import table
    from talaria.data.presets import default_of
    from talaria.model.spec import ModelSpec
    from talaria.options import taken_apart
    from talaria.personalizer import Personalizer
    from talaria.planning import measured
    from talaria.planning import profile as profiles
    from talaria.planning.budget import Budget
    from talaria.planning.planner import adapted

    preset = default_of(data)
    model = model or preset.model or "imu_cnn"
    name, options = taken_apart(model, "--model")
    known_shape, known_classes = SHAPES.get(name, ((3, 224, 224), 1000))
    dims = _dims(shape)
    spec = ModelSpec(
        name,
        dims or known_shape,
        classes or known_classes,
        pretrained=pretrained,
        options=tuple(options.items()),
        head=head,
    )
    device = profiles.cached(fresh=fresh)
    if watts is not None:
        device = replace(device, watts=watts)
    limits = Budget.parse(budget or [])
    if client is not None and data is None:
        raise ConfigError("--client names whose samples of --data to take; give --data as well")
    if epochs is not None and data is None:
        raise ConfigError("--epochs is how long the model learns from --data; give --data as well")
    if by_worth and data is None:
        raise ConfigError("--by-worth tells what channels are worth to the samples of --data; give --data as well")
    learned = None if data is None else _learned(data, client, task)
    goal = task or (tasks.CLASSIFICATION if learned is None else learned.task)
    aim, regression = tasks.of(goal), tasks.of(goal).name == "regression"
    if learned is not None:
        of_data = tuple(learned.train.x.shape[1:])
        spec = replace(spec, input_shape=dims or of_data, classes=classes or learned.outputs)
    elif regression and classes is None:
        spec = replace(spec, classes=1)
    if spec.classes < aim.fewest:
        raise ConfigError(f"--classes {spec.classes}: {aim.name} needs at least {aim.fewest}")
    made = measured.plan(spec, limits, profile=device, batch=batch, fresh=fresh)
    check = None
    if learned is not None:
        recipe = None if preset.task is None else preset.recipe
        personal = Personalizer(spec, _measured(limits), plan=made, profile=device, by_worth=by_worth, task=goal)
        made, check = _checked(personal.fit(learned.train, learned.val, epochs=epochs or 12, recipe=recipe), limits)
    if as_json:
        document = {"model": adapted(spec, made).to_json(), "plan": made.to_json(), "machine": device.machine}
        document |= {} if check is None else {"checked": check.to_json()}
        typer.echo(json.dumps(document, indent=1))
        return
    outputs = "outputs" if aim.fewest == 1 else "classes"
    rows: dict[str, Any] = {"model": f"{model} {'x'.join(map(str, spec.input_shape))}, {spec.classes} {outputs}"}
    rows |= dict(made.reasons)
    rows |= {name: f"{value:g} predicted" for name, value in made.predicted.items()}
    if check is not None:
        rows["accuracy"] = check.measured if limits.accuracy_drop is None else check.reason
    elif limits.accuracy_drop is not None:
        rows["accuracy"] = "accuracy_drop is checked when the device deploys; give --data to check it now"
    table(rows)
    for group, width in made.widths.items():
        typer.echo(f"  {group} = {width}")


@dataclass(frozen=True)
class Learned:
    """What to learn from, what is held out, how many outputs that needs, and the task."""

    train: Samples
    val: Samples
    outputs: int
    task: str


def _learned(name: str, client: str | None, task: str | None) -> Learned:
    """The samples of one client, or of all members together."""
    from talaria.data import load, registry
    from talaria.simulation.asked import task_of
    from talaria.types import Samples

    found = load(name, **({"task": task} if task is not None and "task" in registry.options_of(name) else {}))
    everyone = found.everyone
    if client is not None and client not in everyone:
        raise ConfigError(f"--client {client!r} is not in {name}; choose one of {some_of(sorted(everyone), 20)}")
    chosen = list(found.clients.values()) if client is None else [everyone[client]]
    train, val = Samples.joined([one.train for one in chosen]), Samples.joined([one.val for one in chosen])
    if not len(val):
        raise DataError(f"--data {name}: there are no validation samples to hold out; record some")
    return Learned(train, val, found.classes, task_of(found, task))


def _measured(budget: Budget) -> Budget:
    """The budget, with a limit of accuracy that all keep where there is none, so that what is lost is measured."""
    return budget if budget.accuracy_drop is not None else replace(budget, accuracy_drop=0.999)


def _checked(fitted: Personalizer, budget: Budget) -> tuple[Plan, AccuracyCheck]:
    """The plan, and what its model lost against its unpruned twin. Raises :class:`~talaria.errors.BudgetError` where
    that is more than the budget allows."""
    check = fitted.check
    if check is None:
        raise ConfigError("--data: nothing was checked; give a budget with accuracy_drop")
    if check.kept is False:
        raise BudgetError(
            f"budget: {check.reason}; nearest possible accuracy_drop={check.nearest:g} with this latency and these "
            "sizes. Allow that, or allow more of them",
            replace(budget, accuracy_drop=check.nearest),
        )
    return fitted.plan, check


def _dims(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.replace("x", ",").split(","))
    except ValueError:
        raise ConfigError(f"--shape {text!r} must be sizes such as 3,224,224") from None
