"""What a running program tells: one line per event, for people or, as JSON, for programs."""

import json
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TextIO

_HIDDEN = ("at", "event", "level")
_WIDEST = 100
"""Characters of a table that a line for people shows; a longer one is counted. JSON has all of it."""


@dataclass(frozen=True)
class EventLog:
    """Writes events to ``stream`` (None where the program has none) and flushes each. An event is a dict with ``at``
    (unix seconds) and ``event``.

    >>> import sys
    >>> EventLog(sys.stdout, as_json=True)({"at": 0.0, "event": "round", "round": 3})
    {"at": 0.0, "event": "round", "round": 3}
    """

    stream: TextIO | None
    as_json: bool = False

    def __call__(self, event: Mapping[str, Any]) -> None:
        line = json.dumps(dict(event)) if self.as_json else self._line(event)
        if self.stream is not None:
            with suppress(OSError):  # a disk that is full, or a reader that is gone, takes the log and not the program
                self.stream.write(line + "\n")
                self.stream.flush()

    @staticmethod
    def _line(event: Mapping[str, Any]) -> str:
        at = time.strftime("%H:%M:%S", time.localtime(event.get("at", time.time())))
        facts = " ".join(f"{k}={_short(v)}" for k, v in event.items() if k not in _HIDDEN and v not in (None, "", {}))
        return f"{at} {event.get('event', '?'):<14} {facts}".rstrip()


def let_go() -> None:
    """What a full disk, or a reader that is gone, has not taken when a program ends is lost: Python would try once
    more, and call a program that did its work a failed one (exit status 120)."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        shown = "{" + ", ".join(f"{_short(k)}: {_short(v)}" for k, v in value.items()) + "}"
        return shown if len(shown) <= _WIDEST else f"{{{len(value)} entries}}"
    text = str(value)
    if not text.isprintable():  # what a stranger sent must not begin a line of its own, nor steer a terminal
        return ascii(text)
    return json.dumps(text, ensure_ascii=False) if " " in text or '"' in text else text
