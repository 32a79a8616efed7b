"""``talaria simulate``: a whole fleet's learning in one process."""

import os
from pathlib import Path
from typing import Annotated

import typer

from talaria.errors import ConfigError

_BESIDE_RESUME = ("resume", "workers", "ray", "report", "as_json")
"""What may be said beside --resume: it changes no byte of the run."""


def simulate(
    context: typer.Context,
    algorithm: Annotated[
        str, typer.Option("-a", "--algorithm", help="See `talaria algorithms`; or module:Name.")
    ] = "fedavg",
    dataset: Annotated[
        str,
        typer.Option(
            "-d",
            "--dataset",
            help="smartwatch | vowels | glucose | fashion-mnist | npz:FILE | cifar100:FILE | module:Name",
        ),
    ] = "smartwatch",
    rounds: Annotated[int, typer.Option(help="Communication rounds.", min=1)] = 30,
    seed: Annotated[int, typer.Option(help="Everything random derives from it.", min=0)] = 0,
    partition: Annotated[
        Path | None, typer.Option(help="For image sets: npz with train_idx and test_idx per client.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Zoo model, or module:factory[:NAME=VALUE,...]; default: the dataset's, or one that fits."),
    ] = None,
    head: Annotated[
        str | None, typer.Option(help="Dotted name of the model's last layer, where it is not found.")
    ] = None,
    adapters: Annotated[
        str | None, typer.Option(help="Adapters beside its layers: residual, lowrank:rank=8 or heart.")
    ] = None,
    pretrained: Annotated[bool, typer.Option("--pretrained", help="Start from published weights.")] = False,
    plan: Annotated[
        list[str] | None,
        typer.Option(help="What `talaria plan --json` wrote: FILE for every client, CLIENT=FILE for one. Repeatable."),
    ] = None,
    fraction: Annotated[float, typer.Option(help="Share of the clients that takes part in a round.")] = 1.0,
    buffers: Annotated[str, typer.Option(help="BatchNorm statistics: local | aggregate.")] = "local",
    codec: Annotated[str, typer.Option(help="How updates travel: raw | fp16 | bf16 | int8 | topk.")] = "raw",
    download: Annotated[str, typer.Option(help="How the global model travels: raw | fp16 | bf16 | int8.")] = "raw",
    aggregator: Annotated[
        str | None,
        typer.Option(
            help="Another server rule than the algorithm's own, such as median:f=1, server_adam:inner=mean, or "
            "mypkg.mine:First:f=1."
        ),
    ] = None,
    over: Annotated[
        float, typer.Option(help="Ask this share more devices than are counted; who is first is drawn.")
    ] = 0.0,
    task: Annotated[
        str | None,
        typer.Option(help="classification | regression | multilabel | per_step; default: what the data is for."),
    ] = None,
    asynchronous: Annotated[
        bool, typer.Option("--asynchronous", help="No rounds in step: each --buffer updates make a version (FedBuff).")
    ] = False,
    buffer: Annotated[int | None, typer.Option(help="Updates per version; default 10, or all members.")] = None,
    max_staleness: Annotated[
        int | None, typer.Option(help="Versions that an update may be behind; default 20.")
    ] = None,
    damping: Annotated[
        float | None, typer.Option(help="An update s behind counts (1+s)^-DAMPING; default 0.5.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Local epochs per round.", min=0)] = None,
    batch: Annotated[int | None, typer.Option(help="Local batch size.", min=1)] = None,
    lr: Annotated[float | None, typer.Option(help="Local learning rate.")] = None,
    momentum: Annotated[float | None, typer.Option(help="Local SGD momentum.")] = None,
    recipe_option: Annotated[
        list[str] | None,
        typer.Option("--recipe", help="Another setting of local training, NAME=VALUE, such as optimizer=adam."),
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option("-o", "--option", help="An algorithm's hyper-parameter, NAME=VALUE.")
    ] = None,
    data_option: Annotated[
        list[str] | None,
        typer.Option(help="An option of the dataset, NAME=VALUE; in double quotes, '\"003\"', VALUE is text."),
    ] = None,
    write_fleet: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Also write what is simulated as a fleet of real processes: fleet.toml with every value spelled out, "
            "and one device.toml per client with its samples and plan.",
        ),
    ] = None,
    no_training: Annotated[bool, typer.Option("--no-training", help="Only write the fleet of --write-fleet.")] = False,
    evaluate_every: Annotated[
        int | None,
        typer.Option(
            help="Measure the members after every so many rounds and the last; default: never, with --report ten times "
            "at most."
        ),
    ] = None,
    engine: Annotated[
        str,
        typer.Option(
            help="Who trains: torch, onnx (ONNX Runtime; `talaria algorithms` says for which), or auto: the faster one "
            "here, by a few steps of each."
        ),
    ] = "torch",
    device: Annotated[str, typer.Option(help="Where torch trains: cpu, or cuda, cuda:1 and the like.")] = "cpu",
    secure: Annotated[
        bool, typer.Option("--secure", help="Updates are added up so that only their sum opens (docs/privacy.md).")
    ] = False,
    epsilon: Annotated[
        float | None, typer.Option(help="Privacy budget that no round may exceed; noise is chosen to keep it.")
    ] = None,
    clip: Annotated[
        float | None, typer.Option(help="L2 length that each device's update is cut to; with --epsilon, default 1.")
    ] = None,
    privacy_option: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=VALUE, as [privacy] of fleet.toml: threshold, holders, degree, bits, bound, tiers, most_weight, "
            "quantile, noise, noise_by, delta."
        ),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write one HTML page of what came out.")
    ] = None,
    baselines: Annotated[
        bool,
        typer.Option(
            "--baselines",
            help="Also learn alone, by FedAvg, and by FedAvg that each client tunes, and set these beside the run in "
            "its --report.",
        ),
    ] = False,
    save: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep each whole round in a new folder, for --resume.")
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Go on with the run that --save kept there, by its own options."),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            help="Processes in which clients learn, of one thread each; 0: in this one, as also by default, unless the "
            "run of --resume began otherwise.",
            min=0,
        ),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS", help="Clients learn on a Ray cluster; auto: this machine's, else its own cores."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Train a whole fleet in one process, with the seeds and the bytes of the fleet over MQTT.

    Prints each client's accuracy on its own test samples after the last round, served as the algorithm serves it.

    Model, recipe and the algorithm's options are the dataset's own unless others are asked for (smartwatch, vowels,
    glucose and fashion-mnist have some), else those of talaria.types.Recipe. A fleet.toml takes the same, by what
    it leaves out under [run.recipe] and by [run] defaults = "smartwatch".
    """
    from talaria.cli.simulate_output import shown_progress, taken_back, tell, write_down
    from talaria.errors import some_of
    from talaria.options import assignments, together
    from talaria.simulation import checkpoint
    from talaria.simulation.asked import of_one_class
    from talaria.simulation.experiment import prepare
    from talaria.simulation.result import BASELINES
    from talaria.simulation.resume import resume as go_on

    if no_training and write_fleet is None:
        raise ConfigError("--no-training leaves nothing to do; give --write-fleet DIR with it, or leave it out")
    if report is not None and not report.parent.is_dir():
        raise ConfigError(f"--report {report}: there is no folder {report.parent}; make it first")
    if report is not None and (report.is_dir() or not os.access(report.parent, os.W_OK)):  # known before it learns
        raise ConfigError(f"--report {report}: cannot be written; name a file in a folder of yours")
    if baselines and (report is None or resume is not None):
        raise ConfigError(
            "--baselines stand beside a run in its page, from the first round; give --report FILE with it, and leave "
            "--resume out"
        )
    if resume is not None:
        if save is not None or write_fleet is not None:
            raise ConfigError("--resume goes on in its own folder; leave --save and --write-fleet out")
        for one in context.command.params:
            said = getattr(context.get_parameter_source(str(one.name)), "name", "") == "COMMANDLINE"
            if said and one.name not in _BESIDE_RESUME:
                raise ConfigError(
                    f"{one.opts[-1]} is that of the run in {resume}, which goes on as it began; leave it out"
                )
        with shown_progress(f"{resume}", checkpoint.rounds(resume), quiet=as_json) as progress:
            tell(go_on(resume, workers=workers, ray=ray, progress=progress), report, as_json=as_json)
        return
    buffering = {"buffer": buffer, "max_staleness": max_staleness, "damping": damping}
    given = {"secure": secure or None, "epsilon": epsilon, "clip": clip}
    privacy = together(privacy_option, "--privacy-option", given)
    if "epsilon" in privacy:
        privacy.setdefault("clip", 1.0)
    recipe = {"epochs": epochs, "batch": batch, "lr": lr, "momentum": momentum}
    asked = prepare(
        algorithm,
        dataset,
        model,
        rounds=rounds,
        seed=seed,
        task=task,
        options=assignments(option, "--option"),
        recipe=together(recipe_option, "--recipe", recipe),
        aggregator=aggregator,
        plans=plan,
        adapters=adapters,
        pretrained=pretrained,
        head=head,
        fraction=fraction,
        buffers=buffers,
        codec=codec,
        download=download,
        over=over,
        asynchronous=asynchronous,
        buffering={k: v for k, v in buffering.items() if v is not None},
        data_options=together(data_option, "--data-option", {"partition": partition}),
        evaluate_every=(-(-rounds // 10) if report else 0) if evaluate_every is None else evaluate_every,
        engine=engine,  # type: ignore[arg-type]  # checked there
        device=device,
        privacy=privacy,
    )
    if asked.picked:
        typer.echo(f"engine: {asked.engine}, for {asked.picked}", err=True)
    if (alone := of_one_class(asked.data)) and write_fleet is None:
        typer.echo(
            f"note: one class alone to train on: {some_of(alone, 6)}; a device learns nothing from such samples until "
            "there is another class among them",
            err=True,
        )
    if write_fleet is not None:
        asked = write_down(asked, write_fleet, quiet=as_json)
        if no_training:
            return
    many = workers or 0
    shown = shown_progress(f"{algorithm} on {asked.data.name}", rounds, quiet=as_json)
    with taken_back(write_fleet), asked.begun(save, many, ray), shown as progress:
        result = asked.learn(progress, save, many, ray)
    beside = {}
    for name in BASELINES if baselines else ():
        if name != algorithm:
            with shown_progress(f"{name} beside it", rounds, quiet=as_json) as progress:
                beside[name] = asked.baseline(name).learn(progress, None, many, ray)
    tell(result, report, beside, as_json=as_json)


def algorithms(as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False) -> None:
    """List the algorithms: what is shared, what stays, what is served, the source, and how sure we are of it."""
    import json
    from dataclasses import asdict

    from rich.console import Console
    from rich.table import Column, Table

    from talaria.algorithms import GROUP, kind_of, options
    from talaria.errors import TalariaError

    found = {}
    for name in GROUP.names():
        try:
            found[name] = kind_of(name)
        except TalariaError as error:  # one package that is broken hides no other
            typer.echo(f"talaria: {error}", err=True)
    rows = [asdict(cls.card) | {"name": name, "options": options(cls)} for name, cls in sorted(found.items())]
    if as_json:
        typer.echo(json.dumps(rows, indent=2, default=str))
        return
    names = ("name", "shared", "private", "served", "source", "evidence")
    table = Table(*(Column(name, overflow="fold") for name in names))
    for name, cls in found.items():
        card = cls.card
        table.add_row(name, card.shares, card.keeps, card.serves, card.source, card.evidence)
    Console(markup=False, emoji=False).print(table)
