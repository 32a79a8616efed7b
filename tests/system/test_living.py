"""A fleet that lives: its run goes on for more rounds, by command, over a real broker."""

import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import numpy as np
import pytest

from talaria import tensors
from talaria.errors import ConfigError
from talaria.federated import global_model
from talaria.federated.run import Run
from talaria_coordinator.cli.orders import given
from talaria_coordinator.config.fleet import load_config
from talaria_coordinator.fleet import order_box
from talaria_coordinator.fleet.cohort import resting, roster
from talaria_coordinator.fleet.operator_commands import Order
from talaria_coordinator.maintenance.fsck import check
from talaria_coordinator.storage.blobs import FolderBlobs
from talaria_coordinator.storage.devices import Sight
from talaria_coordinator.storage.records import Device
from talaria_coordinator.storage.store import Store
from talaria_edge.storage.state import DeviceStore


def test_a_run_that_is_extended_twice_is_to_the_byte_the_longer_one(fleet, a_run):
    one = fleet(a_run("fedper", rounds=2), devices=("anna", "bela"))
    config = load_config(one.config)
    coordinator = one.serve()
    agents = one.agents(coordinator.wait_for("ready")["broker"])
    coordinator.wait_for("round-opened", round=1)
    given(config, Order("extend", rounds=1))  # as `talaria coordinator extend` does: the one that runs takes it
    assert coordinator.wait_for("extend")["by"] == 1
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
        assert [row.round for row in store.attempts.of("watch") if row.model_digest] == [1, 2, 3, 4]
        assert [event["rounds"] for event in store.audit.events("watch") if event["kind"] == "run-extended"] == [3, 4]
        assert not check(store, FolderBlobs(state / "blobs")).damage


def test_orders_that_are_given_at_once_are_carried_out_one_after_another(fleet, a_run):
    """Each extension begins the coordinator anew, and what stood in line behind it was lost."""
    one = fleet(a_run("fedper", rounds=2), devices=("anna", "bela"))
    config = load_config(one.config)
    coordinator = one.serve()
    coordinator.wait_for("connected")
    coordinator.process.send_signal(signal.SIGSTOP)  # so that it finds all of them at one tick
    with ThreadPoolExecutor(4) as shells:
        given_ = [shells.submit(given, config, Order("extend", rounds=1)) for _ in range(3)]
        given_.append(shells.submit(given, config, Order("pause")))
        while len(list((config.state / "orders").glob("*.json"))) < 4:
            time.sleep(0.02)
        coordinator.process.send_signal(signal.SIGCONT)
        assert {answer.result(120) for answer in given_} <= {"running", "paused"}
    with Store(config.state / "coordinator.db") as store:
        known = store.fleets.get("watch")
    assert (Run.from_json(known.run).rounds, known.status) == (5, "paused")
    coordinator.close()


def test_a_trial_that_was_written_into_fleet_toml_since_the_start_counts(fleet, a_run, command):
    """As [run] of that file does: without it the new run would go to all members at once."""
    one = fleet(a_run("fedper", rounds=2), devices=("anna", "bela"))
    coordinator = one.serve()
    coordinator.wait_for("connected")
    path = one.config
    given(load_config(path), Order("pause"))
    path.write_text(path.read_text() + "\n[canary]\nshare = 0.5\n")
    for strange in ("[3]", '{"share": "all"}', '{"shard": 1}', "{"):
        with pytest.raises(ConfigError, match=r"order: canary=.* is no trial"):
            given(load_config(path), Order("next", rounds=3, canary=strange))
    status, _, errors = command("coordinator", "next", path, "--rounds", 3)
    assert status == 1
    assert "canary: share=0.5 of 0 members are 0" in errors, "nobody has come who could try it"
    coordinator.close()


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


