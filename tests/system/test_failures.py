"""What goes wrong in the field, and what is said then: which thing it is, and how to mend it."""

import asyncio
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import mypkg
import pytest
from servers import serving_mosquitto

from talaria import tensors
from talaria.errors import StateError
from talaria_coordinator.server.served import Served
from talaria_coordinator.storage.blobs import FolderBlobs


def test_a_port_that_is_taken(fleet, a_run, command):
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        status, _, errors = command("coordinator", "serve", fleet(a_run(), port=port).config)
    assert status == 1
    assert f"127.0.0.1:{port} cannot be opened" in errors
    assert "port = 0" in errors
    assert "Traceback" not in errors


def test_a_broker_that_does_not_answer(fleet, a_run, command):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        url = f"mqtt://127.0.0.1:{probe.getsockname()[1]}"
    one = fleet(a_run(), broker=url)
    status, _, errors = command("coordinator", "serve", one.config)
    assert status == 1
    assert "cannot use the MQTT broker" in errors
    assert "Start one" in errors
    device = one.device_config("anna", url)
    device.write_text(device.read_text().replace('name = "watch"', 'name = "watch"\npatience_s = 1'))
    status, out, errors = command("edge", "run", device)
    assert status == 1
    assert "unreachable" in out
    assert "Start one" in errors
    assert "Traceback" not in errors


def test_a_password_that_is_not_there_is_told_before_anything_is_ready(fleet, a_run, command):
    one = fleet(a_run(), broker="mqtt://127.0.0.1:1")
    path = one.config
    path.write_text(path.read_text().replace("[broker]", '[broker]\nusername = "co"\npassword_file = "gone"'))
    status, out, errors = command("coordinator", "serve", path)
    assert (status, out) == (1, "")
    assert "gone cannot be read" in errors
    assert "write the password there" in errors


@pytest.mark.parametrize(("who", "topic"), [("agent", "d/anna/up/#"), ("coordinator", "d/anna/cmd")])
def test_what_the_broker_does_not_let_somebody_say_is_told_to_whoever_says_it(fleet, a_run, tmp_path, who, topic):
    (tmp_path / "acl").write_text(f"topic deny fl/1/watch/{topic}\ntopic readwrite #\n")
    tmp_path.chmod(0o755)
    (tmp_path / "acl").chmod(0o644)
    with serving_mosquitto(tmp_path, f"acl_file {tmp_path / 'acl'}") as url:
        one = fleet(a_run(rounds=1), broker=url, devices=("anna",))
        programs = {"coordinator": one.serve(), "agent": one.agents(url)}
        told = programs[who].wait_for("error")["error"]
    assert f"the broker refuses what is published on fl/1/watch/{topic}: Not authorized" in told
    assert "correct its access list (ACL), or the user name here" in told


def given_by(one, function, options):
    """The settings of a device whose samples a function gives; it reaches no broker."""
    device = one.device_config("anna", "mqtt://127.0.0.1:1")
    text = device.read_text().replace('"npz"', f'"mypkg.data:{function}"').replace('path = "anna.npz"', "")
    device.write_text(f'{text}[data.options]\n{options}\n[code]\nallow = ["mypkg"]\n')
    return device


def test_a_source_of_samples_that_calls_sys_exit_is_named(fleet, command, monkeypatch):
    monkeypatch.chdir(Path(mypkg.__file__).parents[1])
    status, _, errors = command("edge", "run", given_by(fleet(), "leave", "word = 0"))
    assert status == 1
    assert "talaria: anna: data: source='mypkg.data:leave' failed (SystemExit: 0); mend it" in errors
    assert "Traceback" not in errors


def test_an_agent_whose_source_of_samples_hangs_ends_when_it_is_told_to(fleet, tmp_path, monkeypatch):
    monkeypatch.chdir(Path(mypkg.__file__).parents[1])
    """In a process that was started, not forked: the end of that one waits for its threads."""
    device = given_by(fleet(), "hang", f"begun = '{tmp_path / 'begun'}'")
    command = [sys.executable, "-m", "talaria", "edge", "run", device, "--json"]
    agent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        while not (tmp_path / "begun").exists():
            assert agent.poll() is None, agent.communicate()
            time.sleep(0.02)
        agent.terminate()
        out, errors = agent.communicate(timeout=60)
    finally:
        agent.kill()
        agent.communicate()
    assert (agent.returncode, errors) == (0, "")
    assert [json.loads(line)["event"] for line in out.splitlines()] == ["stopped"]


