"""A flood of refusals does not become a flood of lines."""

from talaria.protocol.actions import FrameRefused
from talaria_coordinator.fleet.refusals import EVERY_S, KINDS, Refusals


class Told(list):
    def __call__(self, event, **facts):
        assert event == "refused"
        self.append(facts)


def test_a_repeated_refusal_is_told_once_and_then_counted():
    told = Told()
    refusals = Refusals(told)
    for i in range(10_000):
        refusals.heard(FrameRefused(f"fl/1/watch/d/anna/up/x{i}", "anna", f"quarantined: {i} offences"), now=i / 10_000)
    assert len(told) == 1
    refusals.due(EVERY_S - 1)
    assert len(told) == 1
    refusals.due(EVERY_S)
    assert (told[1]["more"], told[1]["topic"]) == (9_999, "fl/1/watch/d/anna/up/x9999")
    refusals.due(3 * EVERY_S)
    refusals.due(4 * EVERY_S)
    assert len(told) == 2
    refusals.heard(FrameRefused("fl/1/watch/d/anna/up/x", "anna", "quarantined: 3"), now=5 * EVERY_S)
    assert len(told) == 3


def test_other_devices_and_other_reasons_are_told_at_once():
    told = Told()
    refusals = Refusals(told)
    for device, kind, reason in (
        ("anna", "evt", "late"),
        ("bela", "evt", "late"),
        ("anna", "evt", "not signed"),
        ("anna", "up", "late"),
    ):
        refusals.heard(FrameRefused(f"fl/1/watch/d/{device}/{kind}", device, reason), now=0.0)
    assert len(told) == 4


def test_a_stranger_who_thinks_of_new_ones_fills_no_memory():
    told = Told()
    refusals = Refusals(told)
    for i in range(50 * KINDS):
        refusals.heard(FrameRefused(f"fl/1/watch/d/d{i}/evt", f"d{i}", "junk"), now=0.0)
    assert len(told) <= KINDS + 1