def test_another_run_begins_from_the_last_model_with_one_class_more(fleet, a_run, command):
    one = fleet(a_run("fedper", rounds=2), devices=("anna", "bela"))
    coordinator = one.serve()
    agents = one.agents(coordinator.wait_for("ready")["broker"])
    assert (coordinator.end(), agents.end()) == (0, 0)
    old, body = one.private("anna"), one.shared()
    path = one.config

    def refused(said, *options):
        status, _, errors = command("coordinator", "next", path, *options)
        assert status, options
        assert said in errors

    refused("rounds=0, and [run] in fleet.toml is the present run", "--classes", 4)
    refused("spec.classes=2 is below the 3", "--classes", 2, "--rounds", 1)
    path.write_text(path.read_text().replace("[6, 32]", "[6, 40]"))
    refused("spec.input_shape=(6, 40) must stay (6, 32)")
    status, out, errors = command("coordinator", "next", one.config, "--rounds", 2, "--classes", 4, "--json")
    assert (status, json.loads(out)["status"]) == (0, "running"), errors
    for seed, name in enumerate(one.devices):
        one.write_data(name, seed, classes=4)
    config = load_config(path)  # its [run] is the first one still
    again = one.serve()
    url = again.wait_for("ready")["broker"]
    given(config, Order("pause"))
    agents = one.agents(url)
    for _ in one.devices:
        again.wait_for("device-up")
    with agents.stopped():  # no round ends before the fleet is paused
        given(config, Order("resume"))
        again.wait_for("round-opened", round=3)
        given(config, Order("pause", reason="the season is over"))
    again.wait_for("round-closed", round=3)
    assert given(config, Order("next", rounds=1, classes=5)) == "running"
    assert again.wait_for("started")["rounds"] == 4
    assert (again.end(), agents.end()) == (0, 0)
    state = one.folder / "state"
    with Store(state / "coordinator.db") as store:
        known, blobs = store.fleets.get("watch"), FolderBlobs(state / "blobs")
        first, second = [event for event in store.audit.events("watch") if event["kind"] == "run-followed"]
        rows = {row.round: row for row in store.attempts.of("watch") if row.model_digest}
        assert not check(store, blobs).damage
    last = Run.from_json(known.run)
    assert (known.round, known.status, last.spec.classes, len(last.follows)) == (4, "done", 5, 2)
    assert (first["identity"], last.identity) == (last.follows[0], second["identity"])
    assert last.follows[1] == one.run.identity
    assert tensors.equal(global_model.decode_model(last, blobs.get(rows[3].base_digest)), body)
    head = one.private("anna")["head.weight"]
    assert len(head) == 5
    assert len(old["head.weight"]) == 3
    with DeviceStore(one.state_of("anna"), "watch", "anna") as kept:
        assert kept.private().follows == last.follows
        assert (len(kept.before().tensors["head.weight"]), kept.before().run) == (4, last.follows[0])


def test_an_asynchronous_run_is_followed_by_another(fleet, a_run, command):
    """Its versions count on, as rounds do."""
    one = fleet(a_run("fedper", rounds=2), devices=("anna", "bela"), extra='mode = "asynchronous"\nbuffer = 2\n')
    coordinator = one.serve()
    agents = one.agents(coordinator.wait_for("ready")["broker"])
    assert (coordinator.end(), agents.end()) == (0, 0)
    status, _, errors = command("coordinator", "next", one.config, "--rounds", 2)
    assert status == 0, errors
    again = one.serve()
    agents = one.agents(again.wait_for("ready")["broker"])
    for round in (3, 4):
        assert again.wait_for("round-closed")["round"] == round
    assert (again.end(), agents.end()) == (0, 0)


def test_members_come_and_leave_for_good_while_it_learns(fleet, a_run, command):
    one = fleet(a_run("fedavg", rounds=60), extra="[api]\nport = 0\n")
    path = one.config
    path.write_text(path.read_text().replace(f"members = {json.dumps(list(one.devices))}", "devices = 2\ngrows = true"))
    config = load_config(path)
    coordinator = one._start("coordinator", "serve", path, "--json")
    ready = coordinator.wait_for("ready")
    one.agents(ready["broker"], "anna", "bela")
    assert coordinator.wait_for("round-opened", round=1)["cohort"] == 2
    with httpx.Client(base_url=ready["api"], timeout=30) as api:
        late = api.get("/api/v1/fleets/watch").json()["waits_for"]
        assert all(entry.keys() == {"device", "phase", "online"} for entry in late)
        given(config, Order("pause"))
        coordinator.wait_for("round-closed", round=1)
        one.agents(ready["broker"], "carl", "dora")
        while len(api.get("/api/v1/fleets/watch/devices").json()) < 4:
            time.sleep(0.1)
        given(config, Order("resume"))
        coordinator.wait_for("roster", devices=["anna", "bela", "carl", "dora"])
        given(config, Order("pause"))  # so that no round is open when bela leaves
        given(config, Order("retire", "bela", "it was sold"))
        with pytest.raises(ConfigError, match="'bela' has left for good; there is nothing to retire"):
            given(config, Order("retire", "bela"))
        given(config, Order("resume"))
        coordinator.wait_for("round-opened", cohort=3)
        (bela,) = [d for d in api.get("/api/v1/fleets/watch/devices").json() if d["device"] == "bela"]
        assert bela["retired"] is not None
    coordinator.process.terminate()
    assert coordinator.end() == 0
    status, out, _ = command("coordinator", "status", path, "--json")
    assert (status, json.loads(out)["roster"]) == (0, ["anna", "carl", "dora"])


