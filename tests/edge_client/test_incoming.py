"""What comes down to a device whose disk is full for a while."""

import asyncio
import resource

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
