"""The steps of a secure round, in virtual time."""

from __future__ import annotations

import pytest

from talaria.protocol import actions as a
from talaria.protocol import events as e
from talaria.protocol import words
from talaria.protocol.coordinator.machine import CoordinatorMachine, CoordinatorState
from talaria.wire.chunks import describe

NAMES = ("anna", "bela", "carl")
STEP_S = 6.0


@pytest.mark.parametrize(("step", "times"), [(1, 1), (words.UPLOAD, 10), (3, 1), (words.OPENING, 10)])
def test_a_step_that_nobody_answers_ends_in_time_and_the_opening_no_sooner_than_the_updates(step, times):
    """An opening that is missed is not made again, and what was sent for it is lost: an outage must be survived."""
    half, state = CoordinatorMachine("watch"), CoordinatorState()

    def ended(event):
        return [action for action in half.step(state, event)[1] if isinstance(action, a.RoundFailed)]

    half.step(state, e.Start(0.0, 1))
    half.step(state, e.PublishModel(0.0, 0, describe(b"model", 1024)))
    half.step(state, e.OpenRound(0.0, 1, dict.fromkeys(NAMES, b"{}"), 60.0, 3, secure=STEP_S))
    for member in state.attempts[1].cohort.values():
        member.phase = "stored" if step > words.UPLOAD else member.phase
    half.step(state, e.NextStep(10.0, 1, step, frozenset(NAMES)))
    assert not ended(e.Tick(10.0 + times * STEP_S - 0.1))
    assert ended(e.Tick(10.0 + times * STEP_S + 0.1))
