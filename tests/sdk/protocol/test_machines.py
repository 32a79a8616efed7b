"""Both halves of the protocol as one state machine: hypothesis chooses what breaks, and when.

Seconds by default; for minutes: ``pytest tests/sdk/protocol/test_machines.py --hypothesis-profile=minutes``.
"""

from __future__ import annotations

import hashlib

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from memory_broker import Faults

from talaria.protocol import actions as a
from talaria.protocol import events as e
from talaria.protocol.coordinator.machine import CoordinatorState
from talaria.protocol.coordinator.state import LIVE
from talaria.protocol.device.machine import DeviceState
from talaria.protocol.state_codec import Saver
from talaria.wire.chunks import describe

NAMES = st.integers(0, 2)
BOUNDS = {"serve": 1000, "flaps": 1000, "keep": 1000}
"""Out of the way: what is looked for here is not a device that asks too often."""


class Fleet(RuleBasedStateMachine):
    """A coordinator and three devices over a link that loses, doubles and reorders; each may be killed at any point,
    between two saves too, and comes back from what it saved."""

    world: type
    """The drivers of ``conftest.py``; hypothesis, which makes these machines, knows no fixtures."""

    def __init__(self):
        super().__init__()
        self.rounds, self.twice = 0, set()

    @initialize(
        seed=st.integers(0, 2**16), drop=st.sampled_from([0.0, 0.1, 0.3]), double=st.sampled_from([0.0, 0.3]),
        mix=st.sampled_from([0.0, 0.4]), signed=st.booleans(), places=st.sampled_from([1, 64]),
        stale=st.sampled_from([0, 0, 2]), relayed=st.booleans(), most=st.sampled_from([1, 3000, 2**24]),
    )  # fmt: skip
    def begin(self, seed, drop, double, mix, signed, places, stale, relayed, most):
        self.saver = Saver()
        self.w = self.world(
            3,
            Faults(seed, drop, double, mix),
            signed=signed,
            relayed=relayed,
            max_open=places,
            max_asked=most,
            **BOUNDS,
        )
        self.stale, self.slow = stale, []
        self.held: set[str] = set()
        real = self.w.work

        def work(name, number, version):
            if name in self.held:
                self.slow.append((name, number, version))
            else:
                real(name, number, version)

        self.w.work = work
        self.w.begin()

    # -- what happens

    @rule(pause=st.sampled_from([0.5, 1.0, 3.0, 9.0]))
    def time_passes(self, pause):
        self.w.run(pause)

    @rule(messages=st.integers(1, 12))
    def some_messages_come(self, messages):
        self.w.hub.pump(messages)

    @rule(seconds=st.sampled_from([None, 4.0, 15.0]), quorum=st.integers(1, 3))
    def a_round_opens(self, seconds, quorum):
        state = self.w.state
        if state.current is not None and state.attempts[state.current].phase in ("open", "closed"):
            return
        self.rounds += 1
        self.w.publish_body(self.rounds, multicast=self.rounds % 2 == 0)
        # A buffer closes when it is full, or is carried over when its time is up; without either it stays open.
        limit = 15.0 if self.stale and seconds is None else seconds
        self.w.open(self.rounds, seconds=limit, quorum=quorum, stale=self.stale)

    @rule()
    def the_coordinator_is_killed(self):
        self.w.crash_coordinator()
        self.w.start_coordinator()

    @rule()
    def the_coordinator_loses_its_last_save(self):
        """Saves that may wait (``soon``) can be lost with the process; what the store has is not."""
        self.w.crash_coordinator()
        self.w.disk.state = self.w.disk.firm
        self.w.start_coordinator()

    @precondition(lambda self: self.w.relayed)
    @rule()
    def the_ingest_worker_is_killed(self):
        self.w.crash_worker()
        self.w.start_worker()

    @rule(who=NAMES)
    def a_device_is_killed(self, who):
        self.w.crash_device(self.w.names[who])
        self.w.start_device(self.w.names[who])

    @rule(who=NAMES)
    def a_device_goes_and_stays_away(self, who):
        self.w.crash_device(self.w.names[who])

    @rule(who=NAMES)
    def a_link_is_cut(self, who):
        name = self.w.names[who]
        if name in self.w.devices:
            self.w.hub.cut(name)
            self.w.link_device(name)
        else:
            self.w.start_device(name)

    @rule(who=NAMES)
    def a_device_becomes_slow(self, who):
        self.held.add(self.w.names[who])

    @precondition(lambda self: self.slow)
    @rule()
    def a_slow_update_is_ready_at_last(self):
        name, number, version = self.slow.pop(0)
        self.held.discard(name)
        if name in self.w.devices:
            self.w.work(name, number, version)

    @rule(who=NAMES)
    def a_device_says_two_different_things(self, who):
        """After its offer it offers other bytes for the same round: equivocation."""
        name = self.w.names[who]
        if name not in self.w.devices:
            return
        _, state = self.w.devices[name]
        job = state.job
        if job is None or job.cut is None or job.phase != "offering":
            return
        other = b"other " + self.w.disks[name].updates[job.attempt, name]
        self.w.disks[name].updates[job.attempt, name] = other
        job.cut, job.said = describe(other, self.w.rules.chunk), -1e18
        self.w.disks[name].state = state.dump()
        self.twice.add((name, job.attempt))

    @rule(who=NAMES)
    def the_operator_lets_it_in_again(self, who):
        self.w.tell(e.Release(self.w.now, self.w.names[who]))

    # -- what always holds

    @invariant()
    def nothing_counts_twice(self):
        if not hasattr(self, "w"):
            return
        closed = {}
        for action in self.w.closed:
            entries = tuple((c.device, c.attempt, c.base_version, c.sha256) for c in action.counted)
            assert closed.setdefault(action.attempt, entries) == entries, "one round closed in two ways"
        counted = [entry[:2] for entries in closed.values() for entry in entries]
        assert len(counted) == len(set(counted)), counted

    @invariant()
    def what_counts_is_what_the_store_has(self):
        if not hasattr(self, "w"):
            return
        for action in self.w.closed:
            for entry in action.counted:
                assert hashlib.sha256(self.w.disk.updates[entry.attempt, entry.device]).digest() == entry.sha256

    @invariant()
    def what_was_receipted_is_counted_or_its_round_failed(self):
        if not hasattr(self, "w"):
            return
        known = {entry[:2] for attempt in self.w.state.attempts.values() for entry in attempt.counted}
        for (name, number), outcomes in self.w.receipts.items():
            assert "stored" not in outcomes or (name, number) in known, (name, number, outcomes)

    @invariant()
    def states_survive_being_saved(self):
        if not hasattr(self, "w"):
            return
        state = self.w.state
        data = self.saver.dump(state)
        assert CoordinatorState.load(data) == state
        assert data == state.dump()
        for _, own in self.w.devices.values():
            assert DeviceState.load(own.dump()) == own

    @invariant()
    def bounds_are_kept(self):
        if not hasattr(self, "w"):
            return
        state = self.w.state
        assert len(state.uploads) <= self.w.rules.max_open
        assert len(state.waiting) <= 4 * self.w.rules.max_open
        assert set(state.offers) == set(state.waiting)
        asked = sum(len(upload.receiver.asked) for upload in state.uploads.values())
        assert asked * self.w.rules.chunk <= max(self.w.rules.max_asked, self.w.rules.chunk)
        for device, xfer in state.uploads:
            upload = state.uploads[device, xfer]
            assert state.attempts[upload.attempt].cohort[device].phase in ("receiving", "storing")

    @invariant()
    def only_who_said_two_things_is_shut_out(self):
        if not hasattr(self, "w"):
            return
        accused = {(x.device, x.attempt) for x in self.w.events if isinstance(x, a.Equivocation)}
        assert accused <= self.twice
        assert set(self.w.state.quarantined()) <= {name for name, _ in self.twice}

    def teardown(self):
        """Left alone on a link that loses nothing, the open round ends."""
        if not hasattr(self, "w"):
            return
        w = self.w
        w.hub.faults = Faults()
        self.held.clear()
        for name in w.names:
            if name not in w.devices:
                w.start_device(name)
        for name, number, version in self.slow:
            w.work(name, number, version)
        self.slow.clear()
        for _ in range(60):
            if w.state.current is None or w.state.attempts[w.state.current].phase not in ("open", "closed"):
                break
            w.run(5)
        else:
            attempt = w.state.attempts[w.state.current]
            live = {device: m.phase for device, m in attempt.cohort.items() if m.phase in LIVE}
            raise AssertionError(f"attempt {attempt.number} does not end; it waits for {live}")
        self.nothing_counts_twice()
        self.what_was_receipted_is_counted_or_its_round_failed()


def test_whatever_breaks_each_update_counts_once_or_is_told_otherwise(world):
    class Here(Fleet):
        pass

    Here.world = world
    chosen = settings(max_examples=settings.default.max_examples // 4, stateful_step_count=40, deadline=None)
    run_state_machine_as_test(Here, settings=chosen)
