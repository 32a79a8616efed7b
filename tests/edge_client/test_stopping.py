"""A coordinator that is told to stop while its disk is full."""

import asyncio

from memory_broker import Loop

from talaria.errors import StateError
from talaria.wire.topics import coordinator_filters
from talaria_coordinator.config.fleet import FleetConfig
from talaria_coordinator.fleet.scheduler import Conductor
from talaria_coordinator.fleet.service import Service


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
        assert one.store.fleet("watch").round == 0
        await asyncio.gather(one.serve(), *agents)

    run_all(lived(), seconds=60)
    assert one.store.attempts("watch")[0].counted == ((1, "anna"), (1, "bela"))