def test_a_damaged_private_state_is_named_and_not_overwritten(fleet, a_run, command):
    one = fleet(a_run("fedper", rounds=1), devices=("anna", "bela"))
    coordinator = one.serve()
    url = coordinator.wait_for("ready")["broker"]
    assert one.agents(url).end() == 0
    assert coordinator.end() == 0
    path = one.state_of("anna") / "private.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    status, _, errors = command("edge", "run", one.device_config("anna", url))
    assert status == 1
    assert str(path) in errors
    assert "is damaged" in errors
    assert "restore" in errors
    assert path.read_bytes() == bytes(data)
    status, out, _ = command("edge", "result", one.state_of("bela"))
    assert status == 0
    assert '"rounds": 1' in out
    status, out, _ = command("coordinator", "status", one.config, "--json")
    assert status == 0
    assert '"status": "done"' in out


def test_a_disk_that_is_full_when_the_link_comes_back(fleet, a_run):
    """A connection counts a boot first, on the disk; who cannot waits for room as after any other write."""
    one = fleet(a_run("fedper", rounds=2), devices=("anna",))
    coordinator = one.serve()
    ready = coordinator.wait_for("ready")
    agent = one.agents(ready["broker"])
    coordinator.wait_for("round-opened", round=1)
    coordinator.kill()
    one.port = int(ready["broker"].rsplit(":", 1)[1])
    agent.wait_for("disconnected")
    agent.limit_files(100)
    coordinator = one.serve()
    told = agent.wait_for("failed")
    assert told["error"].startswith("state: ")
    assert told["again_in_s"] > 0
    agent.limit_files(None)
    assert (agent.end(), coordinator.end()) == (0, 0)


def test_a_disk_that_fills_up(fleet, a_run):
    """First an edge's, then the coordinator's; with room again the run ends with the same bytes."""
    one = fleet(a_run("fedper", rounds=3), devices=("anna", "bela"))
    one.extra = "quorum = 1.0"  # else a round goes on without the one whose disk is full
    coordinator = one.serve()
    url = coordinator.wait_for("ready")["broker"]
    steady, full = one.agents(url, "anna"), one.agents(url, "bela")
    full.wait_for("received", round=1)
    full.limit_files(100)
    told = full.wait_for("failed")
    assert "free space" in told["error"]
    assert told["again_in_s"] > 0
    private = one.state_of("bela") / "private.safetensors"
    assert private.stat().st_size > 1000
    full.limit_files(None)

    coordinator.wait_for("round-closed", round=2)
    coordinator.limit_files(1000)
    assert coordinator.end() == 1
    assert "free space" in coordinator.errors
    assert "Traceback" not in coordinator.errors
    coordinator = one.serve()
    assert coordinator.wait_for("ready")["broker"] == url
    assert [group.end() for group in (steady, full)] == [0, 0]
    assert coordinator.end() == 0
    simulated = one.simulated()
    assert tensors.equal(one.shared(), simulated.shared)
    for device in one.devices:
        assert tensors.equal(one.private(device), simulated.private[device]), device


def test_a_coordinator_whose_blobs_refuse_updates_ends_when_it_is_told_to(keyed, monkeypatch):
    """Kept uploads are tried again until then; they are found at the next start."""
    served, begin = [], Served.__init__
    monkeypatch.setattr(Served, "__init__", lambda self, *a, **k: (served.append(self), begin(self, *a, **k))[1])
    fleet = keyed(rounds=1)

    async def scenario():
        async with fleet.running(*fleet.members) as tasks:
            await fleet.told_of("error", device="anna")
            served[-1].stop()
            async with asyncio.timeout(30):
                await tasks["co"]

    def refuse(*_):
        raise StateError("blobs: no space")

    with monkeypatch.context() as full:
        full.setattr(FolderBlobs, "adopt", refuse)
        asyncio.run(scenario())
    assert fleet.of("stopped")
    fleet.options["stay"] = False
    fleet.live(_nothing)
    assert fleet.counted() == {1: list(fleet.members)}


async def _nothing():
    """Nothing more."""
