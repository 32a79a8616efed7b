"""Whatever crossed the broker is recorded and taken apart: nothing private is in it."""

import hashlib
import threading
from collections import defaultdict

import numpy as np
import paho.mqtt.client as mqtt
import pytest

from talaria.federated import rounds
from talaria.wire import strict_safetensors
from talaria.wire.changes import applied, are_changes
from talaria.wire.compression import unsqueeze
from talaria.wire.frames import decode_frame
from talaria.wire.messages import CHUNK, decode_message
from talaria.wire.topics import parse

RUNS = {"fedper": {}, "hermes": {"threshold": 0.0}}


class Recorder:
    """Subscribes to everything."""

    def __init__(self, url):
        host, port = url.removeprefix("mqtt://").split(":")
        self.heard = []
        self._client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2, client_id="recorder")
        listening = threading.Event()
        self._client.on_subscribe = lambda *_: listening.set()
        self._client.on_message = lambda _c, _u, m: self.heard.append((m.topic, m.payload))
        self._client.connect(host, int(port))
        self._client.subscribe("#", 1)
        self._client.loop_start()
        assert listening.wait(10)

    def close(self):
        self._client.disconnect()
        self._client.loop_stop()


@pytest.mark.parametrize("algorithm", RUNS)
def test_no_private_tensor_crosses_the_broker(fleet, a_run, algorithm):
    run = a_run(algorithm, rounds=2, **RUNS[algorithm])
    one = fleet(run, devices=("anna", "bela", "carl"))
    coordinator = one.serve()
    url = coordinator.wait_for("ready")["broker"]
    recorder = Recorder(url)
    group = one.agents(url)
    assert group.end() == 0, group.errors
    recorder.close()
    assert coordinator.end() == 0

    transfers = defaultdict(dict)
    for topic, payload in filter(lambda heard: heard[1], recorder.heard):  # without a payload something is cleared
        frame = decode_frame(payload)
        if frame.header.type == CHUNK:
            transfers[parse(topic).kind, frame.header.device, frame.header.xfer][frame.header.off] = frame.payload
        else:
            decode_message(frame)
    parcels = {key: b"".join(model for _, model in sorted(parts.items())) for key, parts in transfers.items()}
    uploads = [key for key in parcels if key[0] == "up"]
    assert len(uploads) == 2 * 3

    shared, _ = rounds.start(run)
    opened, models = [], {}
    for data in parcels.values():
        plain = unsqueeze(data, 1 << 26)
        while are_changes(plain):  # of a model that was heard before
            plain = applied(plain, models[plain[4:36]])
        models[hashlib.sha256(plain).digest()] = plain
        entries, _ = strict_safetensors.unpack(plain, most=1000)
        names = {name for name in entries if not name.startswith("mask|")}
        assert names <= set(shared)
        opened.append(plain)

    everything = b"\x00".join([*opened, *parcels.values(), *(payload for _, payload in recorder.heard)])
    looked_for = 0
    for round in (1, 2):
        for private in one.simulated(rounds=round).private.values():
            for name, tensor in private.items():
                raw = tensor.tobytes()
                # Masks may travel, and a device may keep a copy of what it shares; a counter or a constant is found
                # anywhere.
                if name.startswith(("mask/", "own/", "seen/")) or len(raw) < 16 or len(np.unique(tensor)) < 3:
                    continue
                looked_for += 1
                assert raw not in everything, f"{name} of round {round} crossed the broker"
    assert looked_for > 10
    for device in one.devices:
        for name, tensor in one.private(device).items():
            if name in shared:
                raise AssertionError(f"{name} is private and shared")
            raw = tensor.tobytes()
            copies = name.startswith(("mask/", "own/", "seen/"))
            assert copies or len(np.unique(tensor)) < 3 or len(raw) < 16 or raw not in everything
    weights = next(iter(shared))
    assert shared[weights].tobytes() in everything, "the recorder must hear what does travel"
