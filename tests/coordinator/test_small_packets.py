"""A broker that takes small messages only: all is cut to them, or the coordinator says at once that it cannot be."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
from memory_broker import Hub, Loop
from servers import serving_small_packets

from talaria.errors import ConfigError
from talaria.federated.run import Run
from talaria.model.spec import ModelSpec
from talaria.protocol.transfer import transfer_of
from talaria.types import Recipe, Samples
from talaria.wire.chunks import CHUNK, LEAST, ROOM, chunk_within, describe, most_within
from talaria.wire.frames import Header, decode_frame, encode_frame
from talaria.wire.messages import (
    MAX_CHUNKS,
    CoordinatorBirth,
    KitManifest,
    NoKit,
    Offer,
    WantKit,
    decode_message,
    encode_message,
)
from talaria.wire.signing import Signer
from talaria.wire.topics import Topic, coordinator_filters
from talaria_coordinator.config.fleet import FleetConfig
from talaria_coordinator.fleet.service import Service
from talaria_coordinator.storage.blobs import FolderBlobs
from talaria_coordinator.storage.store import Store
from talaria_edge.agent.agent import Agent
from talaria_edge.config import DeviceConfig
from talaria_edge.data import DeviceData, Given


@pytest.fixture
def broker(tmp_path):
    """``broker(bytes)``: the URL of a Mosquitto that takes packets of so many bytes."""
    with ExitStack() as stack:
        yield lambda size: stack.enter_context(serving_small_packets(tmp_path, size))


def data_of(seed):
    y = torch.arange(18) % 3
    x = torch.randn(18, 6, 32, generator=torch.Generator().manual_seed(seed)) + y[:, None, None]
    return DeviceData(Samples.of(x[:12], y[:12]), Samples.of(x[12:], y[12:]))


@pytest.fixture
def fleet(tmp_path):
    """``fleet(url)`` learns two rounds of two devices over that broker; all that was told."""
    told = []
    run = Run(spec=ModelSpec("imu_cnn", (6, 32), 3, seed=1), algorithm="fedavg", rounds=2, recipe=Recipe(batch=8))
    config = FleetConfig(name="watch", run=run, state=tmp_path, members=("anna", "bela"), retry_s=0.2, stay=False)
    with Store(tmp_path / "db") as store, ThreadPoolExecutor(1) as worker:
        service = Service(config, store, FolderBlobs(tmp_path / "blobs"), report=told.append)

        async def device(url, seed, name):
            folder, source = tmp_path / name, Given(lambda: data_of(seed))
            own = DeviceConfig(device=name, fleet="watch", broker=url, state=folder, retry_s=0.2, source=source)
            return await Agent(own, worker=worker, report=told.append).run()

        async def learn(url):
            async with asyncio.timeout(60), asyncio.TaskGroup() as group:
                group.create_task(service.run(url))
                for seed, name in enumerate(("anna", "bela")):
                    group.create_task(device(url, seed, name))

        yield lambda url: asyncio.run(learn(url)) or told


def test_everything_is_cut_to_what_the_broker_takes(broker, fleet):
    told = fleet(broker(16_384))
    events = [item["event"] for item in told]
    assert events.count("round-closed") == 2
    assert "quarantined" not in events
    assert "disconnected" not in events  # no packet was too large


def test_a_broker_that_takes_too_little_is_named_at_the_start(broker, fleet):
    with pytest.raises(ExceptionGroup) as caught:
        fleet(broker(4096))
    (error,) = caught.value.exceptions
    assert isinstance(error, ConfigError)
    for part in ("takes at most 4096 bytes", "max_packet_size", "the model has 458756"):
        assert part in str(error)


def test_the_bound_that_a_broker_tells_holds_for_kits_too_and_only_until_it_tells_another(tmp_path):
    """A kit was announced in a message that was too large itself, for which Mosquitto ends the link each time; and
    who raised the bound had to start the coordinator again, too, for larger updates to be taken."""
    hub, links, said = Hub(largest=8192), [], []
    run = Run(spec=ModelSpec("imu_cnn", (6, 32), 3, seed=1), algorithm="fedavg", rounds=2)
    config = FleetConfig(name="watch", run=run, state=tmp_path, devices=1, retry_s=0.2)

    def open_transport(url, config, will):
        links.append(Loop(hub, "co", coordinator_filters("watch"), will))
        return links[-1]

    def heard(arrival):
        message = decode_message(decode_frame(arrival.payload)) if arrival.payload else None
        match message:
            case CoordinatorBirth(online=True):
                said.append((message.chunk, message.max_update))
            case KitManifest():
                said.append(message.size)
            case NoKit():
                said.append(message.reason)

    async def told(wanted, seq):
        while wanted not in said:
            ask = Header("wantkit", "watch", "anna", boot=1, seq=(seq := seq + 1))
            hub.publish("fl/1/watch/d/anna/evt", encode_frame(ask, encode_message(WantKit(sha256=b"", bitmap=b""))))
            hub.pump()
            await asyncio.sleep(0.05)

    async def live(service):
        task = asyncio.create_task(service.run("mqtt://hub"))
        async with asyncio.timeout(30):
            reason = "the run's kit has 2000000 bytes, and what the broker takes as one message lets 1492992 be sent"
            await told(f"{reason}; raise its bound (Mosquitto: max_packet_size)", 0)
            assert said[0] == (6912, 1492992)
            hub.largest = None
            links[-1].cut()
            await told(2_000_000, 1000)
        assert (CHUNK, config.max_update) in said
        service.stop()
        await task

    hub.join("anna", ("fl/1/watch/co/state", "fl/1/watch/d/anna/cmd"), heard, None)
    with Store(tmp_path / "db") as store:
        service = Service(
            config, store, FolderBlobs(tmp_path / "blobs"), open_transport=open_transport, kit=lambda: bytes(2_000_000)
        )
        asyncio.run(live(service))


def test_chunks_leave_room_for_all_that_is_beside_them():
    assert chunk_within(None) == chunk_within(2**20) == CHUNK
    assert chunk_within(65_536) == 65_536 - ROOM
    assert most_within(None) == most_within(2**20) == CHUNK * MAX_CHUNKS
    with pytest.raises(ConfigError, match=f"at most 100 bytes as one message, and {LEAST}"):
        chunk_within(100)
    for largest in (LEAST, 9999, 65_536, 131_072):
        size, chunk = most_within(largest), chunk_within(largest)
        name = "d" * 36
        cut = describe(bytes(size), chunk)
        topic = str(Topic("f" * 36, "up", name, transfer_of(cut.sha256)))
        facts = {"size": size, "chunk": chunk, "sha256": cut.sha256, "hashes": cut.hashes, "nonce": bytes(16)}
        offer = Offer(attempt=2**53, base_version=2**53, base_digest=bytes(32), **facts)
        top = Header("offer", "f" * 36, name, 2**53, 2**53, 2**53, "x" * 16, 2**53, 2**53)
        for payload in (encode_message(offer), bytes(chunk)):
            assert len(topic) + len(encode_frame(top, payload, Signer.generate())) + 16 <= largest
