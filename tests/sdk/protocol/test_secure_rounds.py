"""The steps of a secure round, in virtual time."""

from __future__ import annotations

import pytest

from talaria.protocol import actions as a
from talaria.protocol import events as e
from talaria.protocol import words
from talaria.protocol.coordinator.machine import CoordinatorMachine, CoordinatorState
from talaria.protocol.device.machine import DeviceMachine, DeviceState
from talaria.protocol.device.state import Job
from talaria.wire import messages as m
from talaria.wire.chunks import describe
from talaria.wire.frames import Header, decode_frame, encode_frame

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


@pytest.mark.parametrize(
    ("reasons", "quorum", "secure", "opened"),
    [
        ([words.OPENED], 3, STEP_S, False),
        ([words.OPENED, f"{words.OPENED} of round 1"], 3, STEP_S, True),
        ([words.OPENED, "battery below 20 %"], 3, STEP_S, False),
        ([words.OPENED], 4, STEP_S, True),
        ([words.OPENED], 4, 0.0, False),
    ],
)
def test_a_round_is_opened_once_too_few_are_left_who_did_not_help_to_open_it(reasons, quorum, secure, opened):
    """With four devices and a quorum of three, one more try may succeed without one of them, and not without two."""
    names = ("anna", "bela", "carl", "dora")
    half, state = CoordinatorMachine("watch"), CoordinatorState()
    half.step(state, e.Start(0.0, 1))
    half.step(state, e.PublishModel(0.0, 0, describe(b"model", 1024)))
    half.step(state, e.OpenRound(0.0, 1, dict.fromkeys(names, b"{}"), 60.0, quorum, secure=secure))
    actions = []
    for name, reason in zip(names, reasons, strict=False):
        said = m.Decline(attempt=1, reason=reason)
        payload = encode_frame(Header(said.TYPE, "watch", name, boot=1, seq=1), m.encode_message(said))
        actions += half.step(state, e.Received(1.0, f"fl/1/watch/d/{name}/evt", payload))[1]
    actions += half.step(state, e.AbortRound(2.0, 1, "a step failed"))[1]
    assert [action.opened for action in actions if isinstance(action, a.RoundFailed)] == [opened]


@pytest.mark.parametrize("attempt", [1, 2])
@pytest.mark.parametrize("step", [None, 0, 1])
def test_who_comes_back_to_a_secure_round_that_is_over_is_told_so(attempt, step):
    """By what it says first: that it has the work, or its word, which was heard before it went away, or was not; also
    where nothing is known of the round any more."""
    half, state = CoordinatorMachine("watch"), CoordinatorState()
    half.step(state, e.Start(0.0, 1))
    half.step(state, e.PublishModel(0.0, 0, describe(b"model", 1024)))
    half.step(state, e.OpenRound(0.0, 1, dict.fromkeys(NAMES, b"{}"), 60.0, 3, secure=STEP_S))
    state.attempts[1].cohort["anna"].step = 1
    half.step(state, e.AbortRound(1.0, 1, "too few"))
    said = m.Accept(attempt=attempt) if step is None else m.Word(attempt=attempt, step=step, part=0, parts=1, data=b"x")
    payload = encode_frame(Header(said.TYPE, "watch", "anna", boot=2, seq=1), m.encode_message(said))
    _, actions = half.step(state, e.Received(2.0, "fl/1/watch/d/anna/evt", payload))
    told = [m.decode_message(decode_frame(x.payload)) for x in actions if isinstance(x, a.Publish)]
    assert [answer.attempt for answer in told if isinstance(answer, m.Abort)] == [attempt]
    assert not any(isinstance(answer, m.Heard) for answer in told)


def test_of_a_round_that_is_over_no_word_is_said_again():
    half, state = DeviceMachine("watch", "anna"), DeviceState(boot=1, epoch=1, linked=True)
    state.job = Job(1, 0, bytes(32), b"{}", None, 1, phase="training")
    half.step(state, e.SayWord(0.0, 1, 0, b"advert"))
    assert half.step(state, e.Tick(100.0))[1]
    payload = encode_frame(
        Header("abort", "watch", "anna", boot=1, seq=1), m.encode_message(m.Abort(attempt=1, reason="over"))
    )
    half.step(state, e.Received(101.0, "fl/1/watch/d/anna/cmd", payload))
    assert (state.job.phase, state.saying) == ("done", None)
