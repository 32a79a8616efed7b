"""A fleet with keys, over a real Mosquitto with TLS and lists of who may say what: who belongs learns, nobody else."""

import asyncio
import gc
import json
import re
import shutil
import socket
import ssl
import subprocess
import sys
import time

import httpx
import pytest

from talaria.errors import ConfigError, TransportError
from talaria.identity.credentials import Credentials
from talaria.wire import messages as m
from talaria.wire.broker_url import Tls
from talaria.wire.frames import Header, encode_frame
from talaria.wire.mqtt import Arrival, LinkDown, LinkUp, Mqtt
from talaria.wire.signing import Signer
from talaria_coordinator.broker import open_broker
from talaria_coordinator.cli.template import found
from talaria_coordinator.config.fleet import load_config
from talaria_coordinator.identity import membership
from talaria_coordinator.server.server import require_safe
from talaria_edge.identity.enroll import ask, finish


@pytest.fixture(autouse=True)
def _collected():
    yield
    gc.collect()


MAIN = [sys.executable, "-c", "from talaria.cli.main import main; main()"]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def enrol(keys, folder, device):
    """All steps of joining, as the two programs do them."""
    request = ask(folder, membership.enroll(keys, device))
    finish(folder, membership.admit(keys, request.read_bytes()).encode())
    return Credentials.load(folder)


@pytest.fixture(scope="module")
def keyed(tmp_path_factory):
    """A fleet's folder with anna and bela, and the folders of a fleet that has nothing to do with it."""
    root = tmp_path_factory.mktemp("keys")
    port = free_port()
    found(root / "fleet", "watch", ["localhost"], port, 2)
    found(root / "stranger", "watch", ["localhost"], port, 2)
    for device in ("anna", "bela"):
        enrol(root / "fleet", root / device, device)
    enrol(root / "stranger", root / "eve", "anna")
    return root


@pytest.fixture(scope="module")
def broker(keyed):
    with open_broker("mosquitto", state=keyed / "broker", security=keyed / "fleet" / "broker") as running:
        yield running


def link(broker, name, filters, tls):
    return Mqtt(broker.url, name, filters, tls=tls, backoff=(0.1, 0.2), timeout=5.0)


def device_tls(keyed, name):
    return Credentials.load(keyed / name).tls


async def hears(transport, seconds=1.5):
    """All messages that come within ``seconds``."""
    got = []
    try:
        async with asyncio.timeout(seconds):
            while True:
                item = await transport.receive()
                if isinstance(item, Arrival):
                    got.append((item.topic, item.payload))
    except TimeoutError:
        return got


def attempt(work):
    return asyncio.run(work)


# ---- the whole, as it is started by hand


def test_a_fleet_with_keys_learns_over_tls(fleet, keyed, tmp_path, command):
    made = fleet(devices=("anna", "bela"), port=free_port())
    made.run = type(made.run)(**{**vars(made.run), "rounds": 1})
    keys, extra = tmp_path / "keys", '\n[identity]\nfolder = "keys"\n'
    assert command("fleet", "init", keys, "--name", "watch", "--port", made.port)[0] == 0
    made.extra = extra
    for device in made.devices:
        status, code, _ = command("fleet", "enroll", keys, device)
        assert status == 0
        folder = tmp_path / f"id-{device}"
        joined = subprocess.run(
            [*MAIN, "edge", "join", str(folder)], input=code, capture_output=True, text=True, check=True
        )
        assert code.strip() not in joined.stdout + joined.stderr
        answer = tmp_path / f"{device}.answer"
        assert command("fleet", "admit", keys, folder / f"{device}.request", "-o", answer)[0] == 0
        assert command("edge", "join", folder, "--answer", answer)[0] == 0
        assert code.strip() not in "".join(f.read_text() for f in folder.iterdir())
        assert (folder / "sign.key").stat().st_mode & 0o777 == 0o600
    coordinator = made.serve()
    url = coordinator.wait_for("ready")["broker"]
    assert url.startswith("mqtts://")
    for device in made.devices:
        path = made.device_config(device, url)
        path.write_text(path.read_text() + f'[identity]\nfolder = "id-{device}"\n')
    files = [tmp_path / f"{d}.toml" for d in made.devices]
    agents = made._start("edge", "run", *files, "--json")
    assert coordinator.wait_for("round-closed")["counted"] == 2
    assert agents.end() == 0
    assert coordinator.end() == 0


