"""What one ``talaria simulate`` command asks for, carried out and printed."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from talaria import data as datasets
from talaria.data import Federated
from talaria.data.presets import completed, default_of
from talaria.errors import ConfigError, some_of
from talaria.federated import plan_compat, rounds
from talaria.federated.fedbuff_run import Buffering
from talaria.federated.rounds import Run
from talaria.federated.server_rule import located, rule_named
from talaria.model import zoo
from talaria.model.adapters import AdapterSpec
from talaria.model.zoo import ModelSpec
from talaria.options import taken_apart
from talaria.simulation.reporting import pair_overlap
from talaria.simulation.run import Result, evaluate, members_of, simulate
from talaria.simulation.simulator import RoundFacts
from talaria.simulation.write_fleet import FLEET, Written, write_fleet
from talaria.training.evaluation import Report
from talaria.types import Plan
from talaria.wire import codec


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The command's options as they were given."""

    algorithm: str
    dataset: str
    rounds: int
    seed: int
    partition: Path | None = None
    model: str | None = None
    adapters: str | None = None
    pretrained: bool = False
    plans: Sequence[str] = ()
    fraction: float = 1.0
    buffers: str = "local"
    codec: str = "raw"
    aggregator: str | None = None
    over: float = 0.0
    asynchronous: bool = False
    buffering: Mapping[str, Any] = field(default_factory=dict)
    """Of ``buffer``, ``max_staleness`` and ``damping`` those that were given."""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    data_options: Mapping[str, Any] = field(default_factory=dict)


def prepared(asked: Asked) -> tuple[Run, Federated, dict[str, Plan]]:
    """The run, its data and the clients' plans; every wrong option is refused before anything is trained."""
    options = dict(asked.data_options)
    if asked.partition is not None:
        options["partition"] = asked.partition
    data = datasets.load(asked.dataset, **options)
    chosen = planned(asked.plans, {**data.clients, **data.newcomers})
    values = {
        "spec": _spec(asked, data, default_of(asked.dataset).model, chosen).to_json(),
        "algorithm": asked.algorithm,
        "hparams": asked.options,
        "recipe": asked.recipe,
        "rounds": asked.rounds,
        "seed": asked.seed,
        "buffers": asked.buffers,
        "fraction": asked.fraction,
        "codec": asked.codec,
        "asynchronous": asked.asynchronous,
    }
    return Run.of(completed(values, asked.dataset)), data, chosen


def planned(texts: Sequence[str], clients: Iterable[str]) -> dict[str, Plan]:
    """Each client's plan, of ``CLIENT=FILE`` and, for the clients that none of these names, ``FILE``."""
    names = set(clients)
    one: dict[str, Plan] = {}
    every: dict[str, Plan] = {}
    for text in texts:
        client, equals, path = text.partition("=")
        if equals and client in names:
            one[client] = plan_compat.read(Path(path))
        elif equals and not Path(text).exists():
            raise ConfigError(
                f"--plan {text!r}: there is no client {client!r}; choose one of {some_of(sorted(names), 20)}"
            )
        else:
            every = dict.fromkeys(names, plan_compat.read(Path(text)))
    return {**every, **one}


def buffering_of(asked: Asked, members: int) -> Buffering | None:
    """The buffer of an asynchronous run; where no size is given it holds 10 updates, or one of each member."""
    if asked.asynchronous:
        return Buffering(**{"buffer": min(10, members), **asked.buffering})
    for name, value in asked.buffering.items():
        raise ConfigError(f"--{name.replace('_', '-')} {value}: only an asynchronous run has it; add --asynchronous")
    return None


def _spec(asked: Asked, data: Federated, default: str | None, chosen: Mapping[str, Plan]) -> ModelSpec:
    """The model that was asked for, else the plans' own, else the dataset's, else one that fits."""
    adapters = None if asked.adapters is None else _adapters(asked.adapters)
    meant = next((plan.model for plan in chosen.values() if plan.model is not None), None)
    if asked.model is None and meant is not None:
        zoo.GROUP.require_allowed(meant.get("name"), (), "a plan's file imports nothing: give --model too")
        spec = replace(ModelSpec.from_json(meant), seed=asked.seed)
        for name, own in (("input_shape", data.input_shape), ("classes", data.classes)):
            if getattr(spec, name) != own:
                raise ConfigError(
                    f"--plan: its model has {name}={getattr(spec, name)}, the data {own}; plan again with `talaria "
                    "plan --shape --classes`, or --data"
                )
        return replace(spec, adapters=adapters or spec.adapters, pretrained=asked.pretrained or spec.pretrained)
    named = asked.model or default
    if named is None:
        smallest = min(len(c.train) for c in data.clients.values())
        fit = zoo.fitting(data.input_shape, data.classes, smallest, seed=asked.seed)
        return replace(fit, adapters=adapters, pretrained=asked.pretrained)
    name, options = taken_apart(named, "--model")
    return ModelSpec(
        name, data.input_shape, data.classes, adapters, asked.seed, asked.pretrained, tuple(options.items())
    )


