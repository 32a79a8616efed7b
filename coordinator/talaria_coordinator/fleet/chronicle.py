"""What a fleet has lived through, told from its audit log: who came and left, which runs followed one another, which
trials passed, what was paused and restored."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Event = Mapping[str, Any]
NAMED = 6
"""So many devices are named; of more, how many they are."""
KINDS = (
    "fleet-created", "device-joined", "device-retired", "device-readmitted", "quarantined", "released", "roster-fixed",
    "run-extended", "run-followed", "canary-members", "canary-passed", "canary-called-off", "fleet-paused",
    "fleet-running", "fleet-aborted", "restored", "coordinator-started", "round-closed", "round-failed",
)  # fmt: skip
"""The events that are told, or counted."""


@dataclass(frozen=True)
class Moment:
    """Something that happened ``at`` a unix time, after ``round`` committed rounds, with ``members`` from then on."""

    at: float
    round: int
    members: int
    kind: str
    text: str


@dataclass(frozen=True)
class Chronicle:
    """The whole story, oldest first, and how often each kind of event happened."""

    begin: float
    end: float
    rounds: int
    moments: tuple[Moment, ...]
    counts: Mapping[str, int]
    left_by_owner: int = 0
    """Of those that left for good, how many by their owner's hand."""
    trials: int = 0
    """Runs that some members tried first."""

    def facts(self) -> dict[str, Any]:
        """As plain data."""
        counts = {kind: self.counts.get(kind, 0) for kind in KINDS}
        return {
            "begin": self.begin,
            "end": self.end,
            "rounds": self.rounds,
            "rounds_failed": counts["round-failed"],
            "members": self.moments[-1].members if self.moments else 0,
            "joined": counts["device-joined"],
            "retired": counts["device-retired"],
            "left_by_owner": self.left_by_owner,
            "readmitted": counts["device-readmitted"],
            "shut_out": counts["quarantined"],
            "warm_starts": counts["run-followed"],
            "trials": self.trials,
            "trials_passed": counts["canary-passed"],
            "trials_called_off": counts["canary-called-off"],
            "extended": counts["run-extended"],
            "pauses": counts["fleet-paused"],
            "restores": counts["restored"],
            "starts": counts["coordinator-started"] + counts["fleet-created"],
            "moments": [vars(moment) for moment in self.moments],
        }


def chronicle(events: Sequence[Event]) -> Chronicle:
    """The story of these events of one fleet, oldest first; others than :data:`KINDS` are passed over."""
    told: list[Moment] = []
    devices: list[str] = []
    round, roster = 0, set[str]()
    for event in events:
        kind = event["kind"]
        if kind == "round-closed":
            round = int(event.get("round", event.get("step", 0)))  # up to revision 0003 the log said `step`
        if kind == "roster-fixed":
            roster = set(event["roster"])
        elif kind == "device-retired":
            roster = roster - {event["device"]}
        elif kind == "device-readmitted":
            roster = roster | {event["device"]}
        if told and kind == "roster-fixed":  # who came stands there; from now on they are members
            told[-1] = Moment(told[-1].at, told[-1].round, len(roster), told[-1].kind, told[-1].text)
        mark, text = _told(event)
        if not text:
            continue
        same = told and told[-1].kind == mark == "join" and told[-1].round == round and event["at"] - told[-1].at < 60
        devices = [*devices, str(event["device"])] if same else [str(event["device"])]
        if same:
            told.pop()
            text = f"{_names(devices)} come"
        told.append(Moment(float(event["at"]), round, len(roster), mark, text))
    begin, end = (float(events[i]["at"]) if events else 0.0 for i in (0, -1))
    owners = sum(event["kind"] == "device-retired" and event.get("by") == "owner" for event in events)
    trials = sum(event["kind"] == "run-followed" and bool(event.get("tried_by")) for event in events)
    return Chronicle(begin, end, round, tuple(told), Counter(str(event["kind"]) for event in events), owners, trials)


def _names(devices: Sequence[str]) -> str:
    return ", ".join(sorted(devices)) if len(devices) <= NAMED else f"{len(devices)} devices"


def _told(event: Event) -> tuple[str, str]:
    """The kind of mark and the words for an event; no words for one that is only counted."""
    device, why = event["device"], f": {event['reason']}" if event.get("reason") else ""
    match event["kind"]:
        case "fleet-created":
            return "begin", "the fleet begins"
        case "device-joined":
            return "join", f"{device} comes"
        case "device-retired":
            by = " by its owner's hand" if event.get("by") == "owner" else ""
            return "leave", f"{device} leaves for good{by}{why}"
        case "device-readmitted":
            return "join", f"{device} is taken in again{why}"
        case "quarantined":
            return "leave", f"{device} is shut out{why}"
        case "released":
            return "join", f"{device} is let in again"
        case "run-extended":
            return "extend", f"the run goes on for {some(event['by'], 'round')} more, to round {event['rounds']}"
        case "run-followed":
            grown = f"; {', '.join(event['grown'])} grow" if event.get("grown") else ""
            tried = event.get("tried_by", ())
            by = f"; {_names(tried)} try it first" if tried else ""
            return "trial" if tried else "next", f"another run begins, to round {event['rounds']}{grown}{by}"
        case "canary-members":
            return "trial", f"{_names(event['members'])} try it from now on"
        case "canary-passed":
            return "passed", f"its trial passes: {_gates(event)}"
        case "canary-called-off":
            return "off", f"its trial is called off, the run before is in force: {_gates(event)}"
        case "fleet-paused":
            return "pause", f"paused{why}"
        case "fleet-running":
            return "resume", f"resumed{why}"
        case "fleet-aborted":
            return "pause", f"called off{why}"
        case "restored":
            return (
                "restored",
                f"restored from the backup of {when(event['backup'])}; what came after it is learned again",
            )
    return "", ""


def _gates(event: Event) -> str:
    return f"of {some(event['asked'], 'gate')} {event['answered']} answered and {event['refused']} refused"


def some(count: int, what: str) -> str:
    """So many of something, as people say it.

    >>> some(1, "round"), some(2, "round")
    ('1 round', '2 rounds')
    """
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def when(at: float | str) -> str:
    """A unix time as people read it, to the second; a text stays as it is."""
    return at if isinstance(at, str) else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
