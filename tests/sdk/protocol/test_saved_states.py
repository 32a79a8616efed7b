"""What is saved is read as it was, and costs no more than its bytes."""

import typing

import pytest

from talaria.protocol import state_codec
from talaria.protocol.coordinator.state import Attempt, CoordinatorState, Participant, Peer


def test_a_saved_state_asks_what_its_fields_are_once_for_thousands_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dashboard reads it every few seconds."""
    names = [f"dev-{i:03}" for i in range(50)]
    cohort = {name: Participant(b"spec", phase="stored", sha256=b"\1" * 32) for name in names}
    peers = {name: Peer(boot=3, online=True, births=[(1.0, b"p", True)]) for name in names}
    state = CoordinatorState(epoch=7, current=1, peers=peers, attempts={1: Attempt(1, 0, b"d", 9.0, 1, 2, 0, cohort)})
    asked: list[object] = []
    monkeypatch.setattr(
        state_codec, "get_type_hints", lambda kind: (asked.append(kind), typing.get_type_hints(kind))[1]
    )
    state_codec._expected.cache_clear()
    data = state_codec.dump(state)
    asked.clear()
    assert CoordinatorState.load(data) == state
    assert CoordinatorState.load(data) == state
    assert {Peer, Participant, Attempt, CoordinatorState} <= set(asked)
    assert len(asked) == len(set(asked))
