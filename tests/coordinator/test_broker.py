"""Brokers that really start: Mosquitto as a child, amqtt in process, and what is said when they cannot."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from talaria.errors import ConfigError, TransportError
from talaria.wire.chunks import CHUNK
from talaria_coordinator import broker
from talaria_coordinator.broker import find_mosquitto, mosquitto, open_broker, supervisor
from talaria_coordinator.config.api import ApiConfig
from talaria_coordinator.web.server import listening

CONNECT = b"\x10\x0d\x00\x04MQTT\x04\x02\x00\x3c\x00\x01t"
CONNACK = b"\x20\x02\x00\x00"


def speaks_mqtt(url):
    place = urlsplit(url)
    with socket.create_connection((place.hostname, place.port), timeout=5) as link:
        link.sendall(CONNECT)
        link.settimeout(5)
        answer = link.recv(4)
        link.sendall(b"\xe0\x00")
    return answer == CONNACK


def has_ipv6():
    with suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().split(")")[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # gone before, or while it was read
        return False


def gone(pid, seconds=10):
    end = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not alive(pid)


@pytest.mark.parametrize("kind", ["mosquitto", "amqtt"])
def test_it_answers_and_leaves(kind, tmp_path):
    with open_broker(kind, state=tmp_path / "broker") as found:
        assert found.kind == kind
        assert found.url.startswith("mqtt://127.0.0.1:")
        assert speaks_mqtt(found.url)
    with pytest.raises(OSError, match="refused"):
        speaks_mqtt(found.url)
    if found.pid:
        assert gone(found.pid)


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("kind", ["mosquitto", "amqtt"])
def test_it_answers_at_an_address_of_ipv6(kind, tmp_path):
    with open_broker(kind, host="::1", state=tmp_path / "broker") as found:
        assert found.url.startswith("mqtt://[::1]:")
        assert speaks_mqtt(found.url)
        with pytest.raises(TransportError, match=r"\[::1\]:\d+ cannot be opened.*url = 'mqtt://\[::1\]:\d+'"):
            open_broker("amqtt", host="::1", port=urlsplit(found.url).port).__enter__()


@pytest.mark.parametrize(("host", "line"), [("::1", "listener 99 ::1"), ("::", "listener 99"), ("0.0.0.0", None)])
def test_mosquitto_listens_on_all_addresses_of_both_kinds_or_on_the_one_named(host, line, tmp_path):
    assert mosquitto.config(host, 99, tmp_path).splitlines()[0] == (line or f"listener 99 {host}")


def test_amqtt_that_does_not_start_is_told(monkeypatch):
    monkeypatch.setattr(broker, "_require_port", lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(TransportError, match="amqtt did not start"):
        open_broker("amqtt", port=taken.getsockname()[1]).__enter__()


def test_auto_prefers_mosquitto_and_does_without(monkeypatch):
    with open_broker() as found:
        assert found.kind == "mosquitto"
    monkeypatch.setattr(broker, "find_mosquitto", lambda: None)
    with open_broker() as found:
        assert found.kind == "amqtt"
    with pytest.raises(TransportError, match="apt install mosquitto"), open_broker("mosquitto"):
        pass


def test_mosquitto_reads_its_settings_under_any_umask():
    """Started by root it runs as a user of its own where that may enter its folder."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        state = Path(name) / "state ü"
        state.mkdir(0o755)
        before = os.umask(0o077)
        try:
            with open_broker("mosquitto", state=state) as found:
                assert speaks_mqtt(found.url)
        finally:
            os.umask(before)


def test_a_folder_whose_name_is_no_text_is_told_by_mosquitto(tmp_path, caplog):
    caplog.set_level("ERROR")  # which has the name, and goes to those who run tests beside each other as text
    state = tmp_path / os.fsdecode(b"state \xff")
    with pytest.raises(TransportError, match="mend what it names"), open_broker("mosquitto", state=state):
        pass


