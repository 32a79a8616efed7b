"""What a device does with what an earlier version left in its folder."""

import hashlib
from dataclasses import replace

from talaria.federated import global_model, rounds
from talaria_edge.agent.training import Learner
from talaria_edge.config import DeviceConfig
from talaria_edge.data import Given
from talaria_edge.storage.state import DeviceStore


def test_a_round_that_was_learned_before_runs_had_identities_is_delivered(tmp_path, device_data, a_run):
    """The update names its run by its whole JSON; it was declined as of another model, and the round learned twice."""
    source = Given(lambda: device_data(0))
    config = DeviceConfig(
        device="anna", fleet="watch", broker="mqtt://127.0.0.1", state=tmp_path / "anna", source=source
    )
    run = a_run("fedper", rounds=3)
    model = global_model.encode_model(rounds.start(run)[0])
    digest = hashlib.sha256(model).digest()
    with DeviceStore(config.state, "watch", "anna") as store:
        store.model_part("x").write_bytes(model)
        store.adopt_model("x")
        Learner(config, store, run).learn(1, digest)
        staged = store.staged()
        earlier = replace(store.trained(), run=hashlib.sha256(run.to_json().encode()).hexdigest())
        store.stage(earlier, staged.tensors)
        for longer in (run, replace(run, rounds=8)):
            assert Learner(config, store, longer).learn(1, digest, epoch=1) == (earlier, {})
        store.publish()  # as a device does that was killed behind its offer
        assert Learner(config, store, run).learn(1, digest, epoch=1)[0] == earlier
