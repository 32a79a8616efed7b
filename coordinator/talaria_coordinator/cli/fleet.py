"""``talaria fleet``: who belongs to a fleet, and with which keys."""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from talaria_coordinator.cli.options import AsJson, Device

if TYPE_CHECKING:
    from talaria_coordinator.identity.expiry import Ending

app = typer.Typer(
    help="Who belongs to a fleet: its keys, one-time codes, members, revocations.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The fleet's folder, made by `talaria fleet init`.")]

STEPS = """
How a device joins:

\b
    talaria fleet init DIR --name watch --host broker.example
    talaria fleet enroll DIR anna                      # prints a one-time code
    talaria edge join identity                         # on the device; asks for the code
    talaria fleet admit DIR anna.request -o anna.answer
    talaria edge join identity --answer anna.answer    # on the device
    talaria coordinator serve DIR/fleet.toml

Request and answer hold nothing secret and may travel by any way. The code is the only secret.
"""


@app.command(epilog=STEPS)
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder; keep it to yourself.")],
    name: Annotated[str, typer.Option(help="The fleet's name: 1 to 36 of a-z, 0-9, '-' and '_'.")],
    host: Annotated[
        list[str] | None,
        typer.Option(
            help="A name or address that devices reach the broker by; may be given again. Default: localhost."
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="The broker's port.")] = 8883,
    devices: Annotated[int, typer.Option(min=1, help="How many devices to wait for before learning begins.")] = 16,
    api_port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="Port of the dashboard and the API, on this machine; 0 is any free one."),
    ] = 8420,
    as_json: AsJson = False,
) -> None:
    """Make a fleet: its authority, the coordinator's keys, a hardened Mosquitto configuration, the API's token, and
    fleet.toml, which can be served as it is.

    The broker accepts TLS with a certificate of this fleet only, and lets each device use its own topics only.
    Change [run] in fleet.toml to what your fleet learns.
    """
    from talaria_coordinator.cli.template import found

    made = found(folder, name, host or ["localhost"], port, devices, api_port)
    if as_json:
        typer.echo(json.dumps(made))
        return
    typer.echo(f"fleet {name} is made in {folder}; devices reach its broker at {made['broker']}.")
    typer.echo(f"Let devices in: talaria fleet enroll {shlex.quote(str(folder))} DEVICE")
    typer.echo(f"Serve it:       talaria coordinator serve {shlex.quote(str(folder / 'fleet.toml'))}")
    typer.echo(f"Look at it:     the address that it prints then, with the token in {made['token_file']}")


@app.command(epilog=STEPS)
def enroll(
    folder: Folder,
    device: Device,
    hours: Annotated[float, typer.Option(help="How long the code is good for.")] = 24.0,
    as_json: AsJson = False,
) -> None:
    """Print a one-time code for a device, to be typed there. For a member, the code brings it new keys.

    Hand it over by a way that nobody else reads. The fleet keeps only its public half: a lost code cannot be
    shown again, but a new one can be made, which voids the old.
    """
    from talaria_coordinator.identity import membership

    code = membership.enroll(folder, device, hours)
    if as_json:
        typer.echo(json.dumps({"device": device, "code": code.text(), "hours": hours}))
    else:
        typer.echo(code.text())
        typer.echo(f"Good for {hours:g} h, once. On the device: talaria edge join identity", err=True)


@app.command(epilog=STEPS)
def admit(
    folder: Folder,
    request: Annotated[Path, typer.Argument(metavar="REQUEST", help="What `talaria edge join` wrote.")],
    answer: Annotated[Path, typer.Option("-o", "--out", help="Where the answer for the device goes.")],
    as_json: AsJson = False,
) -> None:
    """Let in the device whose request was made with an open code, and write the answer for it."""
    from talaria.errors import ConfigError
    from talaria.identity import credentials
    from talaria.identity.enrolment import LARGEST
    from talaria_coordinator.identity import membership

    if not answer.parent.is_dir() or answer.is_dir():
        raise ConfigError(f"admit: {answer} cannot be written; give -o a file in a folder that is there")
    data = credentials.read(request, "give the file that `talaria edge join` wrote", LARGEST)
    made = membership.admit(folder, data, answer)
    if as_json:
        typer.echo(json.dumps({"device": made.device, "answer": str(answer)}))
        return
    typer.echo(
        f"{made.device} is a member now. On the device, with the folder of its keys: "
        f"talaria edge join FOLDER --answer {answer.name}"
    )


@app.command()
def revoke(folder: Folder, device: Device, as_json: AsJson = False) -> None:
    """Shut a device out: nothing it says counts any more, and the broker refuses its certificate and every topic.

    A coordinator that is running notices at once: its broker reads its lists again, the device's link is cut, and what
    it left there is cleared. A broker of your own: copy DIR/broker to it and reload it.
    """
    from talaria_coordinator.identity import membership

    membership.revoke(folder, device)
    typer.echo(json.dumps({"device": device, "revoked": True}) if as_json else f"{device} is shut out.")


@app.command()
def rotate(folder: Folder, as_json: AsJson = False) -> None:
    """Give the broker and the coordinator, with its ingest workers, new TLS keys and certificates, for 397 days from
    today.

    Devices notice nothing. Restart the coordinator to use them. A device gets new keys by a new enrolment.
    """
    from talaria_coordinator.identity import membership
    from talaria_coordinator.identity.expiry import Ending

    with membership.changing(folder) as change:
        membership.renew(folder, change.roll)
        ending = Ending.of(folder, change.roll)
    if as_json:
        typer.echo(json.dumps({"certificates": _ends(ending)}))
        return
    typer.echo("New TLS keys for the broker and the coordinator; restart the coordinator to use them.")


def _ends(ending: Ending) -> list[dict[str, str | float]]:
    """The fleet's own certificates, and until when (seconds since 1970) each holds."""
    return [{"what": one.what, "until": one.ends} for one in ending.own]


@app.command("list")
def members(folder: Folder, as_json: AsJson = False) -> None:
    """Show members, revoked devices, open codes, and when certificates end."""
    from talaria_coordinator.identity.ca import LEAF_DAYS
    from talaria_coordinator.identity.expiry import Ending
    from talaria_coordinator.identity.membership import Membership

    roll, now = Membership.load(folder), time.time()
    rows = [
        {
            "device": name,
            "key": m.key.hex(),
            "since": m.since,
            "until": m.since + LEAF_DAYS * 86400,
            "revoked": m.revoked,
        }
        for name, m in sorted(roll.members.items())
    ]
    codes = {name: (end - now) / 3600 for name, (_, end) in sorted(roll.codes.items())}
    waiting = [{"device": name, "hours": left} for name, left in codes.items()]
    ending = Ending.of(folder, roll)
    warnings = ending.warnings(now)
    if as_json:
        facts = {"fleet": roll.fleet, "broker": roll.broker, "members": rows, "codes": waiting}
        typer.echo(json.dumps({**facts, "certificates": _ends(ending), "warnings": warnings}))
        return
    for name, m in sorted(roll.members.items()):
        state = "revoked" if m.revoked else "member"
        until = time.strftime("%Y-%m-%d", time.localtime(m.since + LEAF_DAYS * 86400))
        typer.echo(f"{name:<36}  {state:<8}  key {m.key.hex()[:16]}  until {until}")
    for name, left in codes.items():
        typer.echo(f"{name:<36}  code      {f'good for {left:.1f} hours' if left > 0 else 'expired'}")
    for one in ending.own:
        typer.echo(f"{one.what} holds until {one.day}")
    for text in warnings:
        typer.echo(f"warning: {text}")
