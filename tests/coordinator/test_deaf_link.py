"""A link on which nothing comes through any more is given up, one that is merely quiet is not."""

import asyncio

from memory_broker import Hub, Loop
from servers import serving_mosquitto

from talaria.federated.run import Run
from talaria.model.spec import ModelSpec
from talaria.wire.transport import LinkDown, LinkUp
from talaria_coordinator.config.fleet import FleetConfig
from talaria_coordinator.fleet.deaf_link import Hearing
from talaria_coordinator.fleet.service import Service
from talaria_coordinator.storage.blobs import FolderBlobs
from talaria_coordinator.storage.store import Store


def test_a_quiet_link_is_asked_and_kept():
    hearing = Hearing(quiet=5.0)
    hearing.heard(0.0)
    assert [hearing.next(t) for t in (1.0, 4.9, 5.0, 5.1)] == ["wait", "wait", "ask", "wait"]
    hearing.heard(5.2)  # its own word came back
    assert [hearing.next(t) for t in (9.0, 10.3)] == ["wait", "ask"]


def test_a_deaf_link_is_renewed():
    hearing = Hearing(quiet=5.0)
    hearing.heard(0.0)
    assert [hearing.next(t) for t in (5.0, 9.9, 10.0)] == ["ask", "wait", "renew"]
    hearing.heard(10.0)
    assert hearing.next(11.0) == "wait"


def test_a_renewed_link_hears_again_what_is_retained():
    async def story():
        hub = Hub(eager=True)
        link = Loop(hub, "co", ("d/+/state",))
        await link.start()
        hub.publish("d/anna/state", b"birth", retain=True)
        link.renew("deaf")
        await link.recall()
        return [await link.receive() for _ in range(6)]

    up, live, down, again, *retained = asyncio.run(story())
    assert (type(up), type(down), type(again)) == (LinkUp, LinkDown, LinkUp)
    assert (live.retained, [x.payload for x in retained]) == (False, [b"birth"] * 2)
    assert all(x.retained for x in retained)


def test_a_broker_that_lets_the_coordinator_read_nothing_is_told_with_the_topics_that_it_needs(tmp_path, monkeypatch):
    monkeypatch.setattr("talaria_coordinator.fleet.service.QUIET_S", 0.2)
    told, rights = [], tmp_path / "acl"
    rights.write_text("topic write #\n")
    run = Run(spec=ModelSpec("mlp", (6,), 3), algorithm="fedavg", rounds=1)
    config = FleetConfig(name="watch", run=run, state=tmp_path, members=("anna",), retry_s=0.2)

    async def story(url, store):
        service = Service(config, store, FolderBlobs(tmp_path / "blobs"), report=told.append)
        serving = asyncio.create_task(service.run(url))
        while not (deaf := [event["error"] for event in told if event["event"] == "disconnected"]):
            await asyncio.sleep(0.02)
        service.stop()
        await serving
        return deaf[0]

    with serving_mosquitto(tmp_path, f"acl_file {rights}") as url, Store(tmp_path / "db") as store:
        error = asyncio.run(asyncio.wait_for(story(url, store), 60))
    assert "let its access list (ACL) give fl/1/watch/# to be read" in error