def served_with_keys(fleet, tmp_path, more=""):
    """A fleet's folder of keys, what anna got of it, and the coordinator that serves it."""
    made, keys = fleet(devices=("anna", "bela"), port=free_port()), tmp_path / "keys"
    found(keys, "watch", ["localhost"], made.port, 2)
    made.extra = f'\n[identity]\nfolder = "keys"\n{more}'
    return keys, enrol(keys, tmp_path / "id-anna", "anna"), made.serve()


async def speak(transport, anna, text, boot):
    birth = m.DeviceBirth(online=True, key=b"", profile=text)
    payload = encode_frame(Header(birth.TYPE, "watch", "anna", boot=boot), m.encode_message(birth), anna.signer)
    return await transport.publish("fl/1/watch/d/anna/state", payload, retain=True)


def test_revocation_is_noticed_while_serving(fleet, tmp_path):
    keys, anna, coordinator = served_with_keys(fleet, tmp_path)
    url = coordinator.wait_for("ready")["broker"]

    async def life():
        transport = Mqtt(url, "anna", ("fl/1/watch/co/#",), tls=anna.tls, backoff=(0.1, 0.2))
        await transport.start()
        await speak(transport, anna, b"{}", 1)
        await asyncio.to_thread(coordinator.wait_for, "device-up", device="anna")
        membership.revoke(keys, "anna")
        await asyncio.to_thread(coordinator.wait_for, "quarantined", device="anna")
        await hears(transport, 1)
        await speak(transport, anna, b'{"still": "here"}', 2)
        got = await hears(transport)
        await transport.close()
        return got

    assert asyncio.run(life()) == []
    with pytest.raises(AssertionError, match="no device-up"):
        coordinator.wait_for("device-up", seconds=1, device="anna")
    again = tmp_path / "again"
    anna = enrol(keys, again, "anna")  # new keys, an empty flash: boots count from one again

    async def return_():
        transport = Mqtt(url, "anna", ("fl/1/watch/co/#",), tls=anna.tls, backoff=(0.1, 0.2))
        await asyncio.sleep(1)
        await transport.start()
        await speak(transport, anna, b"{}", 1)
        await asyncio.to_thread(coordinator.wait_for, "device-up", device="anna", boot=1)
        await transport.close()

    asyncio.run(return_())


def test_lists_that_could_not_be_written_are_written_once_they_can(fleet, tmp_path):
    """Whom the operator shut out kept its rights for good where one of the broker's files could not be replaced."""
    keys, anna, coordinator = served_with_keys(fleet, tmp_path, "[api]\nport = 0\n")
    ready = coordinator.wait_for("ready")

    async def comes():
        transport = Mqtt(ready["broker"], "anna", ("fl/1/watch/co/#",), tls=anna.tls)
        await transport.start()
        await speak(transport, anna, b"{}", 1)
        await asyncio.to_thread(coordinator.wait_for, "device-up", device="anna")
        await transport.close()

    asyncio.run(comes())
    rights = keys / "broker" / "acl"
    before = rights.read_text()
    rights.unlink()
    (rights / "in-the-way").mkdir(parents=True)
    httpx.post(f"{ready['api']}/api/v1/fleets/watch/devices/anna/quarantine").raise_for_status()
    coordinator.wait_for("quarantined", device="anna")
    assert str(rights) in coordinator.wait_for("error")["error"]
    shutil.rmtree(rights)
    for _ in range(600):
        if rights.exists():
            break
        time.sleep(0.05)
    assert rights.read_text() != before
    assert "user anna\ntopic deny #\n" in rights.read_text()


# ---- the broker's door


def test_an_unencrypted_link_is_refused(broker):
    plain = broker.url.replace("mqtts://", "mqtt://")
    with pytest.raises(TransportError):
        asyncio.run(Mqtt(plain, "anna", ("fl/1/watch/co/#",), timeout=3.0).start())


def test_tls_without_a_certificate_is_refused(broker, keyed):
    with pytest.raises(TransportError):
        asyncio.run(link(broker, "anna", ("fl/1/watch/co/#",), Tls(keyed / "fleet" / "ca.crt")).start())


def test_a_certificate_of_another_authority_is_refused_by_the_broker(broker, keyed):
    eve = device_tls(keyed, "eve")
    tls = Tls(keyed / "fleet" / "ca.crt", eve.cert, eve.key)
    with pytest.raises(TransportError):
        asyncio.run(link(broker, "anna", ("fl/1/watch/co/#",), tls).start())


