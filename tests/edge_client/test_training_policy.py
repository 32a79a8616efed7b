import subprocess
import sys
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from talaria.errors import ConfigError
from talaria_edge.training_policy import Allowed, Reading, Rules, allowed, hours, read

NOON = 12 * 60


def test_a_rested_device_may_train() -> None:
    decision = allowed(Reading(minute=NOON, battery=0.8, charging=False, celsius=30, load=0.1), Rules())
    assert decision == Allowed(True, "every rule allows it")
    assert decision


@pytest.mark.parametrize(
    ("reading", "rules", "word"),
    [
        (Reading(minute=0, battery=0.29, charging=False), Rules(), "battery"),
        (Reading(minute=0, battery=0.99, charging=False), Rules(only_charging=True), "charging"),
        (Reading(minute=0, celsius=45.1), Rules(), "degrees"),
        (Reading(minute=0, load=1.01), Rules(max_load=1.0), "load"),
        (Reading(minute=0, idle_s=59), Rules(min_idle_s=60), "rest"),
        (Reading(minute=0), Rules(min_idle_s=60), "cannot tell"),
        (Reading(minute=NOON), Rules(hours=(22 * 60, 6 * 60)), "22:00-06:00"),
        (Reading(minute=NOON, load=float("nan")), Rules(max_load=1.0), "load"),
    ],
)
def test_each_rule_forbids_with_its_reason(reading: Reading, rules: Rules, word: str) -> None:
    decision = allowed(reading, rules)
    assert not decision
    assert word in decision.reason


@pytest.mark.parametrize(
    ("reading", "rules"),
    [
        (Reading(minute=0, battery=0.3, charging=False), Rules()),
        (Reading(minute=0, battery=0.05, charging=True), Rules(only_charging=True)),
        (Reading(minute=0), Rules(only_charging=True)),  # no battery: mains power
        (Reading(minute=0, celsius=None, load=None), Rules(max_load=0.5)),
        (Reading(minute=0, celsius=45.0), Rules()),
        (Reading(minute=0, idle_s=60), Rules(min_idle_s=60)),
        (Reading(minute=0, battery=0.01, charging=False), Rules(min_battery=None)),
    ],
)
def test_at_the_limit_and_without_a_sensor_it_is_allowed(reading: Reading, rules: Rules) -> None:
    assert allowed(reading, rules)


@given(begin=st.integers(0, 1439), end=st.integers(0, 1439), minute=st.integers(0, 1439))
def test_a_schedule_and_its_complement_split_the_day(begin: int, end: int, minute: int) -> None:
    if begin == end:
        return
    reading = Reading(minute=minute)
    assert allowed(reading, Rules(hours=(begin, end))).ok != allowed(reading, Rules(hours=(end, begin))).ok


def test_hours_are_read_from_text() -> None:
    assert hours("22:00-06:30") == (1320, 390)
    for wrong in ("22-6", "", "25:00-01:00", "1:00", "1:00-2:00-3:00"):
        with pytest.raises(ConfigError, match="HH:MM-HH:MM"):
            hours(wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_battery": 1.1},
        {"max_celsius": float("nan")},
        {"max_load": -1},
        {"min_idle_s": "soon"},
        {"hours": (0, 1440)},
        {"hours": (5, 5)},
        {"hours": "22:00-06:30"},
        {"hours": (22.5, 6)},
        {"only_charging": "yes"},
    ],
)
def test_rules_that_mean_nothing_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Rules(**wrong)  # type: ignore[arg-type]


def test_this_machine_gives_a_reading() -> None:
    found = read(datetime(2026, 1, 1, 7, 30))
    assert found.minute == 450
    assert found.load is None or found.load >= 0
    assert found.battery is None or 0 <= found.battery <= 1


def test_a_device_without_torch_reads_its_machine() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; from talaria_edge import training_policy as p; print(p.read().minute)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip().isdecimal(), done.stderr
