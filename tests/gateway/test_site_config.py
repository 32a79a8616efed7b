"""Wrong settings of a gateway are refused in words that name field, value and mend."""

from dataclasses import replace

import pytest

from talaria.errors import ConfigError, DataError
from talaria.federated.run import Run
from talaria.model.spec import ModelSpec
from talaria_gateway.config import load_config
from talaria_gateway.program import Runs

GOOD = """
[fleet]
name = "garden"
members = ["carl", "dora"]
[broker]
url = "mosquitto"
[rounds]
deadline_s = 300
quorum = 1.0
[upstream.device]
id = "site"
[upstream.fleet]
name = "watch"
broker = "mqtts://fleet.example:8883"
[upstream.identity]
folder = "keys"
"""
RUN = Run(spec=ModelSpec("imu_cnn", (6, 32), 3), algorithm="fedper", rounds=4, seed=7)


def load(folder, text):
    path = folder / "site.toml"
    path.write_text(text)
    return load_config(path)


def test_one_file_has_the_site_and_its_place_above(tmp_path):
    found = load(tmp_path, GOOD)
    above, site = found.upstream, found.site(RUN)
    assert (above.device, above.fleet, above.broker) == ("site", "watch", "mqtts://fleet.example:8883")
    assert (above.identity, above.state) == (tmp_path / "keys", tmp_path / "state" / "site")
    assert (site.name, site.members, site.deadline_s, site.run) == ("garden", ("carl", "dora"), 300, RUN)
    with pytest.raises(DataError, match="a gateway has no samples"):
        above.source.load()


def test_a_gateway_that_serves_its_site_on_listens_above_too(tmp_path):
    """Else it would live on, and never hear that the run above goes on for longer."""
    assert load(tmp_path, GOOD).upstream.stay
    ends = GOOD.replace('name = "garden"', 'name = "garden"\nstay = false')
    assert not load(tmp_path, ends).upstream.stay
    assert load(tmp_path, ends.replace('id = "site"', 'id = "site"\nstay = true')).upstream.stay
    assert not load(tmp_path, GOOD.replace('id = "site"', 'id = "site"\nstay = false')).upstream.stay


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("[fleet]\n", '[run]\nalgorithm = "fedavg"\n[fleet]\n', "run={'algorithm': 'fedavg'} .* from the fleet above"),
        ("[broker]", "[gateways]\nx = 2\n[broker]", r"gateways=.* stand at its gateway; leave it out"),
        ("[broker]", "[canary]\nshare = 0.2\n[broker]", r"canary=.* tried by the fleet above"),
        ("[broker]", "[privacy]\nsecure = true\n[broker]", r"privacy=.* updates that the gateway sees"),
        ("[broker]", "[ingest]\nworkers = 2\n[broker]", r"ingest=.* takes up all updates itself"),
        ("quorum = 1.0", 'aggregator = "median"', r"aggregator='median' is for the fleet above to say"),
        ("quorum = 1.0", 'mode = "asynchronous"', r"mode='asynchronous' is for the fleet above to say"),
        ("quorum = 1.0", "quorum = 2.0", r"\[rounds\] quorum=2.0 must be"),
        ("quorum = 1.0", "qourum = 1.0", r"qourum=1.0 is unknown; did you mean 'quorum'"),
        ('id = "site"', 'id = "Site A"', r"device: id='Site A'"),
        ('id = "site"', 'name = "site"', r"\[upstream.device\] id is missing"),
        ('id = "site"', 'id = "site"\nbundle = "x.talaria"', r"\[upstream\] bundle is for a device that learns"),
        ("[upstream.fleet]", "[upstream.guard]\nmin_battery = 0.5\n[upstream.fleet]", r"\[upstream\] guard is for a"),
        (
            "[upstream.fleet]",
            '[upstream.data]\nsource = "npz"\n[upstream.fleet]',
            r"\[upstream.data\] source='npz' is",
        ),
        ("[upstream.identity]", "[upstream.identy]", r"\[upstream\] identy=.* did you mean 'identity'"),
    ],
)
def test_what_a_gateway_cannot_be_is_refused(tmp_path, old, new, words):
    assert GOOD.count(old) == 1
    with pytest.raises(ConfigError, match=words):
        load(tmp_path, GOOD.replace(old, new))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"fraction": 0.5}, "fraction=0.5 draws among members"),
        ({"asynchronous": True}, "an asynchronous run weighs each update"),
        ({"algorithm": "pfedgm"}, "looks at each update by itself"),
    ],
)
def test_a_run_that_partial_sums_do_not_serve_is_refused(tmp_path, changed, words):
    with pytest.raises(ConfigError, match=words):
        load(tmp_path, GOOD).site(replace(RUN, **changed))


def test_a_gateway_keeps_to_the_run_that_it_began_with_however_long_that_becomes(tmp_path):
    config = load(tmp_path, GOOD)
    with pytest.raises(ConfigError, match=r"fraction=0\.5"):
        Runs(config).heard(replace(RUN, fraction=0.5))
    assert Runs(config).run is None, "what no site can learn is not kept"
    Runs(config).heard(RUN)
    Runs(config).heard(replace(RUN, rounds=9))
    assert Runs(config).run == replace(RUN, rounds=9)
    with pytest.raises(ConfigError, match="another run than this site began with"):
        Runs(config).heard(replace(RUN, seed=8))
