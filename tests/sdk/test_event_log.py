"""Lines for people: short, whatever an event carries; JSON has all of it."""

import io
import json

from talaria.event_log import EventLog

DONE = {
    "at": 0.0,
    "event": "done",
    "device": "anna",
    "personal": "state/anna/personal.safetensors",
    "parameters": 4711,
    "variants": {name: {"bytes": 123456, "accuracy": 0.9, "latency_ms": 1.25, "kept": True} for name in "abcd"},
    "traffic": {str(step): {"up": 3800, "down": 39000} for step in range(1, 31)},
    "result": "state/anna/result.json",
}


def told(event, as_json):
    out = io.StringIO()
    EventLog(out, as_json)(event)
    return out.getvalue()


def test_the_end_of_a_run_is_one_line_that_can_be_read():
    line = told(DONE, as_json=False)
    assert len(line) < 250
    assert "parameters=4711" in line
    assert "traffic={30 entries}" in line.replace('"', "")
    assert "result=state/anna/result.json" in line


def test_a_small_table_is_shown_as_it_is():
    line = told({"at": 0.0, "event": "received", "traffic": {"up": 1, "down": 2}}, as_json=False)
    assert "traffic={up: 1, down: 2}" in line


def test_programs_are_told_everything():
    assert json.loads(told(DONE, as_json=True)) == DONE


def test_what_strangers_say_begins_no_line_and_no_fact_of_its_own():
    """Names of channels come from a coordinator's kit; a table's were written as they are."""
    told_of = told({"at": 0.0, "event": "planned", "widths": {"a\n00:00:00 done \x1b[2J": 3}}, as_json=False)
    assert told_of.count("\n") == 1
    assert told_of.strip().isprintable()
    declined = told({"at": 0.0, "event": "progress", "reason": 'flat" device="bela'}, as_json=False)
    assert declined.endswith(r'reason="flat\" device=\"bela"' + "\n")
