"""Beyond this machine the agent speaks only where strangers can neither listen nor pose as its coordinator."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from talaria.errors import ConfigError, TransportError
from talaria_edge.agent.supervisor import run_agents
from talaria_edge.config import load_config
from talaria_edge.data import NpzSource
from talaria_edge.identity.connection import require_safe

DEVICE = """
[device]
id = "anna"
[fleet]
name = "watch"
broker = "%s"
patience_s = 0.01
[data]
source = "npz"
path = "anna.npz"
"""


@pytest.fixture
def settings(tmp_path):
    def write(broker, more=""):
        path = tmp_path / "device.toml"
        path.write_text(DEVICE % broker + more)
        return load_config(path)

    return write


@pytest.mark.parametrize("url", ["mqtt://localhost", "mqtt://127.0.0.1:1883", "ws://[::1]:9001", "mqtts://127.8.8.8"])
def test_on_this_machine_nothing_is_asked_for(settings, url):
    require_safe(settings(url))


@pytest.mark.parametrize(
    ("url", "more", "said"),
    [
        ("mqtt://broker.example", "", "without TLS"),
        ("ws://10.0.0.7/mqtt", "", "without TLS"),
        ("mqtt://localhost.evil.example", '[identity]\nfolder = "keys"\n', "without TLS"),
        ("mqtts://broker.example", "", r"without \[identity\]"),
        ("wss://broker.example/mqtt", "", r"without \[identity\]"),
    ],
)
def test_elsewhere_plain_and_anonymous_brokers_are_refused(settings, url, more, said):
    config = settings(url, more)
    with pytest.raises(ConfigError, match=said) as caught:
        asyncio.run(run_agents([config], lambda event: None))
    assert "--insecure" in str(caught.value)
    assert "talaria edge join" in str(caught.value)
    assert not config.state.exists()


def test_with_keys_and_tls_it_may_go_anywhere(settings):
    require_safe(settings("mqtts://broker.example:8883", '[identity]\nfolder = "keys"\n'))


def test_insecure_is_a_choice(settings, tmp_path):
    np.savez(tmp_path / "anna.npz", x=np.zeros((6, 2, 3)), y=np.arange(6) % 2)
    config = replace(settings("mqtt://192.0.2.1:1883"), patience_s=0.001)
    told = []

    def closed(config, will):
        raise TransportError("a closed door")

    found = asyncio.run(run_agents([config], told.append, open_transport=closed, insecure=True))
    assert found["anna"]["error"] == "a closed door"


def test_what_is_wrong_with_the_data_is_told_at_the_start_and_not_when_a_round_is_asked(settings, tmp_path):
    """Nobody listens at this broker, so no round is ever asked."""
    good, told = settings("mqtt://127.0.0.1:1"), []
    x, y = np.zeros((6, 2, 3), np.float32), np.arange(6) % 2

    def begun(path):
        told.clear()
        config = replace(good, source=NpzSource(path), patience_s=0.001, state=tmp_path / path.stem)
        return asyncio.run(run_agents([config], told.append))["anna"]["error"]

    assert "none.npz is not there; correct [data] path" in begun(tmp_path / "none.npz")
    assert [event["event"] for event in told] == ["failed"]
    np.savez(tmp_path / "odd.npz", x=x, y=np.array(["dance"] * 6), split=np.zeros(6, int))
    assert "label 'dance' is none of this device's" in begun(tmp_path / "odd.npz")
    np.savez(tmp_path / "one.npz", x=x, y=np.zeros(6, int), split=np.zeros(6, int))
    assert "is not there" not in begun(tmp_path / "one.npz")
    assert (told[0]["event"], "train holds only class 0" in told[0]["error"]) == ("data", True)
    np.savez(tmp_path / "good.npz", x=x, y=y, split=np.zeros(6, int))
    begun(tmp_path / "good.npz")
    assert "data" not in [event["event"] for event in told]


@pytest.mark.parametrize(
    ("same", "said"),
    [("device", "device anna"), ("state", "state folder .*own"), ("bundle", "bundle .*me.talaria")],
)
def test_agents_of_one_process_share_no_name_folder_or_bundle(settings, tmp_path, same, said):
    anna = replace(settings("mqtt://127.0.0.1:1"), state=tmp_path / "own", bundle=tmp_path / "me.talaria")
    others = {"device": "bela", "state": tmp_path / "other", "bundle": tmp_path / "you.talaria"}
    bela = replace(anna, **{name: value for name, value in others.items() if name != same})
    with pytest.raises(ConfigError, match=f"{said} is given to more than one agent; give each its own"):
        asyncio.run(run_agents([anna, bela], lambda event: None))
