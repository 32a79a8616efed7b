"""Several fleets in one coordinator process, over one broker: each learns its own, and a failing one harms nobody."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from talaria import tensors
from talaria.errors import ConfigError, StateError
from talaria.federated import global_model
from talaria.federated.run import Member
from talaria.simulation.run import simulate
from talaria.types import Samples
from talaria_coordinator.broker.mosquitto import BESIDE, memory
from talaria_coordinator.config.fleet import FleetConfig
from talaria_coordinator.config.store import StoreConfig
from talaria_coordinator.server.open_state import held
from talaria_coordinator.server.server import configs_in, require_apart, serve_all
from talaria_coordinator.storage.blobs import FolderBlobs
from talaria_coordinator.storage.store import Store
from talaria_edge.agent.agent import Agent
from talaria_edge.config import DeviceConfig
from talaria_edge.data import DeviceData, Given


def data_of(seed):
    y = torch.arange(18) % 3
    x = torch.randn(18, 6, 32, generator=torch.Generator().manual_seed(seed)) + y[:, None, None]
    return DeviceData(Samples.of(x[:12], y[:12]), Samples.of(x[12:], y[12:]))


DATA = {name: data_of(i) for i, name in enumerate(("anna", "bela"))}


def config_of(folder, name, run):
    return FleetConfig(
        name=name, run=run, state=folder / name, members=tuple(DATA), broker="mosquitto", stay=False, retry_s=0.3
    )


def test_two_fleets_share_a_broker_and_a_third_fails_alone(tmp_path, a_run):
    runs = {"watch": a_run("fedavg", rounds=2), "phone": replace(a_run("fedper", rounds=2), seed=9)}
    configs = [config_of(tmp_path, name, run) for name, run in runs.items()]
    taken = config_of(tmp_path, "taken", runs["watch"])
    told, worker = [], ThreadPoolExecutor(1)

    def agent(fleet, name, url):
        config = DeviceConfig(
            device=name, fleet=fleet, broker=url, state=tmp_path / f"{fleet}-{name}", retry_s=0.3,
            source=Given(lambda: DATA[name]),
        )  # fmt: skip
        return Agent(config, worker=worker).run()

    async def story():
        serving = asyncio.ensure_future(serve_all([taken, *configs], told.append))
        while sum(item["event"] == "ready" for item in told) < 2:
            await asyncio.sleep(0.05)
        urls = {item["broker"] for item in told if item["event"] == "ready"}
        assert len(urls) == 1, "both speak over one broker"
        async with asyncio.timeout(240):
            await asyncio.gather(*(agent(fleet, name, *urls) for fleet in runs for name in DATA))
            with pytest.raises(StateError, match="in use by another coordinator"):
                await serving

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with held(taken.state):
            asyncio.run(story())
        assert [(i["fleet"], "in use" in i["error"]) for i in told if i["event"] == "failed"] == [("taken", True)]
        assert {i["fleet"] for i in told if i["event"] == "stopped"} == set(runs)
        for config in configs:
            store = Store(config.database)
            model = FolderBlobs(config.state / "blobs").get(store.fleets.get(config.name).model_digest)
            store.close()
            simulated = simulate(config.run, {n: Member(n, d.train, d.val) for n, d in DATA.items()})
            assert tensors.equal(global_model.decode_model(config.run, model), simulated.shared)
    finally:
        torch.set_num_threads(before)
        worker.shutdown()


def test_a_broker_that_fleets_share_has_room_for_all_of_them(tmp_path, a_run):
    """It had that of whichever began first, and disconnected the devices of another."""
    small = config_of(tmp_path, "watch", a_run(rounds=2))
    large = replace(small, name="phone", state=tmp_path / "phone", members=(), devices=200, chunk=1 << 20)

    async def story():
        serving = asyncio.ensure_future(serve_all([small, large], told.append))
        while sum(item["event"] == "ready" for item in told) < 2:
            await asyncio.sleep(0.05)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    told = []
    asyncio.run(asyncio.wait_for(story(), 100))
    (file,) = tmp_path.glob("*/broker/mosquitto.conf")
    lines = file.read_text().splitlines()
    assert f"max_packet_size {large.chunk + BESIDE}" in lines
    assert f"memory_limit {memory(202, large.chunk)}" in lines


def test_fleets_in_each_others_way_are_refused(tmp_path, a_run):
    one = config_of(tmp_path, "watch", a_run())
    for other, says in (
        (replace(one, state=tmp_path / "b"), r"\[fleet\] name = watch"),
        (replace(one, name="phone"), r"\[fleet\] state = "),
    ):
        with pytest.raises(ConfigError, match=says):
            require_apart([one, other])
    with pytest.raises(ConfigError, match="no fleet is given"):
        require_apart([])
    require_apart([one, config_of(tmp_path, "phone", a_run())])


def test_fleets_of_one_database_have_their_blobs_in_one_place(tmp_path, a_run):
    """Each learned, and no backup could be made of any."""
    one = config_of(tmp_path, "watch", a_run())
    store = Store(tmp_path / "watch" / "coordinator.db", make=True)
    store.fleets.enter("phone", "{}", "a" * 64, "b" * 64)
    store.close()
    with pytest.raises(StateError, match=r"has fleet 'phone' too, .* one place as \[store\] blobs"):
        asyncio.run(serve_all([one], lambda event: None))
    apart = [
        replace(config_of(tmp_path, name, a_run()), store=StoreConfig(database="postgresql+psycopg://t@localhost/t"))
        for name in ("watch", "phone")
    ]
    with pytest.raises(ConfigError, match="blobs in one place"):
        require_apart(apart)
    require_apart([replace(one, store=replace(one.store, blobs="file:///srv/blobs")) for one in apart])


def test_folders_are_looked_into(tmp_path):
    for name in ("b.toml", "a.toml", "made/fleet.toml", "made/other.toml", "apart/x.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    inside = [p.relative_to(tmp_path).as_posix() for p in configs_in([tmp_path])]
    assert inside == ["a.toml", "b.toml", "made/fleet.toml"]
    assert configs_in([tmp_path / "made", tmp_path / "b.toml"]) == [tmp_path / "made/fleet.toml", tmp_path / "b.toml"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="empty holds neither"):
        configs_in([tmp_path / "empty"])