def run(asked: Asked, *, as_json: bool, folder: Path | None = None, train: bool = True) -> None:
    """Train, measure and print; where ``folder`` is given, write the fleet there first."""
    if not train and folder is None:
        raise ConfigError("--no-training leaves nothing to do; give --write-fleet DIR with it, or leave it out")
    one, data, chosen = prepared(asked)
    aggregator = None if asked.aggregator is None else rule_named(one, asked.aggregator)
    members = members_of(data.clients, chosen)
    buffering = buffering_of(asked, len(members))
    if folder is not None:
        rounds.check_over(one, asked.over)
        rule = None if asked.aggregator is None else located(asked.aggregator, Path.cwd())
        over = asked.over
        written = Written(run=one, data=data, plans=chosen, aggregator=rule, over=over, buffering=buffering)
        write_fleet(folder, written)
        typer.echo(next_steps(folder, data, exact=buffering is None and not asked.over), err=as_json)
        if not train:
            return
    with Progress(console=Console(stderr=True), transient=True, disable=as_json) as progress:
        bar = progress.add_task(f"{asked.algorithm} on {data.name}", total=one.rounds)

        def advance(facts: RoundFacts) -> None:
            progress.update(bar, completed=facts.round)

        result = simulate(one, members, aggregator=aggregator, buffering=buffering, over=asked.over, progress=advance)
    report = evaluate(result, data, members)
    arrived = evaluate(result, data, members_of(data.newcomers, chosen)) if data.newcomers else None
    if as_json:
        arrival = None if buffering is None else arrivals(result, buffering)
        typer.echo(json.dumps({**document(asked, result, report, arrived), "asynchronous": arrival}, indent=2))
    else:
        print_table(asked, result, report, arrived)


def next_steps(folder: Path, data: Federated, *, exact: bool) -> str:
    """What to type to learn for real what is simulated."""
    lines = [
        f"{folder} holds the fleet. Serve it, and beside that run its devices:",
        f"  talaria coordinator serve {folder / FLEET}",
        f"  talaria edge run {folder}/*.toml",
    ]
    if data.newcomers:
        lines.append(f"then, for those who come later:\n  talaria edge run {folder}/newcomers/*.toml")
    if not exact:
        lines.append("Who comes first is drawn in the simulation and real in the fleet, so their bytes will differ.")
    return "\n".join(lines)


def _adapters(text: str) -> AdapterSpec:
    """The adapters of ``KIND`` or ``KIND:OPTION=VALUE,OPTION=VALUE``, such as ``lowrank:rank=8``."""
    kind, options = taken_apart(text, "--adapters")
    return AdapterSpec.from_json({"kind": kind, **options})


def document(asked: Asked, result: Result, report: Report, newcomers: Report | None) -> dict[str, Any]:
    """The JSON that the command prints."""
    run = result.run
    counts = {name: _parameters(result, name) for name in report.clients}
    return {
        "algorithm": run.algorithm,
        "dataset": asked.dataset,
        "model": run.spec.to_json(),
        "options": dict(run.hparams),
        "recipe": asdict(run.recipe),
        "rounds": run.rounds,
        "seed": run.seed,
        "body": hashlib.sha256(codec.encode_tensors(result.shared)).hexdigest(),
        "aggregator": asked.aggregator,
        "over": asked.over,
        "accuracy": asdict(report.accuracy),
        "macro_recall": asdict(report.macro_recall),
        "clients": {
            name: {**asdict(metrics), "bytes_up": result.bytes_up[name], "parameters": counts[name]}
            for name, metrics in report.clients.items()
        },
        "newcomers": None if newcomers is None else newcomers.as_dict(),
        "bytes_up": sum(result.bytes_up.values()),
        "overlap": pair_overlap(result.masks),
    }


def arrivals(result: Result, buffering: Buffering) -> dict[str, Any]:
    """How an asynchronous run went: how old the counted updates were, in versions, and whose they are."""
    ages = [age for facts in result.history for age in facts.staleness]
    who = [client for facts in result.history for client, _ in facts.counted]
    return {
        **asdict(buffering),
        "versions": len(result.history),
        "staleness": {
            "mean": sum(ages) / len(ages),
            "largest": max(ages),
            "updates": {str(age): ages.count(age) for age in sorted(set(ages))},
        },
        "updates": {client: who.count(client) for client in sorted(result.members)},
        "recalled": sum(facts.recalled for facts in result.history),
        "time": result.history[-1].time,
    }


def _parameters(result: Result, client: str) -> int:
    mask = rounds.mask_of(result.run, result.members[client], result.private.get(client))
    model = rounds.template(result.run.spec)
    if mask is None:
        return sum(p.numel() for p in model.parameters())
    indices = mask.indices
    total = 0
    for name, parameter in model.named_parameters():
        sizes = list(parameter.shape)
        for d, kept in enumerate(indices.get(name, ())):
            sizes[d] = sizes[d] if kept is None else len(kept)
        count = 1
        for size in sizes:
            count *= size
        total += count
    return total


def print_table(asked: Asked, result: Result, report: Report, newcomers: Report | None) -> None:
    """The same for people."""
    console = Console()
    table = Table(title=f"{asked.algorithm} on {asked.dataset}: accuracy after {result.run.rounds} rounds")
    for heading in ("client", "accuracy", "macro recall", "test samples"):
        table.add_column(heading, justify="left" if heading == "client" else "right")
    for part, title in ((report, "members"), (newcomers, "newcomers")):
        if part is None:
            continue
        for name, metrics in part.clients.items():
            table.add_row(name, f"{metrics.accuracy:.3f}", f"{metrics.macro_recall:.3f}", str(metrics.samples))
        s = part.accuracy
        table.add_section()
        table.add_row(f"{title}: mean", f"{s.mean:.3f}", f"{part.macro_recall.mean:.3f}", "")
        table.add_row(f"{title}: worst tenth", f"{s.worst_tenth:.3f}", f"{part.macro_recall.worst_tenth:.3f}", "")
        table.add_section()
    console.print(table)
    overlap = pair_overlap(result.masks)
    if overlap is not None:
        told = f"of the channels that either of two members keeps, both keep {overlap['mean']:.0%} on average"
        console.print(told, highlight=False)
    console.print(f"sent up: {sum(result.bytes_up.values()) / 1e6:.2f} MB in all", highlight=False)
