"""What strangers say ends up before operators: in the journal, in the terminal, in the API. It stays text there."""

import io
import json

import pytest

from talaria.event_log import EventLog
from talaria.protocol.coordinator.machine import CoordinatorState
from talaria.protocol.coordinator.state import Peer
from talaria.wire import messages as m
from talaria.wire.frames import Header, decode_frame, encode_frame
from talaria_coordinator.cli.status import render

FORGED = "x\n12:00:00 quarantined    device=anna"
COLOURS = "\x1b[2J\x1b]0;owned\x07"


def told(reason, as_json=False):
    stream = io.StringIO()
    EventLog(stream, as_json)({"at": 0.0, "event": "refused", "device": "eve", "reason": reason})
    return stream.getvalue()


@pytest.mark.parametrize("reason", [FORGED, COLOURS, "a\rb", "\u202egnp.exe", "\ud800", "x\u2028y"])
@pytest.mark.parametrize("as_json", [False, True])
def test_a_reason_cannot_begin_a_line_of_its_own_nor_steer_a_terminal(reason, as_json):
    line = told(reason, as_json)
    assert line.endswith("\n")
    assert line[:-1].isprintable()
    line.encode()


def test_plain_reasons_read_as_they_were_said():
    assert told("tensor 'größe' is missing").rstrip().endswith("reason=\"tensor 'größe' is missing\"")
    assert json.loads(told(FORGED, as_json=True))["reason"] == FORGED


@pytest.mark.parametrize(
    "reason", ["[/x] is unknown", "[red]all is well[/red]", "[link=http://evil]x[/link]", "no aa:cd:ee", COLOURS]
)
def test_the_terminals_view_takes_no_markup_from_a_reason(capsys, reason):
    shown = status_with(reason, capsys)
    assert "\x1b" not in shown
    whole = "".join(character for character in shown if character.isalnum())
    plain = reason if reason.isprintable() else ascii(reason)
    assert "".join(c for c in plain if c.isalnum())[:8] in whole


def test_a_reason_stands_whole_on_a_narrow_terminal_and_once_for_attempts_that_fail_alike(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    reason = "14 of at least 16 updates came; anna declined (augment imu is not known here; use none)"
    lines = status_with(reason, capsys, attempts=5).splitlines()
    assert [line for line in lines if reason in line] == [
        f"attempts 1 to 5 failed: {reason}",
        f"eve is in quarantine: {reason}",
    ]
    assert any("6.820 (0.93)" in line for line in lines)


def status_with(reason, capsys, attempts=1):
    """What ``status`` prints of a fleet of which all attempts failed, and a device is shut out, for ``reason``."""
    device = {"device": "eve", "online": True, "boot": 1, "seen": 0.0, "quarantine": reason, "retired": False}
    row = {"round": 1, "cohort": 16, "counted": None, "seconds": None, "bytes_up": 0, "failure": reason, "means": {}}
    row |= {"bytes_down": None, "bytes_dense": None}
    counted = {"attempt": attempts + 1, "counted": 16, "bytes_up": 6_820_000, "bytes_dense": 457_056, "failure": ""}
    rows = [*(row | {"attempt": attempt + 1} for attempt in range(attempts)), row | counted]
    nobody = {"waits_for": [], "canary": [], "privacy": None, "resting": [], "workers": [], "served": True}
    fleet = {"fleet": "watch", "status": "running", "round": 0, "rounds": 1, "epoch": 1, "model_digest": "ab" * 32}
    render({**fleet, "history": rows, "devices": [device], "waiting": None, "certificates": None, **nobody})
    return capsys.readouterr().out


def test_a_reason_that_is_no_text_is_still_sent_and_saved():
    """A file name on a device may hold bytes that are no text; they must not stop the machine that reports it."""
    sent = encode_frame(
        Header("decline", "watch", "anna"), m.encode_message(m.Decline(attempt=1, reason="no \udcff.npz"))
    )
    assert m.decode_message(decode_frame(sent)).reason == "no ?.npz"
    state = CoordinatorState(peers={"anna": Peer(out="\ud800")})
    assert CoordinatorState.load(state.dump()).peers["anna"].out == "?"