def test_a_broker_of_another_authority_is_refused_by_the_device(broker, keyed):
    anna = device_tls(keyed, "anna")
    with pytest.raises(TransportError, match="CERTIFICATE_VERIFY_FAILED"):
        asyncio.run(link(broker, "anna", (), Tls(keyed / "stranger" / "ca.crt", anna.cert, anna.key)).start())


def test_the_broker_must_be_the_host_that_was_asked_for(broker, keyed):
    context = device_tls(keyed, "anna").context()
    port = int(broker.url.rpartition(":")[2])
    with (
        socket.create_connection(("127.0.0.1", port), timeout=5) as raw,
        pytest.raises(ssl.SSLCertVerificationError, match=r"other\.example"),
    ):
        context.wrap_socket(raw, server_hostname="other.example")


def test_old_tls_is_refused(broker, keyed):
    tls = device_tls(keyed, "anna")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(tls.ca)
    context.load_cert_chain(tls.cert, tls.key)
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1"):
        context.minimum_version = ssl.TLSVersion.TLSv1
    with pytest.warns(DeprecationWarning, match="TLSv1"):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    port = int(broker.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=5) as raw, pytest.raises(ssl.SSLError):
        context.wrap_socket(raw, server_hostname="localhost")


# ---- what the broker lets a device say and hear


def test_27_a_device_can_neither_speak_as_another_nor_hear_its_commands(broker, keyed):
    async def trial():
        coordinator = link(
            broker, "co", ("fl/1/watch/d/+/evt", "fl/1/watch/d/+/state"), membership.tls(keyed / "fleet")
        )
        anna = link(broker, "anna", ("fl/1/watch/d/anna/cmd",), device_tls(keyed, "anna"))
        bela = link(broker, "bela", ("fl/1/watch/#",), device_tls(keyed, "bela"))
        for transport in (coordinator, anna, bela):
            await transport.start()
        for topic in ("d/anna/evt", "d/anna/state", "d/bela/evt", "co/state", "co/model", "d/anna/cmd"):
            await bela.publish(f"fl/1/watch/{topic}", f"bela on {topic}".encode())
        await coordinator.publish("fl/1/watch/d/anna/cmd", b"for anna")
        await coordinator.publish("fl/1/watch/d/bela/cmd", b"for bela")
        await coordinator.publish("fl/1/watch/co/model", b"for all")
        found_ = await asyncio.gather(hears(coordinator), hears(anna), hears(bela))
        for transport in (coordinator, anna, bela):
            await transport.close()
        return found_

    heard, of_anna, of_bela = asyncio.run(trial())
    assert heard == [("fl/1/watch/d/bela/evt", b"bela on d/bela/evt")]
    assert of_anna == [("fl/1/watch/d/anna/cmd", b"for anna")]
    assert sorted(of_bela) == [("fl/1/watch/co/model", b"for all"), ("fl/1/watch/d/bela/cmd", b"for bela")]


def test_28_nothing_can_be_planted_on_a_devices_commands(broker, keyed):
    async def trial():
        bela = link(broker, "bela", (), device_tls(keyed, "bela"))
        await bela.start()
        await bela.publish("fl/1/watch/d/anna/cmd", b"planted", retain=True)
        await bela.flush(3)
        anna = link(broker, "anna", ("fl/1/watch/d/anna/cmd",), device_tls(keyed, "anna"))
        await anna.start()
        got = await hears(anna)
        await anna.close()
        await bela.close()
        return got

    assert asyncio.run(trial()) == []


@pytest.mark.parametrize("name", ["anna", "watch.anna", "watch._coordinator"])
def test_29_a_taken_client_id_puts_nobody_out(broker, keyed, name):
    async def trial():
        anna = link(broker, name, ("fl/1/watch/d/anna/cmd",), device_tls(keyed, "anna"))
        await anna.start()
        assert isinstance(await anna.receive(), LinkUp)
        bela = link(broker, name, (), device_tls(keyed, "bela"))
        await bela.start()
        coordinator = link(broker, name, (), membership.tls(keyed / "fleet"))
        await coordinator.start()
        await coordinator.publish("fl/1/watch/d/anna/cmd", b"still there?")
        first = await asyncio.wait_for(anna.receive(), 60)
        for transport in (anna, bela, coordinator):
            await transport.close()
        return first

    first = asyncio.run(trial())
    assert not isinstance(first, LinkDown)
    assert first.payload == b"still there?"


