"""Faults are drawn from a seed: the same ones again, of every kind, spread over the rounds."""

import pytest

from talaria.errors import ConfigError
from talaria_bench.fleet.faults import COORDINATOR, DECK, KINDS, draw, tally

DEVICES = ("edge-00", "edge-01")


def test_a_seed_draws_the_same_faults_and_another_other_ones():
    assert draw(1, 200, DEVICES, 100) == draw(1, 200, DEVICES, 100)
    assert draw(1, 200, DEVICES, 100) != draw(2, 200, DEVICES, 100)


@pytest.mark.parametrize("seed", range(5))
def test_one_deck_holds_every_kind(seed):
    counts = tally(draw(seed, len(DECK), DEVICES, 10))
    assert set(counts) == set(KINDS)
    assert min(counts.values()) >= 1
    assert sum(counts.values()) == len(DECK)


def test_all_have_happened_before_the_last_rounds():
    found = draw(3, 200, DEVICES, 100)
    steps = [fault.round for fault in found]
    assert steps == sorted(steps)
    assert (steps[0], steps[-1]) == (1, 89)
    assert [fault.number for fault in found] == list(range(200))


def test_targets_are_those_that_the_kind_can_hit():
    for fault in draw(4, 300, DEVICES, 100):
        match fault.kind:
            case "kill-coordinator":
                assert fault.target == COORDINATOR
            case "kill-edge":
                assert fault.target in DEVICES
            case "disk-full" | "clock-jump":
                assert fault.target in (COORDINATOR, *DEVICES)
            case _:
                assert fault.target in ("all", COORDINATOR, *DEVICES)
        assert 0 <= fault.after <= 1
        assert 0 <= fault.seconds <= 2


@pytest.mark.parametrize("wrong", [{"count": 0}, {"devices": ()}, {"rounds": 1}])
def test_nothing_to_draw_from_is_refused(wrong):
    given = {"seed": 1, "count": 5, "devices": DEVICES, "rounds": 10} | wrong
    with pytest.raises(ConfigError, match="need 1, 1 and 2"):
        draw(**given)
