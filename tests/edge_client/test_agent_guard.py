"""An agent trains only when it may: it waits within the round, then declines; and says both."""

import asyncio
import threading
import time
from itertools import count

import pytest

from talaria import tensors
from talaria_coordinator.config.fleet import FleetConfig
from talaria_coordinator.fleet.life import carry_out
from talaria_coordinator.fleet.operator_commands import Order
from talaria_edge.training_policy import Reading, Rules

NOON = 12 * 60


class Battery:
    """A machine whose battery is low for the first ``low`` readings."""

    def __init__(self, low):
        self.low, self.read = low, 0

    def __call__(self):
        self.read += 1
        return Reading(minute=NOON, battery=0.1 if self.read <= self.low else 0.9, charging=False)


def test_it_waits_until_it_may_train_and_learns_the_same(house, run_all):
    one = house()
    battery = Battery(low=4)
    run_all(one.serve(), one.agent("anna", battery, guard=Rules(), guard_every_s=0.05), one.agent("bela"))
    (waiting,) = one.of("waiting")
    assert waiting["device"] == "anna"
    assert waiting["attempt"] == 1
    assert "battery at 10%, 30% is asked for" in waiting["reason"]
    events = [t["event"] for t in one.told if t.get("device") == "anna"]
    assert events.index("waiting") < events.index("allowed") < events.index("training")
    assert battery.read > 4
    assert one.store.attempts.of("watch")[0].counted == ((1, "anna"), (1, "bela"))
    assert tensors.equal(one.shared(), one.simulated().shared)


def test_where_leave_does_not_come_it_declines_before_the_deadline(house, run_all):
    one = house(quorum=0.5, deadline_s=8.0)
    battery = Battery(low=10**9)

    async def until_the_round_is_over():
        while not one.of("round-closed"):
            await asyncio.sleep(0.02)
        battery.low = 0

    served, anna, _, _ = run_all(
        one.serve(),
        one.agent("anna", battery, guard=Rules(), guard_every_s=0.05),
        one.agent("bela"),
        until_the_round_is_over(),
    )
    assert served is None
    (declined,) = one.of("declined", "anna")
    assert "battery" in declined["reason"]
    assert any(t["phase"] == "declined" and "battery" in t["reason"] for t in one.of("progress", "anna"))
    assert one.store.attempts.of("watch")[0].counted == ((1, "bela"),)
    assert anna["rounds"] == 0
    assert (one.folder / "anna" / "personal.safetensors").exists()


def test_personalizing_waits_as_well(house, run_all):
    one = house(names=("anna",))
    readings = iter([0.9] + 3 * [0.1])

    def read():
        return Reading(minute=NOON, battery=next(readings, 0.9), charging=False)

    run_all(one.serve(), one.agent("anna", read, guard=Rules(), guard_every_s=0.05))
    events = [t["event"] for t in one.told if t.get("device") == "anna"]
    assert events.index("received") < events.index("waiting") < events.index("personalizing")


def test_without_rules_the_machine_is_not_even_asked(house, run_all):
    one = house(names=("anna",))

    def read():
        raise AssertionError("nobody asked for a guard")

    run_all(one.serve(), one.agent("anna", read))
    assert not one.of("waiting")


@pytest.mark.parametrize("seconds", [0.0, 0.2])
def test_waiting_ends_when_its_time_is_over(run_all, seconds):
    from talaria_edge.agent.training_window import TrainingWindow

    told = []
    end = time.monotonic() + seconds
    leave = TrainingWindow(Rules(only_charging=True), 0.05, lambda: Reading(minute=0, battery=1.0, charging=False))

    def tell(event, **facts):
        told.append((event, facts))

    (decision,) = run_all(leave.wait(tell, lambda: end - time.monotonic()))
    assert not decision
    assert decision.reason == "not charging"
    assert told == ([("waiting", {"reason": "not charging"})] if seconds else [])


@pytest.mark.parametrize("order", [Order("next", rounds=3), Order("extend", rounds=3)], ids=["next", "extend"])
def test_what_begins_while_personalizing_waits_is_learned_and_keeps_what_it_learns(house, a_run, order):
    """Personalizing for the run before then took the private state of the new one for that of a run called off."""
    one = house(a_run("fedper", rounds=1), names=("anna",), stay=True)
    readings, charged = count(1), threading.Event()

    def read():
        low = next(readings) > 1 and not charged.is_set()  # the first round is allowed
        return Reading(minute=NOON, battery=0.1 if low else 0.9, charging=False)

    async def until(event, count):
        async with asyncio.timeout(120):
            while len(one.of(event, "anna")) < count:
                await asyncio.sleep(0.01)

    async def story():
        agent = asyncio.create_task(one.agent("anna", read, guard=Rules(), guard_every_s=0.05))
        serving = asyncio.create_task(one.serve())
        await until("waiting", 1)
        serving.cancel()
        await asyncio.wait([serving])
        config = FleetConfig(name="watch", run=one.run, state=one.folder, members=("anna",))
        carry_out(order, one.store.fleets.get("watch"), config, one.store, one.blobs)
        serving = asyncio.create_task(one.serve())
        await until("waiting", 2)
        charged.set()
        found = await asyncio.wait_for(agent, 120)
        serving.cancel()
        await asyncio.wait([serving])
        return found

    assert asyncio.run(story())["rounds"] == 4
    assert not one.of("error", "anna")
    assert not (one.folder / "anna" / "called-off-private.safetensors").exists()