def test_a_revoked_device_is_denied_at_once_and_not_let_in_after_a_restart(keyed, tmp_path):
    keys = tmp_path / "fleet"
    shutil.copytree(keyed / "fleet", keys)
    carl = enrol(keys, tmp_path / "carl", "carl")

    async def trial(running):
        transport = link(running, "carl", ("fl/1/watch/co/#",), carl.tls)
        await transport.start()
        coordinator = link(running, "co", ("fl/1/watch/d/+/evt",), membership.tls(keys))
        await coordinator.start()
        await transport.publish("fl/1/watch/d/carl/evt", b"before")
        before = await hears(coordinator, 1)
        membership.revoke(keys, "carl")
        running.reload()
        await asyncio.sleep(0.5)
        await transport.publish("fl/1/watch/d/carl/evt", b"after")
        await coordinator.publish("fl/1/watch/co/model", b"for members")
        after = await asyncio.gather(hears(coordinator), hears(transport))
        await transport.close()
        await coordinator.close()
        return before, after

    with open_broker("mosquitto", state=tmp_path / "broker", security=keys / "broker") as running:
        before, after = asyncio.run(trial(running))
    assert before == [("fl/1/watch/d/carl/evt", b"before")]
    assert after == [[], []]
    with (
        open_broker("mosquitto", state=tmp_path / "broker", security=keys / "broker") as running,
        pytest.raises(TransportError, match="the fleet may have shut this one out"),
    ):
        asyncio.run(link(running, "carl", ("fl/1/watch/co/#",), carl.tls).start())


# ---- what no broker can do


def test_26_what_a_hostile_broker_says_in_the_coordinators_name_is_refused(fleet, tmp_path):
    """A broker under an attacker's hand delivers all it likes; the device obeys signatures only."""
    made = fleet(devices=("anna",), port=free_port())
    keys = tmp_path / "keys"
    found(keys, "watch", ["localhost"], made.port, 1)
    enrol(keys, tmp_path / "id-anna", "anna")
    model = m.ModelManifest(version=9, size=4, chunk=4, sha256=bytes(32), hashes=bytes(32), nonce=bytes(16))
    forged = encode_frame(Header(model.TYPE, "watch", boot=99), m.encode_message(model), Signer.generate())

    async def hostile(url, agent):
        transport = Mqtt(url, "mallory", ("fl/1/watch/d/+/state",))
        await transport.start()
        got = []
        while not got:
            got = await hears(transport, 1)
        for topic in ("fl/1/watch/co/model", "fl/1/watch/co/state"):
            await transport.publish(topic, forged, retain=True)
        for topic in ("fl/1/watch/co/model", "fl/1/watch/co/state"):
            refused = await asyncio.to_thread(agent.wait_for, "refused", topic=topic)
            assert "not signed by the coordinator's key" in refused["reason"]
        await transport.close()

    with open_broker("mosquitto", state=tmp_path / "open") as running:
        path = made.device_config("anna", running.url)
        path.write_text(path.read_text() + '[identity]\nfolder = "id-anna"\n')
        agent = made._start("edge", "run", path, "--json")
        asyncio.run(hostile(running.url, agent))


# ---- the coordinator's own caution


@pytest.mark.parametrize(
    ("broker", "says"),
    [
        ('url = "mqtt://broker.example:1883"', "without TLS"),
        ('url = "mqtts://broker.example:8883"', "without [identity]"),
        ('url = "auto"\nhost = "0.0.0.0"', "without [identity]"),
    ],
)
def test_beyond_this_machine_plain_and_anonymous_brokers_are_refused(tmp_path, broker, says):
    path = tmp_path / "fleet.toml"
    path.write_text(
        f'[fleet]\nname = "watch"\ndevices = 1\n[broker]\n{broker}\n[run]\nalgorithm = "fedavg"\n'
        '[run.spec]\nname = "imu_cnn"\ninput_shape = [6, 32]\nclasses = 3\n'
    )
    with pytest.raises(ConfigError, match=re.escape(says)) as caught:
        require_safe(load_config(path))
    assert "--insecure" in str(caught.value)
    assert "talaria fleet init" in str(caught.value)


def test_insecure_is_a_choice(fleet, command):
    made = fleet(devices=("anna",))
    text = made.config.read_text().replace("[broker]\n", '[broker]\nhost = "0.0.0.0"\n')
    made.config.write_text(text)
    path = made.folder / "open.toml"
    path.write_text(text)
    status, _, error = command("coordinator", "serve", path)
    assert status == 1
    assert "talaria fleet init" in error
    coordinator = made._start("coordinator", "serve", path, "--insecure", "--json")
    assert json.dumps(coordinator.wait_for("ready"))