def test_a_url_is_taken_as_it_is():
    with open_broker("mqtts://broker.example:8883") as found:
        assert (found.url, found.kind, found.pid) == ("mqtts://broker.example:8883", "url", None)


@pytest.mark.parametrize("bad", ["http://x:1", "mqtt://", "mqtt://host:99999", "mqtt://host:0", "mqtt://[::1"])
def test_bad_urls(bad):
    with pytest.raises(ConfigError, match="mqtt://host:1883"), open_broker(bad):
        pass


def test_unknown_choice_and_port():
    with pytest.raises(ConfigError, match="'rabbit' is unknown"), open_broker("rabbit"):
        pass
    with pytest.raises(ConfigError, match="port=70000"), open_broker("auto", port=70000):
        pass


@pytest.mark.parametrize("kind", ["mosquitto", "amqtt"])
def test_port_taken(kind, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with (
            pytest.raises(TransportError, match=rf"127.0.0.1:{port} cannot be opened .*ss -ltnp.*port = 0"),
            open_broker(kind, port=port, state=tmp_path),
        ):
            pass


def test_an_address_of_another_machine_is_told_as_that(tmp_path):
    for host, port in (("203.0.113.7", 1883), ("no.such.host.invalid", 0)):  # of no machine, by RFC 5737 and 2606
        with pytest.raises(TransportError, match=r"cannot be opened .* \[broker\] host must be an address of this"):
            open_broker("mosquitto", host=host, port=port, state=tmp_path).__enter__()
        with pytest.raises(ConfigError, match=r"cannot listen on .* \[api\] host must be an address of this machine"):
            listening(ApiConfig(host=host)).__enter__()


def test_the_free_port_is_kept_over_restarts(tmp_path):
    urls = []
    for _ in range(2):
        with open_broker("mosquitto", state=tmp_path) as found:
            urls.append(found.url)
    assert urls[0] == urls[1]


def test_a_binary_that_cannot_start_is_told_with_its_log(tmp_path, monkeypatch):
    fake = tmp_path / "mosquitto"
    fake.write_text("#!/bin/sh\necho 'Error: the moon is full' >&2\nexit 3\n")
    fake.chmod(0o755)
    monkeypatch.setattr(broker, "find_mosquitto", lambda: fake)
    with pytest.raises(TransportError, match=r"did not start.*the moon is full.*amqtt"), open_broker("mosquitto"):
        pass


@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_mosquitto_leaves_with_a_killed_parent_and_keeps_what_was_retained(mode):
    # Below a folder that others may enter, root's Mosquitto runs under an account of its own.
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, mode)
        leaves_with_its_parent(Path(name) / "broker")


def leaves_with_its_parent(tmp_path):
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom talaria_coordinator.broker import open_broker\n"
        "with open_broker('mosquitto', state=Path(sys.argv[1])) as b:\n"
        "    print(b.pid, b.url, flush=True)\n    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid, url = parent.stdout.readline().split()
        publish(url, "a/b", b"kept")
        os.kill(parent.pid, signal.SIGKILL)
    assert gone(int(pid))
    with open_broker("mosquitto", state=tmp_path) as found:
        assert found.url == url
        assert retained(found.url, "a/b") == b"kept"


def test_a_killed_mosquitto_is_started_again_where_it_was(tmp_path):
    with open_broker("mosquitto", state=tmp_path) as found:
        first = found.pid
        os.kill(first, signal.SIGKILL)
        end = time.monotonic() + 10
        while (found.pid == first or not answers(found.url)) and time.monotonic() < end:
            time.sleep(0.05)
        second = found.pid
        assert second != first
        assert speaks_mqtt(found.url)
    assert gone(second)


