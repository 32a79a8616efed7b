"""Beyond this machine the agent speaks only where strangers can neither listen nor pose as its coordinator."""

import asyncio
from dataclasses import replace

import pytest

from talaria.errors import ConfigError, TransportError
from talaria_edge.agents import run_agents
from talaria_edge.config import load_config
from talaria_edge.connection import require_safe

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


def test_insecure_is_a_choice(settings):
    config = replace(settings("mqtt://192.0.2.1:1883"), patience_s=0.001)
    told = []

    def closed(config, will):
        raise TransportError("a closed door")

    found = asyncio.run(run_agents([config], told.append, open_transport=closed, insecure=True))
    assert found["anna"]["error"] == "a closed door"
