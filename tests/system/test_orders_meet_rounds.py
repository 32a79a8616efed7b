"""Orders that come while a round is folded, or while the next run is worked out."""

import asyncio
import threading

import pytest
from tests.system.test_in_process import House, run_all

from talaria.errors import StateError
from talaria.federated.run import Run
from talaria_coordinator.config.fleet import FleetConfig
from talaria_coordinator.fleet.aggregation import Learning
from talaria_coordinator.fleet.life import carry_out
from talaria_coordinator.fleet.operator_commands import Order
from talaria_coordinator.storage.attempts import Attempts
from talaria_coordinator.storage.devices import Devices
from talaria_coordinator.storage.runs import Runs
from talaria_edge.agent.rounds import Rounds


@pytest.fixture
def house(tmp_path, one_thread):
    """Makes a fleet in memory."""
    made = []

    def make(run):
        made.append(House(tmp_path, run, stay=True))
        return made[-1]

    yield make
    for one in made:
        one.close()


class Held:
    """A method that begins, and goes on once it is let go."""

    def __init__(self, monkeypatch, owner, name):
        self.begun, self.go, real = threading.Event(), threading.Event(), getattr(owner, name)

        def held(*args, **more):
            self.begun.set()
            assert self.go.wait(60)
            return real(*args, **more)

        monkeypatch.setattr(owner, name, held)


async def give(one, verb, **more):
    """The fleet's status after this order."""
    made = Order(verb, **more)
    await one.services[-1].order(made)
    return await asyncio.wrap_future(made.answer)


async def serve(one):
    """Serve as the process does: the run may be another after an order."""
    await one.serve()
    while one.services[-1].again:
        one.run = Run.from_json(one.store.fleets.get("watch").run)
        await one.serve()


async def story(one, scenario):
    serving = asyncio.ensure_future(serve(one))
    agents = [asyncio.ensure_future(one.agent(name, stay=True)) for name in one.data]
    await scenario()
    one.services[-1].stop()
    await serving
    for task in agents:
        task.cancel()
    await asyncio.gather(*agents, return_exceptions=True)


async def paused(one):
    """How many rounds are learned, once no other opens."""
    await one.told_of("round-closed", round=1)
    assert await give(one, "pause") == "paused"
    while one.store.attempts.unclosed("watch"):
        await asyncio.sleep(0.02)
    return one.store.fleets.get("watch").round


def test_a_run_that_is_extended_while_its_last_round_is_folded_goes_on(house, a_run, monkeypatch):
    one, fold = house(a_run(rounds=1)), Held(monkeypatch, Learning, "fold")

    async def scenario():
        await asyncio.to_thread(fold.begun.wait, 60)
        assert await give(one, "extend", rounds=2) == "running"
        fold.go.set()
        await one.told_of("done", round=3)

    run_all(story(one, scenario))
    fleet = one.store.fleets.get("watch")
    assert (fleet.status, fleet.round) == ("done", 3)


@pytest.mark.parametrize("verb", ["pause", "abort"])
def test_who_gives_an_order_as_the_last_round_is_committed_is_told_that_it_is_done(house, a_run, monkeypatch, verb):
    one, commit, answers = house(a_run(rounds=1)), Attempts.commit, []
    inside = []

    def committed(*args, **more):
        """The answer is on its way to the coordinator, and the order comes before it."""
        commit(*args, **more)
        answers.append(asyncio.run_coroutine_threadsafe(give(one, verb), inside[0]).result(60))

    monkeypatch.setattr(Attempts, "commit", committed)

    async def scenario():
        inside.append(asyncio.get_running_loop())
        await one.told_of("done", fleet="watch")

    run_all(story(one, scenario))
    assert answers == ["done"]
    fleet = one.store.fleets.get("watch")
    assert (fleet.status, fleet.round) == ("done", 1)


def test_a_fleet_that_is_resumed_while_its_next_run_is_worked_out_learns_the_present_one_on(house, a_run, monkeypatch):
    one, after = house(a_run(rounds=9)), Held(monkeypatch, Learning, "after")

    async def scenario():
        await paused(one)
        following = asyncio.ensure_future(give(one, "next", rounds=2))
        await asyncio.to_thread(after.begun.wait, 60)
        assert await give(one, "resume") == "running"
        await one.told_of("round-opened", round=one.store.fleets.get("watch").round + 1)
        after.go.set()
        with pytest.raises(StateError, match="it has learned on meanwhile; try again"):
            await following
        await one.told_of("done", fleet="watch")

    run_all(story(one, scenario))
    fleet = one.store.fleets.get("watch")
    assert (Run.from_json(fleet.run), fleet.round) == (one.run, 9)
    assert [len(row.counted) for row in one.store.attempts.of("watch")] == [3] * 9


