"""A run that names code of another package: learned where the device's owner allows it, else declined by name."""

import asyncio

import pytest
from mypkg.mine import FedHalf

from talaria import algorithms
from talaria.errors import ConfigError
from talaria.tensors import equal
from talaria_edge.config import load_config


def test_a_device_learns_by_a_package_that_its_owner_allows(house, run_all, a_run):
    name, hparams = algorithms.name_of(FedHalf(pull=0.25))
    one = house(a_run(name, rounds=2, hparams=hparams))
    run_all(one.serve(), one.agent("anna", allow=("mypkg",)), one.agent("bela", allow=("other", "mypkg")))
    assert equal(one.shared(), one.simulated().shared)


def test_a_device_declines_what_its_owner_does_not_allow(house, run_all, a_run):
    one = house(a_run("mypkg.mine:FedHalf", rounds=1), quorum=0.5)

    async def until_both_answered():
        work = [one.serve(), one.agent("anna", allow=("mypkg",)), one.agent("bela", allow=("other",))]
        tasks = [asyncio.ensure_future(each) for each in work]
        while not one.of("declined", "bela") or not one.of("trained", "anna"):
            await asyncio.sleep(0.05)
        for _ in range(3):  # as each minute
            one.hub.publish("fl/1/watch/co/state", one.hub.retained["fl/1/watch/co/state"], retain=True)
            await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run_all(until_both_answered(), seconds=120)
    said = one.of("declined", "bela")[0]["reason"]
    assert "algorithm 'mypkg.mine:FedHalf' is of package 'mypkg', which is not allowed" in said
    assert '[code] allow = ["mypkg"] in device.toml' in said
    assert not one.of("trained", "bela")
    (error,) = one.of("error", "bela")  # once, and not with each word of the coordinator; no update would help
    assert error["error"].endswith('[code] allow = ["mypkg"] in device.toml')
    assert len(one.of("coordinator", "anna")) == 1


DEVICE = """
[device]
id = "anna"
[fleet]
name = "watch"
broker = "mqtt://127.0.0.1"
[data]
source = "npz"
path = "anna.npz"
"""


def test_the_setting(tmp_path):
    path = tmp_path / "device.toml"
    path.write_text(DEVICE)
    assert load_config(path).allow == ()
    path.write_text(f'{DEVICE}[code]\nallow = ["mypkg"]\n')
    assert load_config(path).allow == ("mypkg",)
    for line, says in (
        ('allow = ["mypkg.mine"]', "code: allow='mypkg.mine' must be the name of a package"),
        ('allow = "mypkg"', "must be a list of different texts"),
        ('alow = ["mypkg"]', "did you mean 'allow'"),
    ):
        path.write_text(f"{DEVICE}[code]\n{line}\n")
        with pytest.raises(ConfigError, match=says):
            load_config(path)
