"""``talaria edge``: the agent on a device."""

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="The agent on a device: learns with a fleet, keeps what is private, deploys its own model.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Config = Annotated[Path, typer.Argument(metavar="DEVICE.TOML", help="The device's settings.")]
Wait = Annotated[float, typer.Option(help="Seconds to wait for the coordinator's word.", min=0.1)]
Insecure = Annotated[bool, typer.Option("--insecure", help="Accept a broker beyond this machine without TLS or keys.")]

EXAMPLE = """
A device.toml:

\b
    [device]
    id = "s01-left"
    bundle = "s01-left.talaria"   # where the personal model goes
    [fleet]
    name = "watch"
    broker = "mqtt://127.0.0.1:1883"
    [data]
    source = "smartwatch"         # or "npz" with path = "data.npz": x, y and split (0 train, 1 validation, 2 test,
                                  # 3 unlabelled); or "folder" with path: windows that are picked up as they come
    client = "s01-left"

\b
What `talaria plan --json > plan.json` chose for this device, and when it may train:

\b
    [device]
    plan = "plan.json"
    [guard]
    min_battery = 0.3             # least charge while not charging
    max_celsius = 45
    hours = "22:00-06:30"         # also: only_charging, max_load, min_idle_s
"""


@app.callback()
def edge() -> None:
    """The agent on a device: learns with a fleet, keeps what is private, deploys its own model."""


