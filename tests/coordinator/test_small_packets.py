"""A broker that takes small messages only: all is cut to them, or the coordinator says at once that it cannot be."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
from servers import serving_small_packets

from talaria.errors import ConfigError
from talaria.federated.run import Run
from talaria.model.spec import ModelSpec
from talaria.protocol.transfer import transfer_of
from talaria.types import Recipe, Samples
from talaria.wire.chunks import CHUNK, LEAST, ROOM, chunk_within, describe, most_within
from talaria.wire.frames import Header, encode_frame
from talaria.wire.messages import MAX_CHUNKS, Offer, encode_message
from talaria.wire.signing import Signer
from talaria.wire.topics import Topic
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