def test_who_is_away_for_a_season_is_not_drawn():
    def device(name, online, seen, **more):
        return Device("watch", name, 1, online, {}, 0.0, seen, None, **more)

    day = 86400.0
    known = [device("anna", False, 0.0), device("bela", True, 0.0), device("carl", False, 9 * day)]
    assert resting(("anna", "bela", "carl"), known, 2.0, 10 * day) == {"anna"}
    assert resting(("anna", "bela", "carl"), known, 0.0, 10 * day) == frozenset()
    assert roster((), 2, [device("gone", True, 0.0, retired=1.0), *known]) == ("anna", "bela")
    # The whole fleet was off from the third day to the thirtieth, and anna since the first.
    off = [device("anna", False, 0.0), device("bela", False, 3 * day), device("carl", False, 2.5 * day)]
    assert resting(("anna", "bela", "carl"), off, 2.0, 30 * day, 30 * day, 3 * day) == {"anna"}
    assert resting(("anna", "bela", "carl"), off, 2.0, 33 * day, 30 * day, 3 * day) == {"anna", "bela", "carl"}


def test_who_was_here_when_the_coordinator_ended_was_not_away(tmp_path):
    with Store(tmp_path / "db") as store:
        store.fleets.enter("watch", "{}", "0" * 64, "0" * 64)
        for name in ("anna", "bela"):
            store.devices.see("watch", Sight(name, 1, {}, online=name == "anna"))
        before = time.time()
        store.fleets.enter("watch", "{}", "0" * 64, "0" * 64)
        anna, bela = store.devices.of("watch")
    assert (anna.online, bela.online) == (False, False)
    assert bela.seen < before <= anna.seen


def test_a_run_that_gates_refuse_is_called_off_and_the_one_before_comes_back(fleet, a_run):
    one = fleet(a_run("fedper", rounds=2, epochs=4), devices=("anna", "bela"), extra="[canary]\nshare = 0.5\n")
    config = load_config(one.config)

    def learned(rounds):
        coordinator = one.serve()
        url = coordinator.wait_for("ready")["broker"]
        files = [one.device_config(name, url) for name in one.devices]
        for path, name in zip(files, one.devices, strict=True):
            served = f'bundle = "{name}.talaria"\nvariants = ["fp32"]\n[fleet]'
            path.write_text(path.read_text().replace("[fleet]", served))
        agents = one._start("edge", "run", *files, "--json")
        assert (coordinator.end(), agents.end()) == (0, 0)
        with Store(one.folder / "state" / "coordinator.db") as store:
            assert not check(store, FolderBlobs(one.folder / "state" / "blobs")).damage
            assert store.fleets.get("watch").round == rounds
            return store.fleets.get("watch"), store.audit.events("watch", 500), agents.events

    before, *_ = learned(2)
    private = {name: one.private(name) for name in one.devices}
    with pytest.raises(ConfigError, match="rounds=1 must be at least 2, those of its trial"):
        given(config, Order("next", rounds=1))
    assert given(config, Order("next", rounds=5)) == "running"
    for name in one.devices:  # labels that are wrong in training, and right where the gate looks
        kept = dict(np.load(one.folder / f"{name}.npz"))
        np.savez(one.folder / f"{name}.npz", **kept | {"y_train": (kept["y_train"] + 1) % 3})
    after, events, told = learned(4)
    (off,) = [event for event in events if event["kind"] == "canary-called-off"]
    assert (off["asked"], off["answered"], off["refused"]) == (1, 1, 1)
    (tried,) = off["members"]
    assert {item["device"] for item in told if item["event"] == "training"} == {tried}
    assert (after.model_digest, after.status) == (before.model_digest, "done")
    assert Run.from_json(after.run).identity == one.run.identity
    for name in one.devices:
        assert tensors.equal(one.private(name), private[name])
