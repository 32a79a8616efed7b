"""What comes down to a device: in order, and where its disk is full for a while."""

import asyncio
import resource
import threading

import pytest

from talaria.protocol import actions as a
from talaria.protocol import events as e
from talaria.protocol.device.state import DeviceState
from talaria.protocol.transfer import Receiver, transfer_of
from talaria.wire.chunks import describe
from talaria_edge.agent.incoming import Incoming
from talaria_edge.config import DeviceConfig
from talaria_edge.data import Given
from talaria_edge.storage.state import DeviceStore

MODEL = bytes(range(256)) * 64


def test_a_model_that_the_disk_refuses_is_asked_for_once_there_is_room_and_once_alone(tmp_path, device_data):
    """A coordinator sends a model so often and no more: a device asked for it again for each chunk that was refused,
    while the disk was full, and then stood there for a minute once that had room."""
    source = Given(lambda: device_data(0))
    config = DeviceConfig(
        device="anna", fleet="watch", broker="mqtt://127.0.0.1", state=tmp_path, source=source, retry_s=0.05
    )
    cut, told, put = describe(MODEL, 4096), [], asyncio.Queue()
    name = transfer_of(cut.sha256)
    state = DeviceState(fetch=Receiver(cut))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    async def story(incoming):
        came = [incoming.keep(a.KeepChunk("anna", name, cut, i, MODEL[4096 * i :][:4096])) for i in range(cut.count)]
        came.append(incoming.assemble(a.ModelComplete(1, name, cut, b"")))
        refused = [asyncio.ensure_future(work) for work in came if work is not None]
        for _ in range(3):
            await asyncio.sleep(config.retry_s)
        while_full = put.qsize()
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        await asyncio.wait_for(asyncio.gather(*refused), 30)
        return while_full

    with DeviceStore(tmp_path, "watch", "anna") as store:
        incoming = Incoming(config, store, state, put.put, lambda event, **facts: told.append(facts["error"]))
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
            while_full = asyncio.run(story(incoming))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            incoming.close()
    assert while_full == 0
    assert [type(put.get_nowait()) for _ in range(put.qsize())] == [e.ModelDamaged]
    assert all("free space" in error for error in told), told


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_last_model_that_came_is_the_one_on_flash(tmp_path, count):
    """As in an asynchronous fleet, where the next one may be whole while one is still written: an older one could stand
    in its place, which the device took for the newer."""
    config = DeviceConfig(
        device="anna", fleet="watch", broker="mqtt://127.0.0.1", state=tmp_path, source=Given(lambda: None)
    )
    put, others = [], threading.Event()

    async def took(event):
        put.append(event)

    async def all_come(store):
        incoming, real = Incoming(config, store, DeviceState(), took, lambda *_, **__: None), store.adopt_model

        def adopt(transfer, less):
            if transfer == transfer_of(cuts[0].sha256):
                others.wait(0.5)  # what came after it goes on, if it may
            made = real(transfer, less)
            others.set()
            return made

        store.adopt_model = adopt
        models = [b"model %d" % number for number in range(count)]
        cuts = [describe(data, 1024) for data in models]
        for cut, data in zip(cuts, models, strict=True):
            incoming.keep(a.KeepChunk("anna", transfer_of(cut.sha256), cut, 0, data))
        done = [a.ModelComplete(number, transfer_of(cut.sha256), cut, b"") for number, cut in enumerate(cuts)]
        await asyncio.gather(*map(incoming.assemble, done))
        incoming.close()
        return [cut.sha256 for cut in cuts]

    with DeviceStore(tmp_path, "watch", "anna") as store:
        digests = asyncio.run(all_come(store))
        assert store.model() == b"model %d" % (count - 1)
    assert [(type(event), event.sha256) for event in put] == [(e.ModelStored, digest) for digest in digests]
    assert [event.held for event in put] == [b""] * (count - 1) + digests[-1:], "what changed is asked for of the last"
