"""What a coordinator does with a full disk, and with devices that follow another."""

import asyncio
import time

from memory_broker import Loop

from talaria.errors import StateError
from talaria.time import Clocks, told_by
from talaria.wire.topics import coordinator_filters
from talaria.wire.validity import day_of
from talaria_coordinator.config.fleet import FleetConfig
from talaria_coordinator.fleet.scheduler import Conductor
from talaria_coordinator.fleet.service import Service
from talaria_coordinator.storage.blobs import FolderBlobs
from talaria_coordinator.storage.store import Store
from talaria_edge.agent import agent


def test_it_ends_though_a_round_cannot_be_committed_which_the_next_start_does(house, run_all, a_run, monkeypatch):
    """It went on trying, and took no notice of SIGTERM, so that nobody could free room with `gc --hours 0`."""
    one = house(a_run("fedper"), quorum=1.0)

    def full(*given):
        raise StateError("blobs: No space left on device")

    async def told(event):
        while not one.of(event):
            await asyncio.sleep(0.02)

    async def stopped():
        config = FleetConfig(name="watch", run=one.run, state=one.folder, members=tuple(one.data), retry_s=0.1)

        def over_hub(url, config, will):
            return Loop(one.hub, "co", coordinator_filters("watch"), will)

        service = Service(config, one.store, one.blobs, report=one.told.append, open_transport=over_hub)
        serving = asyncio.create_task(service.run("loop"))
        await told("error")
        service.stop()
        await serving

    async def lived():
        agents = [asyncio.create_task(one.agent(name)) for name in one.data]
        with monkeypatch.context() as patched:
            patched.setattr(Conductor, "_commit", full)
            await stopped()
        assert one.store.fleets.get("watch").round == 0
        await asyncio.gather(one.serve(), *agents)

    run_all(lived(), seconds=60)
    assert one.store.attempts.of("watch")[0].counted == ((1, "anna"), (1, "bela"))


def test_a_coordinator_is_told_that_a_device_follows_one_that_began_later(house, run_all, a_run, tmp_path):
    """Whose clock was ahead, and whose record is lost: until then the operator saw nothing but silent devices."""
    ahead = house(a_run(rounds=1), names=("anna",))
    later = time.time() + 2e7

    async def before():
        with told_by(Clocks(wall=lambda: later)):
            serving = asyncio.create_task(ahead.serve())
        await asyncio.gather(serving, ahead.agent("anna"))

    run_all(before(), seconds=60)
    ahead.store.close()
    (tmp_path / "new").mkdir()
    with Store(tmp_path / "new" / "db") as ahead.store:
        ahead.blobs = FolderBlobs(tmp_path / "new" / "blobs")
        ahead.hub = type(ahead.hub)()

        async def after():
            both = [asyncio.create_task(ahead.serve()), asyncio.create_task(ahead.agent("anna"))]
            while not ahead.of("outrun"):
                await asyncio.sleep(0.02)
            for task in both:
                task.cancel()

        run_all(after(), seconds=60)
    (told,) = ahead.of("outrun", "anna")
    assert f"a coordinator that began at {day_of(later)[:10]}" in told["reason"]
    assert "start this one once with its clock set ahead of that" in told["reason"]


def test_a_device_that_hears_no_coordinator_says_so(house, run_all, a_run, monkeypatch):
    """A wrong name of the fleet, or a broker that forbids it to read: the journal ended with `connected`."""
    monkeypatch.setattr(agent, "UNHEARD_S", 0.2)
    one = house(a_run(rounds=1), names=("anna",))

    async def lived():
        alone = asyncio.create_task(one.agent("anna"))
        while not one.of("error"):
            await asyncio.sleep(0.02)
        serving = asyncio.create_task(one.serve())
        await alone
        await serving

    run_all(lived(), seconds=60)
    (told,) = one.of("error")
    assert told["device"] == "anna"
    assert "nobody of fleet 'watch' was heard in 0.2 s; it has never run at this broker" in told["error"]
    assert "does not let this device read fl/1/watch/co/#" in told["error"]