@app.command(epilog=EXAMPLE)
def run(
    configs: Annotated[
        list[Path],
        typer.Argument(metavar="DEVICE.TOML...", help="One file per agent; a fleet.toml among them is passed over."),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Events as JSON lines instead of text.")] = False,
    threads: Annotated[int, typer.Option(help="CPU threads for torch; 0: as it decides. Programs use one.", min=0)] = 0,
    insecure: Insecure = False,
) -> None:
    """Take part in a fleet until its last round; then personalize, and write the bundle.

    Several agents may run in one process, each with its own file; they train one after another. An agent may be
    killed at any time: started again, it goes on where it was. What is private stays in its state folder.
    """
    from talaria_edge.agent import program

    if status := program.run(configs, as_json=as_json, threads=threads, insecure=insecure):
        raise typer.Exit(status)


@app.command()
def check(
    config: Config,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    wait: Wait = 5.0,
    insecure: Insecure = False,
) -> None:
    """Look before the first round: settings, data, clock, space, engine, kit, keys, broker, coordinator, plan.

    Each line is fine, or says what is wrong and how to mend it; nothing is learned or sent. Ends with status 1 where
    something is wrong.
    """
    from talaria.foreign import printed
    from talaria_edge.check import check as looked

    found = []
    for one in looked(config, wait_s=wait, insecure=insecure):
        found.append(one)
        if not as_json:
            typer.echo(f"{one.state:<6} {one.what:<12} {printed(one.said)}")
    if as_json:
        typer.echo(json.dumps([vars(one) for one in found], indent=2))
    if any(one.state == "wrong" for one in found):
        raise typer.Exit(1)


@app.command()
def join(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where this device's keys go; a new folder.")],
    answer: Annotated[Path | None, typer.Option(help="The operator's answer to the request: the last step.")] = None,
) -> None:
    """Join a fleet: make this device's keys and a request, then (with --answer) take the operator's answer.

    The one-time code comes from `talaria fleet enroll`; it is asked for, or read from stdin, so that no list of
    processes shows it. Set [identity] folder in device.toml to FOLDER.
    """
    from talaria_edge.identity import enroll

    if answer is not None:
        joined = enroll.accept_answer(folder, answer)
        typer.echo(f"{joined.device} belongs to fleet {joined.fleet}; its broker is {joined.broker}.")
        return
    if sys.stdin is None:
        from talaria.errors import ConfigError

        raise ConfigError("code: stdin is closed; type the code, or give it by a pipe")
    asked = typer.prompt("Code", hide_input=True) if sys.stdin.isatty() else sys.stdin.readline(256)
    path = enroll.join(folder, asked)
    answered = f"{path.stem}.answer"
    typer.echo(
        f"The request is {path}; it holds nothing secret. The operator runs `talaria fleet admit DIR {path.name} "
        f"-o {answered}` with the fleet's folder as DIR; then, on this device: "
        f"talaria edge join {shlex.quote(str(folder))} --answer {answered}"
    )


@app.command()
def leave(
    config: Config,
    erase: Annotated[
        bool, typer.Option("--erase", help="Then erase what the device learned; its samples and its bundle stay.")
    ] = False,
    wait: Wait = 30.0,
    insecure: Insecure = False,
) -> None:
    """Take this device out of its fleet for good: no round asks it or waits for it any more, and no agent takes part
    with its state folder.

    Stop its agent first. What it gave stays in the fleet's model. Its private state is kept, so that a bundle can
    still be rolled back, or erased with --erase. Where the coordinator does not answer, nothing changes.
    """
    from talaria_edge.config import load_config
    from talaria_edge.leave import leave as leaving

    device = load_config(config)
    leaving(device, erase=erase, wait_s=wait, insecure=insecure)
    kept = f"what it learned is erased from {device.state}" if erase else f"what it learned stays in {device.state}"
    typer.echo(f"{device.device} has left fleet {device.fleet}; {kept}.")


@app.command()
def rollback(config: Config) -> None:
    """Put the bundle before the present one in force again, also while the agent runs.

    The model that is taken out of force is not deployed again; one that is learned later may be.
    """
    from talaria.errors import ConfigError
    from talaria_edge.config import load_config
    from talaria_edge.deployment import gate

    device = load_config(config)
    if device.bundle is None:
        raise ConfigError(f"{config}: [device] bundle is missing, so nothing was deployed that could be rolled back")
    state = gate.rollback(device.state, device.bundle)
    typer.echo(f"{device.bundle} is bundle {state.current} again; the one before it is no longer kept.")


@app.command()
def install(config: Config) -> None:
    """Put the bundle in force that did better and waits, where [home_assistant] ask says that it is to wait."""
    from talaria.errors import ConfigError
    from talaria_edge.config import load_config
    from talaria_edge.deployment import gate

    device = load_config(config)
    if device.bundle is None:
        raise ConfigError(f"{config}: [device] bundle is missing, so nothing is made that could be installed")
    state = gate.install(device.state, device.bundle)
    typer.echo(f"{device.bundle} is bundle {state.current}; `talaria edge rollback` puts the one before it back.")


@app.command(context_settings={"ignore_unknown_options": True})  # so that -1 is a label
def label(
    config: Config,
    window: Annotated[str, typer.Argument(metavar="WINDOW", help="A file's name without .npz, or NAME/ROW.")],
    value: Annotated[str, typer.Argument(metavar="LABEL", help="A class's name or number, or the number to learn.")],
) -> None:
    """Say what a window in the device's folder was, also while the agent runs; the last word counts.

    The label is on flash when this returns. -1 takes back what was said.
    """
    from talaria.errors import ConfigError
    from talaria.foreign import shown
    from talaria_edge.config import load_config
    from talaria_edge.recording.folder import FolderSource

    source = load_config(config).source
    if not isinstance(source, FolderSource):
        raise ConfigError(f'{config}: [data] source is no folder that fills; set source = "folder" and path')
    if not source.holds(window):
        raise ConfigError(
            f"label: {source.path} holds no window {shown(window)}; give a file's name without .npz, and of a file "
            "with several NAME/ROW, counted from 0"
        )
    said: int | float | str = value
    if value not in source.labels:
        for kind in (int, float):
            try:
                said = kind(value)
                break
            except ValueError:
                continue
    source.label(window, said)


@app.command()
def result(
    state: Annotated[Path, typer.Argument(metavar="STATE", help="The device's state folder.")],
) -> None:
    """Print what came of a device's last run: paths, traffic by round, what the bundle measured, and which bundle is in
    force now (JSON)."""
    from talaria.errors import StateError
    from talaria.foreign import parsed
    from talaria_edge.deployment import gate

    path = state / "result.json"
    if not path.exists():
        raise StateError(f"{path} is not there; the device has not finished a run yet, or this is another folder")
    try:
        found = parsed(path.read_bytes())
        if not isinstance(found, dict):
            raise ValueError("no table")
    except (OSError, ValueError) as error:
        raise StateError(f"{path} cannot be read ({error}); delete it, the next run writes another") from None
    typer.echo(json.dumps(found | {"in_force": vars(gate.read(state))}, indent=2))
