"""``talaria coordinator backup | restore | fsck | gc``: the care of a store. See docs/operating.md."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from talaria_coordinator.cli.options import AsJson, Config


def backup(
    config: Config,
    dest: Annotated[Path, typer.Argument(metavar="DEST", help="A folder that is not there yet.")],
    as_json: AsJson = False,
) -> None:
    """Copy the state to a new folder: all rows of one moment and the blobs they name. The coordinator may run on.

    It holds no keys: copy those of `talaria fleet init` and the password files apart from it, and keep them apart.
    """
    from talaria_coordinator.config.fleet import load_config
    from talaria_coordinator.maintenance.backup import back_up, summary
    from talaria_coordinator.server.open_state import open_blobs, open_store

    loaded = load_config(config)
    with open_store(loaded, make=False) as store:
        made = summary(back_up(store, open_blobs(loaded), dest))
    _say(
        {"backup": str(dest), **made},
        f"{dest}: {made['rows']} rows, {made['blobs']} blobs, {made['bytes']:,} bytes",
        as_json,
    )


def restore(
    config: Config,
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="What `talaria coordinator backup` made.")],
    as_json: AsJson = False,
) -> None:
    """Fill an empty store from a backup; it may be another kind of store than the backup was taken from.

    Stop the coordinator and move the damaged state away first. Devices notice a new epoch and go on; what was
    learned after the backup is learned again.
    """
    from talaria_coordinator.config.fleet import load_config
    from talaria_coordinator.maintenance.backup import summary
    from talaria_coordinator.maintenance.restore import restore as restore_from
    from talaria_coordinator.server.open_state import held, open_blobs

    loaded = load_config(config)
    with held(loaded.state):
        made = summary(restore_from(loaded.database, open_blobs(loaded), source, loaded.name))
    _say({"restored": str(source), **made}, f"{made['rows']} rows and {made['blobs']} blobs are restored", as_json)


def fsck(config: Config, as_json: AsJson = False) -> None:
    """Check the whole state: every blob in use, the audit log, every round's counted updates. Exit status 1 where
    something is damaged. It only reads; the coordinator may run on."""
    from talaria_coordinator.config.fleet import load_config
    from talaria_coordinator.maintenance.fsck import check
    from talaria_coordinator.server.open_state import open_blobs, open_store

    loaded = load_config(config)
    with open_store(loaded, make=False) as store:
        found = check(store, open_blobs(loaded))
    facts = {"damage": list(found.damage), "orphans": list(found.orphans), "events": found.events,
             "attempts": found.attempts, "blobs": found.blobs}  # fmt: skip
    lines = [f"damaged: {text}" for text in found.damage]
    lines.append(
        f"{found.attempts} attempts, {found.events} events and {found.blobs} blobs in use are "
        + ("whole" if not found.damage else f"checked; {len(found.damage)} things are damaged")
    )
    if found.orphans:
        lines.append(
            f"{len(found.orphans)} blobs are left over from earlier rounds, which is no damage: the coordinator frees "
            "them after a later round, or `talaria coordinator gc` does"
        )
    _say(facts, "\n".join(lines), as_json)
    if found.damage:
        raise typer.Exit(1)


def gc(
    config: Config,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say how much would be freed.")] = False,
    hours: Annotated[
        float, typer.Option(min=0, help="Leave what is younger; below an hour only while nothing serves.")
    ] = 1.0,
    as_json: AsJson = False,
) -> None:
    """Free what nothing names any more. A coordinator that runs does so after each round; this is for what is left."""
    from talaria_coordinator.config.fleet import load_config
    from talaria_coordinator.server.open_state import held, open_blobs, open_store

    loaded = load_config(config)
    # What is younger may be an update, or a model, that a coordinator has put and will name.
    alone = held(loaded.state) if hours < 1 and not dry_run else nullcontext()
    with alone, open_store(loaded, make=False) as store:
        freed, left = open_blobs(loaded).gc(store.blobs_in_use(), older_s=3600 * hours, dry_run=dry_run)
    text = f"{freed:,} bytes {'would be' if dry_run else 'are'} freed"
    if hours and left:
        text += f"; {left:,} more are younger than {hours:g} h, which --hours 0 frees while no coordinator serves"
    _say({"freed": freed, "dry_run": dry_run, "younger": left}, text, as_json)


def _say(facts: dict[str, Any], text: str, as_json: bool) -> None:
    typer.echo(json.dumps(facts) if as_json else text)
