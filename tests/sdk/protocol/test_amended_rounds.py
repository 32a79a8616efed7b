"""A round that is open while its operator changes bounds, quorum, deadline or members."""

from __future__ import annotations

from random import Random

import pytest
from memory_broker import Faults

from talaria.protocol import actions as a
from talaria.protocol import events as e

QUIET = Faults()


def restarted(w, **rules):
    """The coordinator was killed, and serves with other bounds since."""
    w.crash_coordinator()
    w.start_coordinator(**rules)


@pytest.mark.parametrize("relayed", [False, True])
@pytest.mark.parametrize("seed", range(1, 5))
def test_updates_that_are_too_large_since_a_restart_shut_nobody_out(world, seed, relayed):
    """Half of the devices have updates of 4500 bytes and half of 900, of which 2000 may be there at last: wherever a
    restart finds the large ones, the small ones count, and the round does not wait for the others."""
    w = world(4, Faults(seed=seed, drop=0.3, reorder=0.3), signed=True, relayed=relayed, max_open=2)
    sizes = dict(zip(w.names, (4500, 900, 4500, 900), strict=True))
    made, chance = w.update_of, Random(seed)
    w.update_of = lambda name, attempt: made(name, attempt)[: sizes[name]]
    w.begin()
    for number in (1, 2):
        w.publish_body(number)
        w.open(number, quorum=2)
        w.run(chance.uniform(0.0, 2.0))
        restarted(w, max_update=2000)
        before = len(w.events)
        for _ in range(200):
            if any(c.attempt == number for c in w.closed):
                break
            w.run(5)
        small = {name for name, size in sizes.items() if size == 900}
        stored = {c.device for c in w.closed[-1].counted}
        assert small <= stored, "what fits counts"
        assert number == 1 or stored == small
        assert not [x for x in w.events[before:] if isinstance(x, a.Complete) and x.cut.size > 2000]
    assert w.state.quarantined() == {}
    assert not [x for x in w.events if isinstance(x, a.Quarantined | a.Equivocation)]


def test_an_update_that_came_in_part_and_is_too_large_by_now_is_rejected_with_both_numbers(world):
    w = world(1, QUIET, max_open=1)
    w.begin()
    w.open(1)
    for _ in range(400):
        w.hub.pump(1)
        if any(0 < len(u.receiver.have) < u.receiver.cut.count for u in w.state.uploads.values()):
            break
    assert w.state.uploads
    restarted(w, max_update=2000)
    w.run(5)
    assert w.state.attempts[1].cohort["dev-0"].reason == "4500 bytes; at most 2000 ([rounds] max_update)"
    assert w.state.attempts[1].phase == "failed"
    assert w.state.quarantined() == {}
    assert w.state.peers["dev-0"].strikes == 0


@pytest.mark.parametrize(
    "change",
    [{"quorum": 2, "seconds": 20.0}, {"gone": frozenset({"dev-2"}), "reason": "sold", "quorum": 2, "target": 2}],
)
def test_what_an_operator_changes_ends_a_round_that_nothing_else_would(world, change):
    """Without a deadline, and with a quorum of all, a device that trains for ever keeps a round open for ever."""
    w = world(3, QUIET)
    w.work, work = lambda name, *more: None if name == "dev-2" else work(name, *more), w.work
    w.begin()
    w.open(1)
    w.run(200)
    assert not w.closed
    assert [part.phase for part in w.state.attempts[1].cohort.values()] == ["stored", "stored", "working"]
    w.crash_coordinator()
    w.start_coordinator()
    w.tell(e.Amend(w.now, **change))
    w.run(30)
    (closed,) = w.closed
    assert [c.device for c in closed.counted] == ["dev-0", "dev-1"]
    assert closed.missing == ("dev-2",)
    assert w.devices["dev-2"][1].job.outcome == "late"
    assert w.state.quarantined() == {}


def test_a_deadline_is_brought_forward_and_never_put_off(world):
    w = world(2, QUIET)
    w.work = lambda *_: None
    w.begin()
    w.open(1, seconds=100, quorum=1)
    until = w.state.attempts[1].deadline
    w.tell(e.Amend(w.now, seconds=500.0))
    assert w.state.attempts[1].deadline == until
    w.tell(e.Amend(w.now, seconds=10.0))
    assert w.state.attempts[1].deadline == w.now + 10
    w.tell(e.Amend(w.now))
    assert w.state.attempts[1].deadline == w.now + 10


def test_an_update_that_is_here_counts_though_its_device_has_gone(world):
    w = world(2, QUIET)
    w.work, work = lambda name, *more: None if name == "dev-1" else work(name, *more), w.work
    w.begin()
    w.open(1)
    w.run(5)
    w.tell(e.Amend(w.now, gone=frozenset({"dev-0"}), reason="sold"))
    assert w.state.attempts[1].cohort["dev-0"].phase == "stored"
    w.work = work
    w.crash_device("dev-1")
    w.start_device("dev-1")
    w.run(5)
    assert [c.device for c in w.closed[0].counted] == ["dev-0", "dev-1"]