def test_no_round_of_the_old_run_opens_once_another_has_followed_it(house, a_run, monkeypatch):
    """An order that is carried out just then reads the record, which says that the fleet is to learn."""
    one, follow, inside = house(a_run(rounds=9)), Runs.follow, []

    def followed(*args, **more):
        follow(*args, **more)
        asyncio.run_coroutine_threadsafe(give(one, "retire", device="carl"), inside[0]).result(60)

    monkeypatch.setattr(Runs, "follow", followed)

    async def scenario():
        inside.append(asyncio.get_running_loop())
        learned = await paused(one)
        assert await give(one, "next", rounds=2, classes=4) == "running"
        await one.told_of("done", round=learned + 2)

    run_all(story(one, scenario))
    rows = one.store.attempts.of("watch")
    assert {row.failure for row in rows} == {None}
    assert [row.cohort for row in rows][-3:] == [("anna", "bela", "carl"), ("anna", "bela"), ("anna", "bela")]


@pytest.mark.parametrize(("killed", "resumed"), [(False, False), (True, False), (True, True)])
def test_a_round_that_is_called_off_while_no_coordinator_serves_never_counts(
    house, a_run, monkeypatch, killed, resumed
):
    """Or just before one was killed, that had kept the order in the record and not yet told its machine; also where the
    fleet was resumed before another one began."""
    one, learn, may = house(a_run(rounds=1)), Rounds.learn, asyncio.Event()

    async def waits(*args):
        await may.wait()
        await learn(*args)

    monkeypatch.setattr(Rounds, "learn", waits)

    async def scenario():
        agents = [asyncio.ensure_future(one.agent(name, stay=True)) for name in one.data]
        serving = asyncio.ensure_future(one.serve())
        await one.told_of("progress", phase="working", device="anna")
        one.services[-1].stop()
        await serving
        config = FleetConfig(name="watch", run=one.run, state=one.folder, members=tuple(one.data))
        carry_out(Order("abort"), one.store.fleets.get("watch"), config, one.store, one.blobs)
        if killed:
            one.store.attempts.fail("watch", 1, "called off by the operator")
        if resumed:
            carry_out(Order("resume"), one.store.fleets.get("watch"), config, one.store, one.blobs)
        serving = asyncio.ensure_future(one.serve())
        await one.told_of("round-failed", attempt=1, reason="called off by the operator")
        may.set()
        assert await give(one, "resume") == "running"
        await one.told_of("done", fleet="watch")
        one.services[-1].stop()
        await serving
        for task in agents:
            task.cancel()
        await asyncio.gather(*agents, return_exceptions=True)

    run_all(scenario())
    rows = [(row.failure, row.counted) for row in one.store.attempts.of("watch")]
    assert rows == [("called off by the operator", None), (None, ((2, "anna"), (2, "bela"), (2, "carl")))]


@pytest.mark.parametrize("verb", ["quarantine", "release"])
def test_who_is_shut_out_is_in_the_record_though_the_disk_refused_it_at_first(house, a_run, monkeypatch, verb):
    """The machine is kept before the record, or the record before the machine: a start lets them agree."""
    one, real, refuses = house(a_run(rounds=1)), Devices.quarantine, [verb == "quarantine"]

    def quarantine(*args):
        if refuses.pop() if refuses else False:
            raise StateError("the disk is full")
        real(*args)

    async def scenario():
        serving = asyncio.ensure_future(one.serve())
        agent = asyncio.ensure_future(one.agent("anna"))
        await one.told_of("device-up", device="anna")
        if verb == "release":
            await give(one, "quarantine", device="anna", reason="odd")
            real(one.store.devices, "watch", "anna", None)  # and then it was killed
        else:
            monkeypatch.setattr(Devices, "quarantine", quarantine)
            with pytest.raises(StateError, match="full"):
                await give(one, "quarantine", device="anna", reason="odd")
        one.services[-1].stop()
        await serving
        serving = asyncio.ensure_future(one.serve())
        await one.told_of("connected", fleet="watch")
        while len(one.of("started")) < 2:
            await asyncio.sleep(0.02)
        assert [d.quarantine for d in one.store.devices.of("watch")] == ["odd"]
        assert await give(one, "release", device="anna") == "running"
        assert [d.quarantine for d in one.store.devices.of("watch")] == [None]
        one.services[-1].stop()
        agent.cancel()
        await asyncio.gather(serving, agent, return_exceptions=True)

    run_all(scenario())
