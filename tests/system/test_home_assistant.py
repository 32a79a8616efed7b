"""A device in Home Assistant, over a real Mosquitto with keys and rights: a subscriber in its place checks what is
published by the rules of its MQTT discovery, installs a bundle and goes back."""

import asyncio
import json
import re
from contextlib import suppress
from dataclasses import replace
from datetime import datetime

import pytest
from keyed import FLEET

from talaria.errors import ConfigError
from talaria.wire.mqtt import Arrival, Mqtt
from talaria_edge import Device, HomeAssistant, load_config
from talaria_edge import home_assistant as ha
from talaria_edge.agent.supervisor import keep_running
from talaria_edge.deployment import gate
from talaria_edge.identity.connection import over_mqtt
from talaria_edge.leave import leave

# Home Assistant's own rules (its integration `mqtt`, schemas.py and the platforms' discovery schemas; texts are long
# names, as we publish them): what a part must have, and what it may have beside.
ENTITY = {"platform", "unique_id", "name", "icon", "entity_category", "qos", "availability_topic"}
PLATFORMS = {
    "sensor": (
        {"state_topic"},
        {"value_template", "expire_after", "unit_of_measurement", "state_class", "device_class",
         "suggested_display_precision"},
    ),
    "update": (set(), {"state_topic", "command_topic", "payload_install", "title", "value_template", "device_class"}),
    "button": ({"command_topic"}, {"payload_press", "device_class"}),
}  # fmt: skip
ROOT = {"device", "origin", "components"}
ROOT_MAY = {"availability_topic", "payload_available", "payload_not_available", "qos", "encoding", "state_topic"}
DEVICE_MAY = {"identifiers", "name", "manufacturer", "model", "sw_version", "hw_version", "serial_number"}
TOPIC = re.compile(r"(?P<component>\w+)/(?:(?P<node_id>[a-zA-Z0-9_-]+)/)?(?P<object_id>[a-zA-Z0-9_-]+)/config")


def require_discovery(topic, prefix, told):
    """AssertionError where Home Assistant would not take this as a device's discovery."""
    assert TOPIC.fullmatch(topic.removeprefix(f"{prefix}/"))["component"] == "device"
    assert ROOT <= told.keys() <= ROOT | ROOT_MAY
    assert told["device"]["identifiers"]
    assert told["device"].keys() <= DEVICE_MAY
    assert "name" in told["origin"]
    assert told["origin"].keys() <= {"name", "sw_version", "support_url"}
    assert told.get("qos", 0) in (0, 1, 2)
    ids = [part["unique_id"] for part in told["components"].values()]
    assert len(set(ids)) == len(ids)
    for part in told["components"].values():
        must, may = PLATFORMS[part["platform"]]
        assert {"platform", "unique_id"} | must <= part.keys() <= ENTITY | must | may
        assert part.get("entity_category", "config") in ("config", "diagnostic")
        assert part["platform"] != "sensor" or part.get("entity_category") != "config"  # refused since 2023
        if part["platform"] == "sensor":
            assert re.fullmatch(r"\{\{ value_json\.\w+ \}\}", part["value_template"])
            assert isinstance(part["expire_after"], int)
            assert ("unit_of_measurement" in part) == ("state_class" in part)
        for name in ("state_topic", "command_topic"):
            assert not set("+#\0") & set(part.get(name, ""))


class Home:
    """What a Home Assistant hears, and the words it gives."""

    def __init__(self, fleet):
        root = f"fl/1/{FLEET}/d"
        topics = ("homeassistant/device/+/+/config", f"{root}/+/ha", f"{root}/+/ha/bundle", f"{root}/+/ha/alive",
                  f"{root}/anna/up/#", f"{root}/+/evt")  # fmt: skip
        self.link = Mqtt(fleet.url, "home-assistant", topics, tls=fleet.own["home-assistant"].tls)
        self.heard = {}

    async def listen(self):
        await self.link.start()
        while True:
            item = await self.link.receive()
            if isinstance(item, Arrival):
                self.heard[item.topic] = item.payload

    async def until(self, kind, good=lambda value: True):
        topic = f"fl/1/{FLEET}/d/anna/{kind}"
        async with asyncio.timeout(20):
            while topic not in self.heard or not good(self.heard[topic]):
                await asyncio.sleep(0.05)
        return self.heard[topic]

    async def bundle(self, **facts):
        return json.loads(await self.until("ha/bundle", lambda told: facts.items() <= json.loads(told).items()))