def test_the_log_of_a_managed_mosquitto_has_a_bound(tmp_path, monkeypatch):
    """Each link adds some lines to it, of strangers too: it grew until the disk was full."""
    monkeypatch.setattr(supervisor, "LARGEST", 4000)
    with open_broker("mosquitto", state=tmp_path) as found:
        for turn in range(3):
            while found.log.stat().st_size < 4000:
                assert speaks_mqtt(found.url)
            assert found.tend(False) == []
            before = tmp_path / "mosquitto.log.1"
            assert found.log.stat().st_size < 1000, turn
            assert 4000 <= before.stat().st_size < 8000, turn
        assert speaks_mqtt(found.url)
        assert b"\0" not in found.log.read_bytes()
        assert found.log.stat().st_size > 0


def test_a_client_that_leaves_with_a_message_on_its_way_does_not_cost_what_the_broker_kept(tmp_path):
    """Mosquitto before 2.0.22 calls that out of memory, and the next time that it ended it was made to forget."""
    with open_broker("mosquitto", state=tmp_path) as found:
        publish(found.url, "a/b", b"kept")
        host, port = found.url.removeprefix("mqtt://").split(":")
        connect = b"\x10\x0e\x00\x04MQTT\x05\x02\x00\x3c\x00\x00\x01t"
        for _ in range(10):
            with socket.create_connection((host, int(port)), timeout=5) as link:
                link.sendall(connect + b"\x82\x09\x00\x01\x00\x00\x03a/b\x01")
                heard = b""
                while b"kept" not in heard:
                    heard += link.recv(64)
                link.sendall(b"\x32\x0a\x00\x03a/b\x00\x07\x00xx\xe0\x00")  # says one more, and is gone
        first = found.pid
        os.kill(first, signal.SIGTERM)
        end = time.monotonic() + 10
        while (found.pid == first or not answers(found.url)) and time.monotonic() < end:
            time.sleep(0.05)
        assert retained(found.url, "a/b") == b"kept"
        assert "is started again" in " ".join(found.tend(False))


def answers(url):
    try:
        return speaks_mqtt(url)
    except OSError:
        return False


def publish(url, topic, payload):
    import paho.mqtt.client as mqtt

    host, port = url.removeprefix("mqtt://").split(":")
    client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2, client_id="p")
    client.connect(host, int(port))
    client.loop_start()
    client.publish(topic, payload, qos=1, retain=True).wait_for_publish(5)
    client.disconnect()
    client.loop_stop()


def retained(url, topic):
    import threading

    import paho.mqtt.client as mqtt

    host, port = url.removeprefix("mqtt://").split(":")
    client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2, client_id="s")
    got, payload = threading.Event(), []
    client.on_message = lambda _c, _u, message: (payload.append(message.payload), got.set())
    client.connect(host, int(port))
    client.subscribe(topic, 1)
    client.loop_start()
    got.wait(5)
    client.disconnect()
    client.loop_stop()
    return payload[0] if payload else None


def test_the_binary_is_found_outside_the_path(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    assert find_mosquitto() is not None


def test_a_mosquitto_whose_file_is_damaged_begins_without_it(tmp_path):
    """It would not start again, and with it no coordinator; all that it kept is told anew."""
    with open_broker("mosquitto", state=tmp_path) as found:
        publish(found.url, "a/b", b"kept")
    kept = tmp_path / "persistence" / "mosquitto.db"
    kept.write_bytes(os.urandom(300))
    with open_broker("mosquitto", state=tmp_path) as found:
        assert speaks_mqtt(found.url)
        assert "did not start with what it kept" in " ".join(found.tend(False))
    assert kept.with_name("mosquitto.db.old").stat().st_size == 300


def test_the_memory_of_a_managed_mosquitto_follows_the_devices_expected(tmp_path):
    limits = []
    for devices in (1, 9):
        with open_broker("mosquitto", state=tmp_path / str(devices), devices=devices):
            text = (tmp_path / str(devices) / "mosquitto.conf").read_text()
            limits.append(int(text.split("memory_limit ")[1].split()[0]))
    assert limits[1] - limits[0] == 8 * mosquitto.IN_FLIGHT * (CHUNK + mosquitto.BESIDE)
