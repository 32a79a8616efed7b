"""The device in JavaScript beside Python's: in a real fleet, the same bytes, and each update counted exactly once."""

import asyncio
import json
import os
import shutil
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from javascript import found, packages
from keyed import Cutter, data_of
from servers import serving_mosquitto, serving_small_packets

from talaria import tensors
from talaria.federated import kit as kits
from talaria.federated.make_kit import kit_of
from talaria.privacy.rule import Privacy
from talaria.wire import strict_safetensors
from talaria_coordinator.cli.template import found as found_fleet
from talaria_coordinator.config.privacy import PrivacyConfig
from talaria_coordinator.storage.store import Store

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "examples" / "node"


@pytest.fixture
def example(tmp_path):
    """The example as npm leaves it: its files beside the packages that it names."""
    folder = tmp_path / "examples" / "node"
    folder.mkdir(parents=True)
    for path in SOURCE.glob("*.mjs"):
        shutil.copy(path, folder)
    (folder / "node_modules").symlink_to(packages(SOURCE))
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    return folder


def started(example, path, **environment):
    """The device of a configuration, as a process."""
    return subprocess.Popen(
        [found("node", "nodejs"), str(example / "device.mjs"), str(path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip


def samples(folder, arrays):
    data = {name: np.ascontiguousarray(value) for name, value in arrays.items()}
    (folder / "anna.safetensors").write_bytes(strict_safetensors.pack(data))


def written(folder, broker, **more):
    path = folder / "anna.json"
    told = {"device": "anna", "fleet": "watch", "broker": broker, "data": "anna.safetensors"}
    if (folder / "watch.kit").exists():
        told["kit"] = "watch.kit"
    path.write_text(json.dumps({**told, "retry_s": 0.3, **more}))
    return path


class Fleet:
    """A fleet of processes in which anna speaks JavaScript."""

    def __init__(self, one, example, kit=True, mode="quorum = 1.0\n"):
        self.one, self.example = one, example
        one.extra = mode  # unless told otherwise a round waits for everybody, however slow this machine is
        if kit:  # else anna asks the coordinator for it
            (one.folder / "watch.kit").write_bytes(kits.encode(kit_of(one.run)))
        samples(one.folder, dict(np.load(one.folder / "anna.npz")))
        if one.run.codec != "raw":
            config = one.config
            text = config.read_text().replace(
                "[run]\n", f'[run]\ncodec = "{one.run.codec}"\ndownload = "{one.run.download}"\n'
            )
            config.write_text(text)
            self.coordinator = one._start("coordinator", "serve", config, "--json")
        else:
            self.coordinator = one.serve()
        self.broker = self.coordinator.wait_for("ready")["broker"]

    def anna(self, broker=None):
        path = written(self.one.folder, broker or self.broker)
        program = type(self.coordinator)(process=started(self.example, path))
        self.one.programs.append(program)
        return program

    def learned_as_simulated(self):
        """To the byte: the global model, and what anna keeps to herself."""
        simulated = self.one.simulated()
        assert tensors.equal(self.one.shared(), simulated.shared)
        entries, _ = strict_safetensors.unpack(
            (self.one.state_of("anna") / "personal.safetensors").read_bytes(), most=1000
        )
        personal = {name: entry.array() for name, entry in entries.items()}
        own = {k: v for k, v in simulated.private["anna"].items() if "/" not in k}
        assert tensors.equal({k: personal[k] for k in own}, own)

    def counted(self):
        """By round, in how many updates each device counted."""
        with Store(self.one.folder / "state" / "coordinator.db") as store:
            store.audit.verify()
            rows = [row for row in store.attempts.of("watch") if row.counted is not None]
            return {row.round: sorted(device for _, device in row.counted) for row in rows}


@pytest.mark.parametrize(("file", "count"), [("vectors", 18), ("machine", 7), ("store", 2)])
def test_its_own_tests(example, file, count, tmp_path):
    """Against the vectors of the protocol, how it gets a kit, cuts its update anew, and meets a full disk and a run
    that is called off; and ONNX Runtime keeps nothing that it would tell its maker."""
    (home := tmp_path / "home").mkdir()
    usual = {
        name: value for name, value in os.environ.items() if name not in ("ORT_DISABLE_TELEMETRY", "XDG_CACHE_HOME")
    }
    done = subprocess.run(
        [found("node", "nodejs"), "--test", str(example / f"{file}.test.mjs")],
        env={**usual, "HOME": str(home)}, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert f"# pass {count}" in done.stdout
    assert sorted(path.relative_to(home) for path in home.rglob("*")) == []


@pytest.mark.parametrize(
    ("algorithm", "codec", "broker", "rounds"),
    [("fedper", "raw", "mosquitto", 10), ("fedavg", "int8", "amqtt", 10)],
)
def test_it_learns_to_the_byte_what_a_python_device_learns(fleet, a_run, example, algorithm, codec, broker, rounds):
    run = replace(a_run(algorithm, rounds=rounds), codec=codec, download=codec)
    two = Fleet(fleet(run, broker=broker, devices=("anna", "bela"), engine="onnx"), example)
    anna, bela = two.anna(), two.one.agents(two.broker, "bela")
    assert [anna.end(), bela.end(), two.coordinator.end()] == [0, 0, 0]
    two.learned_as_simulated()
    assert two.counted() == {round: ["anna", "bela"] for round in range(1, rounds + 1)}
    done = next(event for event in anna.events if event["event"] == "done")
    assert done["rounds"] == rounds
    assert 0 <= done["accuracy"] <= 1


def test_asynchronously_what_was_stored_last_is_in_its_own_model(fleet, a_run, example):
    one = fleet(a_run("fedper", rounds=2), devices=("anna", "bela"), engine="onnx")
    two = Fleet(one, example, kit=False, mode='mode = "asynchronous"\nbuffer = 2\n')
    anna, bela = two.anna(), two.one.agents(two.broker, "bela")
    assert [anna.end(), bela.end(), two.coordinator.end()] == [0, 0, 0]
    assert two.counted() == {1: ["anna", "bela"], 2: ["anna", "bela"]}
    ends = [next(event for event in agent.events if event["event"] == "done") for agent in (anna, bela)]
    assert [end["rounds"] for end in ends] == [2, 2]


def test_it_augments_as_a_python_device_does(fleet, a_run, example):
    run = a_run("fedper", rounds=2)
    two = Fleet(
        fleet(replace(run, recipe=run.recipe.but(augment="imu")), devices=("anna", "bela"), engine="onnx"), example
    )
    anna, bela = two.anna(), two.one.agents(two.broker, "bela")
    assert [anna.end(), bela.end(), two.coordinator.end()] == [0, 0, 0]
    simulated = two.one.simulated().shared
    for name, value in two.one.shared().items():
        assert np.abs(value - simulated[name]).max() <= 1e-4, (
            name
        )  # sines, and products of three, are rounded otherwise


class Way:
    """A way to the broker, in a thread of its own, on which links can be cut at any byte."""

    def __init__(self, port):
        self._loop, up = asyncio.new_event_loop(), threading.Event()

        async def live():
            async with Cutter(port) as self._cutter:
                self.port, self._ended = self._cutter.port, asyncio.Event()
                up.set()
                await self._ended.wait()

        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(live(),), daemon=True)
        self._thread.start()
        assert up.wait(20)

    def cut(self):
        self._loop.call_soon_threadsafe(self._cutter.cut)

    def close(self):
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(20)
        self._loop.close()


@pytest.fixture
def small_packets(tmp_path):
    with serving_small_packets(tmp_path, 8000) as url:
        yield url


def test_killed_and_cut_it_is_counted_exactly_once(fleet, a_run, example, small_packets):
    """Killed while its kit comes, while it trains, while its update is under way, and cut off there."""
    one = fleet(a_run("fedper", rounds=4), devices=("anna", "bela"), engine="onnx", broker=small_packets)
    two = Fleet(one, example, kit=False)
    way = Way(int(two.broker.rpartition(":")[2]))
    broker = f"mqtt://127.0.0.1:{way.port}"
    try:
        bela, state = one.agents(two.broker, "bela"), one.state_of("anna")
        anna = two.anna(broker)
        anna.wait_for("kit-wanted")
        while not any(state.glob("kit*")):
            time.sleep(0.01)
        anna.kill()
        for round, event in ((1, "training"), (2, "trained")):
            anna = two.anna(broker)
            anna.wait_for("training", round=round)
            if event == "trained":
                anna.wait_for("trained")
            anna.kill()
        anna = two.anna(broker)
        anna.wait_for("trained")
        way.cut()
        anna.wait_for("disconnected")
        assert [anna.end(), bela.end(), two.coordinator.end()] == [0, 0, 0]
    finally:
        way.close()
    assert two.counted() == {round: ["anna", "bela"] for round in range(1, 5)}
    two.learned_as_simulated()
    assert [path.name for path in state.glob("kit*")] == ["kit.bin"]


def test_a_run_that_it_cannot_learn_is_declined_with_the_reason(fleet, a_run, example):
    two = Fleet(fleet(a_run("ditto", rounds=1), devices=("anna",), engine="onnx"), example)
    anna = two.anna()
    assert "ditto cannot be learned here" in anna.wait_for("error")["error"]
    told = two.coordinator.wait_for("progress", device="anna", phase="declined")
    assert "ditto cannot be learned here" in told["reason"]


def test_a_wrong_field_is_named_with_its_mend_before_anything_begins(example, tmp_path):
    samples(tmp_path, {"x_train": np.zeros((1, 2), np.float32), "y_train": np.zeros(1, np.int64)})
    (tmp_path / "anna.safetensors").chmod(0o644)
    beyond, here = "mqtt://192.0.2.7:1883", "mqtt://127.0.0.1:1"
    cases = [
        (here, {"identiti": "keys"}, "identiti is no field; there are device, fleet"),
        (here, {"data": "../none.safetensors"}, f"data: {tmp_path / 'none.safetensors'} is not there"),
        (here, {"retry_s": "2"}, 'retry_s="2" must be a number above 0'),
        ("127.0.0.1:1883", {}, 'broker="127.0.0.1:1883" is no MQTT URL; write mqtt://host:1883'),
        ("mqt://anna:secret@host", {}, 'broker="mqt://host" is no MQTT URL'),
        (beyond, {}, "192.0.2.7:1883 is beyond this machine and without TLS"),
        (here, {"password_file": "../anna.safetensors"}, "username is missing, whose password is in password_file"),
        (here, {"username": "anna", "password_file": "../anna.safetensors"}, "others may read"),
        ("mqtts://192.0.2.7:8883", {}, "identity is missing: without keys anybody who reaches the broker"),
        (here, {"identity": "."}, "identity: {folder}/fleet.json cannot be read"),
    ]
    begun = []
    for number, (broker, more, _) in enumerate(cases):
        (folder := tmp_path / str(number)).mkdir()
        begun.append(started(example, written(folder, broker, **{"data": "../anna.safetensors", **more})))
    for number, (one, (_, _, said)) in enumerate(zip(begun, cases, strict=True)):
        out, errors = one.communicate(timeout=60)
        assert (one.returncode, out) == (1, "")
        assert said.replace("{folder}", str(tmp_path / str(number))) in errors


def test_a_journal_that_nobody_reads_any_more_ends_nothing(example, tmp_path):
    samples(tmp_path, {"x_train": np.zeros((1, 2), np.float32), "y_train": np.zeros(1, np.int64)})
    with started(example, written(tmp_path, "mqtt://127.0.0.1:1")) as one:
        assert "unreachable" in one.stdout.readline()
        one.stdout.close()
        with pytest.raises(subprocess.TimeoutExpired):  # it says more meanwhile
            one.wait(4)
        one.kill()


def test_its_owner_takes_it_out_of_the_fleet_for_good(fleet, a_run, example):
    one = fleet(a_run(rounds=1), devices=("anna", "bela"))
    coordinator = one.serve()
    path = written(one.folder, coordinator.wait_for("ready")["broker"], state="state/anna")

    def run(*options):
        process = subprocess.run(
            [found("node", "nodejs"), str(example / "device.mjs"), str(path), *options],
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        return process.returncode, process.stdout, process.stderr

    status, said, errors = run("--leave")
    assert (status, json.loads(said.splitlines()[-1])["event"]) == (0, "left"), errors
    assert coordinator.wait_for("left")["device"] == "anna"
    broker = json.loads(path.read_text())["broker"]
    assert one.agents(broker, "bela").end() == 0
    assert coordinator.end() == 0
    status, _, errors = run()
    assert status == 1
    assert "has left its fleet for good; to take part again, its operator readmits it" in errors


async def beside(one, tmp_path, example):
    """The fleet's first member in JavaScript beside the others in Python, over TLS; what it said, until it ends."""
    (tmp_path / "watch.kit").write_bytes(kits.encode(kit_of(one.run)))
    data = data_of(0)
    arrays = {f"{k}_{part}": getattr(s, k) for part, s in (("train", data.train), ("val", data.val)) for k in "xy"}
    samples(tmp_path, arrays)
    path = written(tmp_path, one.url, identity="id-anna", state="node-state", mqtt=5)
    async with one._within(120), asyncio.TaskGroup() as group:
        serving = group.create_task(one.serve())
        await one.told_of("ready")
        others = [group.create_task(one.agent(name).run()) for name in one.members[1:]]
        anna = await asyncio.create_subprocess_exec(
            found("node", "nodejs"), str(example / "device.mjs"), str(path), stdout=subprocess.PIPE
        )
        out, _ = await anna.communicate()
        assert anna.returncode == 0, out
        await asyncio.gather(*others, serving)
    return [json.loads(line) for line in out.splitlines()]


def test_with_keys_and_tls(keyed, tmp_path, example):
    one = keyed(2)
    asyncio.run(beside(one, tmp_path, example))
    assert one.counted() == {1: ["anna", "bela"], 2: ["anna", "bela"]}


def test_a_broker_that_asks_for_a_name_is_known_by_another_authority_than_the_fleets(keyed, tmp_path, example):
    keyed(1)
    found_fleet(tmp_path / "host", "host", ["localhost"], 1, 1)
    samples(tmp_path, {"x_train": np.zeros((1, 2), np.float32), "y_train": np.zeros(1, np.int64)})
    (tmp_path / "secret").write_text("a password")
    (tmp_path / "secret").chmod(0o600)
    own = tmp_path / "host" / "broker"
    with serving_mosquitto(tmp_path, f"certfile {own}/server.crt\nkeyfile {own}/server.key") as url:
        broker = url.replace("mqtt://127.0.0.1", "mqtts://localhost")
        path = written(tmp_path, broker, identity="id-anna", username="anna", password_file="secret")
        with started(example, path, NODE_EXTRA_CA_CERTS=str(own / "ca.crt")) as anna:
            said = json.loads(anna.stdout.readline())
            anna.kill()
    assert said["event"] == "connected", said


def test_a_secure_round_goes_on_without_it(keyed, tmp_path, example):
    secure = PrivacyConfig(rule=Privacy(secure=True, most_weight=64), step_s=30.0)
    one = keyed(1, members=("anna", "bela", "carl", "dora"), privacy=secure)
    said = asyncio.run(beside(one, tmp_path, example))
    assert any("a secure round" in event.get("error", "") for event in said)
    assert "a secure round" in one.of("progress", device="anna", phase="declined")[0]["reason"]
    assert one.counted() == {1: ["bela", "carl", "dora"]}