def test_a_device_appears_installs_and_goes_back(keyed):
    fleet = keyed(1, members=("anna",), others=("home-assistant",), stay=True)
    config = replace(
        fleet.device("anna"), bundle=fleet.folder / "anna.talaria", variants=("fp32",), stay=True,
        home_assistant=HomeAssistant(name="Anna's watch", ask=True),
    )  # fmt: skip
    config.state.mkdir(parents=True)
    old = gate.deploy(config.state, b"old", config.bundle)
    told = []

    async def scenario():
        home = Home(fleet)
        listening = asyncio.ensure_future(home.listen())
        agent = asyncio.ensure_future(keep_running(config, told.append, fleet.worker, over_mqtt))
        try:
            await home.until("ha/alive", lambda word: word == b"online")
            topic = ha.config_topic(config.home_assistant, FLEET, "anna")
            require_discovery(topic, "homeassistant", json.loads(home.heard[topic]))
            before = old.current[:12]
            offered = await home.bundle(installed_version=before)
            while offered["latest_version"] == before:
                await asyncio.sleep(0.05)
                offered = await home.bundle(installed_version=before)
            assert config.bundle.read_bytes() == b"old"  # it was asked for, and nobody answered yet
            assert "better" in offered["release_summary"] or "accuracy" in offered["release_summary"]
            shown = json.loads(await home.until("ha", lambda told: json.loads(told)["after"] is not None))
            assert 0 <= shown["after"] <= 100
            assert shown["kept"] == 100
            assert datetime.fromisoformat(shown["trained"]).tzinfo is not None
            set_topic = ha.command_topic(FLEET, "anna")
            await home.link.publish(set_topic, b"format the disk")
            await home.link.publish(set_topic, b"install")
            await home.bundle(installed_version=offered["latest_version"], latest_version=offered["latest_version"])
            assert config.bundle.read_bytes() != b"old"
            await home.link.publish(set_topic, b"install")  # nothing waits any more
            await home.link.publish(set_topic, b"rollback")
            await home.bundle(installed_version=before)
            assert config.bundle.read_bytes() == b"old"
            assert {"installed", "rolled-back"} <= {event["event"] for event in told}
            assert any("no bundle waits" in event.get("error", "") for event in told)
            assert {topic.split("/")[-1] for topic in home.heard} == {"config", "ha", "bundle", "alive"}
            agent.cancel()
            await home.until("ha/alive", lambda word: word == b"offline")
            with suppress(asyncio.CancelledError):
                await agent
            await asyncio.to_thread(leave, config)  # for good: Home Assistant forgets it
            await home.until("ha/alive", lambda word: word == b"")
            assert home.heard[topic] == b""
            assert fleet.of("left")[0]["device"] == "anna"
        finally:
            agent.cancel()
            listening.cancel()
            await asyncio.gather(agent, listening, return_exceptions=True)
            await home.link.close()

    async def whole():
        serving = asyncio.ensure_future(fleet.serve())
        try:
            await fleet.told_of("ready")
            await scenario()
        finally:
            serving.cancel()
            with suppress(asyncio.CancelledError):
                await serving

    asyncio.run(asyncio.wait_for(whole(), 120))


def test_what_is_shown_follows_the_agents_events():
    shown = ha.after(ha.Shown(), {"event": "waiting", "reason": "not charging"})
    assert shown.to_json()["waiting"] == "not charging"
    shown = ha.after(ha.after(shown, {"event": "training"}), {"event": "trained", "at": 1.0})
    assert (shown.waiting, shown.trained) == (None, "1970-01-01T00:00:01+00:00")
    shown = ha.after(
        shown, {"event": "done", "at": 2.0, "accuracy": {"new": 0.9, "in_force": None}, "channels_kept": 0.5}
    )
    assert (shown.before, shown.after, shown.kept) == (None, 90.0, 50.0)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('prefix = "home/+"', "prefix='home/[+]' must be 1 to 40 letters"),
        ('name = "a\\u0007"', "name=.* printable"),
        ("ask = 1", "ask=1 must be true or false"),
        ('nme = "a"', "nme='a' is unknown; did you mean 'name'"),
    ],
)
def test_settings(tmp_path, line, says):
    path = tmp_path / "device.toml"
    head = '[device]\nid = "a"\n[fleet]\nname = "watch"\nbroker = "mqtt://127.0.0.1"\n[data]\nsource = "smartwatch"\n'
    path.write_text(head)
    assert load_config(path).home_assistant is None
    path.write_text(f"{head}[home_assistant]\n")
    assert load_config(path).home_assistant == HomeAssistant()
    path.write_text(f"{head}[home_assistant]\n{line}\n")
    with pytest.raises(ConfigError, match=says):
        load_config(path)


def test_a_program_shows_its_device_too():
    given = {"fleet": "watch", "data": lambda: None, "id": "a"}
    assert Device("mqtt://127.0.0.1", **given, home_assistant=HomeAssistant(ask=True)).config.home_assistant.ask
    with pytest.raises(ConfigError, match=r"home_assistant=True must be a talaria_edge.HomeAssistant"):
        Device("mqtt://127.0.0.1", **given, home_assistant=True)
