"""A fleet that lives: its run goes on for more rounds, by command, over a real broker."""

import json
from dataclasses import replace

import pytest

from talaria import tensors
from talaria.errors import ConfigError
from talaria_coordinator.cli.orders import given
from talaria_coordinator.config.fleet import load_config
from talaria_coordinator.fleet import order_box
from talaria_coordinator.fleet.operator_commands import Order
from talaria_coordinator.maintenance.fsck import check
from talaria_coordinator.storage.blobs import FolderBlobs
from talaria_coordinator.storage.store import Store


def test_a_run_that_is_extended_twice_is_to_the_byte_the_longer_one(fleet, a_run):
    one = fleet(a_run("fedper", rounds=2), devices=("anna", "bela"))
    config = load_config(one.config)
    coordinator = one.serve()
    agents = one.agents(coordinator.wait_for("ready")["broker"])
    coordinator.wait_for("round-opened", round=1)
    given(config, Order("extend", rounds=1))  # as `talaria coordinator extend` does: the one that runs takes it
    assert coordinator.wait_for("extend")["rounds"] == 3
    assert coordinator.wait_for("started")["rounds"] == 3
    assert (coordinator.end(), agents.end()) == (0, 0)
    with pytest.raises(ConfigError, match=r"rounds=0 must be in 1\.\."):
        given(config, Order("extend"))
    assert given(config, Order("extend", rounds=1)) == "running"  # nobody serves it, and it was done
    again = one.serve()
    agents = one.agents(again.wait_for("ready")["broker"])
    assert (again.end(), agents.end()) == (0, 0)
    one.run = replace(one.run, rounds=4)
    simulated = one.simulated()
    assert tensors.equal(one.shared(), simulated.shared)
    for name in one.devices:
        assert tensors.equal(one.private(name), simulated.private[name])
    state = one.folder / "state"
    with Store(state / "coordinator.db") as store:
        assert [row.round for row in store.attempts("watch") if row.model_digest] == [1, 2, 3, 4]
        assert [event["rounds"] for event in store.events("watch") if event["kind"] == "run-extended"] == [3, 4]
        assert not check(store, FolderBlobs(state / "blobs")).damage


def test_an_order_that_is_none_is_answered_and_taken_away(tmp_path):
    folder = tmp_path / "orders"
    folder.mkdir()
    strange = b"\xff", b"[[[", b"{}", b'{"verb": "sell", "device": "", "reason": "", "rounds": 1}'
    for number, data in enumerate(strange):
        (folder / f"{number}.json").write_bytes(data)
    (folder / "5.json").write_bytes(b" " * (order_box.LARGEST + 1))
    assert list(order_box.take(tmp_path)) == []
    answers = sorted(folder.iterdir())
    assert len(answers) == 5
    assert all("talaria coordinator" in json.loads(path.read_bytes())["error"] for path in answers)
