"""fleet.toml, and who is asked to take part."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from talaria.errors import ConfigError
from talaria.federated import rounds
from talaria.federated.fedbuff_run import Buffering
from talaria.federated.run import Run
from talaria.model.spec import ModelSpec
from talaria.privacy.rule import Privacy
from talaria.simulation.experiment import prepare
from talaria.types import Recipe
from talaria_coordinator.cli.template import found
from talaria_coordinator.config.fleet import FleetConfig, load_config
from talaria_coordinator.config.privacy import PrivacyConfig
from talaria_coordinator.fleet import cohort
from talaria_coordinator.storage.records import Device

GOOD = """
[fleet]
name = "watch"
devices = 4
[run]
algorithm = "fedavg"
rounds = 2
[run.spec]
name = "imu_cnn"
input_shape = [6, 100]
classes = 7
"""


def written(tmp_path, text):
    path = tmp_path / "fleet.toml"
    path.write_text(text)
    return path


def test_defaults(tmp_path):
    config = load_config(written(tmp_path, GOOD))
    assert config.state == tmp_path / "state"
    assert config.broker == "auto"
    assert config.run == Run(spec=ModelSpec("imu_cnn", (6, 100), 7), algorithm="fedavg", rounds=2)
    assert config.stay


def test_a_fleet_and_a_simulation_that_leave_the_same_unsaid_are_the_same_run(tmp_path):
    draw = np.random.default_rng(0)
    path = tmp_path / "mine.npz"
    np.savez(path, x=draw.normal(size=(60, 6, 32)), y=np.arange(60) % 3, client=np.arange(60) // 20)
    own = prepare("fedprox", f"npz:{path}", rounds=3, seed=5, recipe={"lr": 0.1})
    toml = '[run]\nalgorithm = "fedprox"\nrounds = 3\nseed = 5\n[run.spec]\nname = "imu_cnn"\ninput_shape = [6, 32]\n'
    toml += "classes = 3\n[run.recipe]\nlr = 0.1\n"
    watch = prepare("hermes", "smartwatch", rounds=3, options={"block": 16})
    named = '[run]\nalgorithm = "hermes"\nrounds = 3\ndefaults = "smartwatch"\n[run.hparams]\nblock = 16\n'
    for asked, text in ((own, toml), (watch, named)):
        fleet = load_config(written(tmp_path, '[fleet]\nname = "w"\ndevices = 3\n' + text)).run
        assert fleet.to_json() == asked.run.to_json()
    python = Run(spec=ModelSpec("imu_cnn", (6, 32), 3, seed=5), algorithm="fedprox", recipe=Recipe(lr=0.1), rounds=3)
    assert load_config(written(tmp_path, '[fleet]\nname = "w"\ndevices = 3\n' + toml)).run == replace(python, seed=5)


def test_a_fleet_that_init_writes_trains_as_one_that_says_nothing(tmp_path):
    found(tmp_path / "fleet", "watch", ["127.0.0.1"], 8883, 4)
    assert load_config(tmp_path / "fleet" / "fleet.toml").run.recipe == Recipe()


@pytest.mark.parametrize("field", ["rounds", "seed", "fraction", "codec", "buffers", "algorithm", "defaults"])
@pytest.mark.parametrize(
    "value", ["nan", "2.5", "true", '"garbage"', "-1", "[]", "{}", "1e400", "9" * 30, "1979-05-27"]
)
def test_a_run_that_no_device_could_learn_is_never_served(tmp_path, field, value):
    text = GOOD.replace('algorithm = "fedavg"\nrounds = 2', f"{field} = {value}")
    text += "" if field == "algorithm" else "[run.hparams]\n"
    text = text if field == "algorithm" else text.replace("[run]", '[run]\nalgorithm = "fedavg"')
    with pytest.raises(ConfigError, match=field) as refused:
        load_config(written(tmp_path, text))
    assert len(str(refused.value)) < 600


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ("recipe", 'lr = "fast"'),
        ("recipe", "lr = nan"),
        ("recipe", "lr = inf"),
        ("recipe", "epochs = 1.5"),
        ("recipe", "batch = true"),
        ("recipe", "momentum = 1"),
        ("recipe", 'augment = "garbage"'),
        ("recipe", "rate = 0.1"),
        ("spec", 'name = "garbage"\ninput_shape = [6, 100]\nclasses = 7'),
        ("spec", 'name = "mlp"\ninput_shape = "6x100"\nclasses = 7'),
        ("hparams", "mu = nan"),
        ("hparams", 'mu = "much"'),
        ("hparams", "mu = [1]"),
    ],
)
def test_every_table_of_a_run_is_checked_when_it_is_read(tmp_path, table, text):
    base = GOOD.replace('"fedavg"', '"fedprox"')
    if table == "spec":
        base = base[: base.index("[run.spec]")]
    with pytest.raises(ConfigError, match=r"fleet.toml: \[run\] "):
        load_config(written(tmp_path, f"{base}[run.{table}]\n{text}\n"))


def test_all_fields(tmp_path):
    text = GOOD.replace("devices = 4", 'members = ["b", "a", "c"]\nstate = "/srv/fleet"\nstay = false')
    text += '[run.recipe]\nlr = 0.01\n[broker]\nurl = "mqtt://h:1"\n[rounds]\ndeadline_s = 0\nquorum = 1\nretry_s = 1\n'
    config = load_config(written(tmp_path, text + 'aggregator = "median"\nmax_update = 2048\n'))
    assert config.members == ("b", "a", "c")
    assert (config.deadline_s, config.quorum, config.aggregator, config.max_update) == (0, 1, "median", 2048)
    assert config.run.recipe.lr == 0.01


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('name = "watch"', "", r"\[fleet\] name is missing"),
        ('name = "watch"', 'name = "Watch"', "name='Watch' must be 1 to 36"),
        ("devices = 4", "", "devices=0 must be at least 1"),
        ("devices = 4", "devices = -1", r"devices=-1 must be a whole number"),
        ("devices = 4", 'members = ["a", "a"]', "must be a list of different texts"),
        ("devices = 4", 'members = ["A"]', "member 'A' must be"),
        ("devices = 4", "devices = 4\nquorum = 1", "quorum=1 is unknown"),
        ('"fedavg"', '"fedprox2"', "fedprox2"),
        ('algorithm = "fedavg"', "", r"\[run\] algorithm is missing"),
        ("rounds = 2", "rounds = 0", "rounds=0 must be at least 1"),
        ("rounds = 2", "round = 2", r"\[run\] round=2 is unknown; did you mean 'rounds'"),
        ("classes = 7", "classes = 7\n[rounds]\nquorum = 2", "quorum=2 must be a number in 0..1"),
        ("classes = 7", "classes = 7\n[rounds]\nquorum = 0", "quorum=0.0 must be a share"),
        ("classes = 7", "classes = 7\n[broker]\nport = 70000", "port=70000 must be a whole number in 0..65535"),
        ("classes = 7", "classes = 7\n[run.hparams]\nmu = 3", "mu"),
    ],
)
def test_bad_fields(tmp_path, old, new, message):
    with pytest.raises(ConfigError, match=message):
        load_config(written(tmp_path, GOOD.replace(old, new)))


ASYNC = 'classes = 7\n[rounds]\nmode = "asynchronous"\nbuffer = 2\n'


def test_an_asynchronous_fleet(tmp_path):
    text = GOOD.replace("classes = 7", ASYNC + 'max_staleness = 5\ndamping = 0.3\naggregator = "mean"\n')
    made = load_config(written(tmp_path, text))
    assert made.buffering == Buffering(buffer=2, max_staleness=5, damping=0.3)
    assert made.run.asynchronous
    assert not load_config(written(tmp_path, GOOD)).run.asynchronous


@pytest.mark.parametrize(
    ("new", "message"),
    [
        (ASYNC + "quorum = 0.5", r'quorum=0.5 needs mode = "synchronous"'),
        (ASYNC + "over = 0.2", r'over=0.2 needs mode = "synchronous"'),
        (ASYNC + "deadline_s = 0", "deadline_s=0 never asks those again"),
        (ASYNC + "max_staleness = 0", "max_staleness=0 must be at least 1"),
        (ASYNC.replace("buffer = 2", "buffer = 5"), "buffer=5 never fills with 4 members"),
        (ASYNC + 'aggregator = "fedbuff"', "name the rule within it"),
        (ASYNC + 'aggregator = "median2"', "'median2' is unknown"),
        ('classes = 7\n[rounds]\nmode = "both"', "mode='both' must be one of synchronous, asynchronous"),
        ("classes = 7\n[rounds]\nbuffer = 2", r'buffer=2 needs mode = "asynchronous"'),
        ("classes = 7\n[rounds]\nover = 0.5", "over=0.5: fraction=1 asks all members"),
        ('classes = 7\n[rounds]\naggregator = "fedbuff"', "needs an asynchronous run"),
    ],
)
def test_modes_that_contradict_themselves(tmp_path, new, message):
    with pytest.raises(ConfigError, match=message):
        load_config(written(tmp_path, GOOD.replace("classes = 7", new)))


def test_the_mode_is_said_once(tmp_path):
    with pytest.raises(ConfigError, match=r"asynchronous=True is said by \[rounds\] mode"):
        load_config(written(tmp_path, GOOD.replace("rounds = 2", "rounds = 2\nasynchronous = true")))


@pytest.mark.parametrize("algorithm", ["pfedgm", "local"])
def test_what_cannot_learn_asynchronously_is_refused_by_name(tmp_path, algorithm):
    text = GOOD.replace("classes = 7", ASYNC).replace('"fedavg"', f'"{algorithm}"')
    with pytest.raises(ConfigError, match=f"{algorithm}: .*use rounds in step"):
        load_config(written(tmp_path, text))


def config(**changes):
    run = Run(spec=ModelSpec("imu_cnn", (6, 32), 3), algorithm="fedavg", fraction=changes.pop("fraction", 1.0))
    return FleetConfig(name="watch", run=run, state=".", **changes)


def device(name, joined=0.0, quarantine=None):
    return Device("watch", name, 1, True, {}, joined, joined, quarantine)


def test_the_roster_waits_for_all_members():
    named = config(members=("b", "a"))
    assert cohort.roster(named.members, 0, [device("a"), device("c")]) == ()
    assert cohort.roster(named.members, 0, [device("a"), device("b", quarantine="NaN")]) == ()
    assert cohort.roster(named.members, 0, [device("a"), device("b"), device("c")]) == ("a", "b")


def test_the_roster_takes_the_first_to_come():
    assert cohort.roster((), 2, [device("a", 1)]) == ()
    assert cohort.roster((), 2, [device("a", 3), device("b", 1), device("c", 2)]) == ("b", "c")


def test_a_round_waits_for_a_quorum():
    half = config(devices=4, quorum=0.5)
    names = ("a", "b", "c", "d")
    assert cohort.ask(half.draw, 1, names, {"a"}, ()) is None
    asked = cohort.ask(half.draw, 1, names, {"a", "b", "x"}, ())
    assert (asked.cohort, asked.quorum, asked.online) == (names, 2, 2)
    assert cohort.ask(half.draw, 1, names, set(names), set(names)) is None
    assert cohort.ask(half.draw, 1, names, set(names), {"b"}).cohort == ("a", "c", "d")


def test_asking_more_than_needed():
    more = config(devices=10, fraction=0.5, over=0.3)
    names = tuple("abcdefghij")
    asked = cohort.ask(more.draw, 1, names, set(names), ())
    assert (len(asked.cohort), asked.target, asked.quorum) == (7, 5, 3)
    assert set(rounds.cohort(more.run, 1, names)) < set(asked.cohort)
    out = set(asked.cohort[:3])
    assert cohort.ask(more.draw, 1, names, set(names), out).target == 4, "no more than there are"


@pytest.mark.parametrize(
    "what", [{"aggregator": "median:f=1"}, {"privacy": PrivacyConfig(rule=Privacy(clip=1.0, noise=2.0, epsilon=50.0))}]
)
def test_a_fleet_that_has_shrunk_closes_with_no_fewer_than_its_rule_needs(what):
    """The target was a share of fewer: a quorum above it ended the coordinator at each start, and a rule that folds
    three was given two."""
    more = config(devices=5, fraction=0.6, over=0.7, **what)
    for names in ("abcde", "abcd", "abc"):
        asked = cohort.ask(more.draw, 1, tuple(names), set(names), ())
        assert (asked.target, asked.quorum) == (3, 3)


def test_an_asynchronous_run_asks_all_who_are_in():
    run = Run(spec=ModelSpec("imu_cnn", (6, 32), 3), algorithm="fedavg", asynchronous=True)
    many = FleetConfig(name="watch", run=run, state=".", devices=4, buffering=Buffering(buffer=2, max_staleness=7))
    asked = cohort.ask(many.draw, 3, tuple("abcd"), {"b"}, {"d"})
    assert (asked.cohort, asked.target, asked.quorum, asked.stale) == (("a", "b", "c"), 2, 1, 7)
    assert cohort.ask(many.draw, 3, tuple("abcd"), set(), ()) is None
    with pytest.raises(ConfigError, match="give both or neither"):
        FleetConfig(name="watch", run=run, state=".", devices=4)


@given(st.sets(st.sampled_from("abcdefgh"), min_size=1), st.floats(0.01, 1), st.integers(1, 50))
def test_cohorts_are_those_of_the_simulation(names, fraction, round):
    chosen = config(devices=1, fraction=fraction)
    asked = cohort.ask(chosen.draw, round, sorted(names), names, ())
    assert asked.cohort == rounds.cohort(chosen.run, round, tuple(names))


def test_who_is_shut_out_gives_its_place_to_the_next_who_came():
    wrong, right, later = device("wrong", 2, quarantine="not ours"), device("right", 3), device("later", 4)
    assert cohort.refilled(("a", "wrong"), [device("a", 1), wrong]) == ("a", "wrong")  # nobody waits
    assert cohort.refilled(("a", "wrong"), [device("a", 1), wrong, later, right]) == ("a", "right")


def test_a_draw_that_hit_those_who_have_gone_is_made_again_among_those_who_stay():
    few = config(devices=10, fraction=0.2)
    names = tuple(f"d{i}" for i in range(10))
    drawn = cohort.ask(few.draw, 1, names, set(names), ()).cohort
    here = set(names) - set(drawn)
    assert cohort.ask(few.draw, 1, names, here, ()) is None  # not heard yet, which is not gone
    again = cohort.ask(few.draw, 1, names, here, (), gone=set(drawn))
    assert len(again.cohort) == 2
    assert set(again.cohort) <= here
    assert cohort.ask(few.draw, 1, names, set(names), (), gone=set()).cohort == drawn


def test_no_round_has_a_smaller_quorum_than_its_rule_can_fold():
    robust = config(devices=8, quorum=0.1, aggregator="median")
    names = tuple(f"d{i}" for i in range(8))
    assert cohort.ask(robust.draw, 1, names, set(names), ()).quorum == 3
    assert cohort.ask(robust.draw, 1, names, {"d1", "d2"}, ()) is None


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("[canary]\nshare = 0\n", r"canary: share=0 must be in \(0, 1\]"),
        ("[canary]\nrefused = 1.0\n", r"canary: refused=1 must be in \[0, 1\)"),
        ("[canary]\nrounds = 0\n", r"canary: rounds=0 must be in 1\.\.10000"),
        ("[canary]\nshares = 0.2\n", "shares"),
        ('[rounds]\nmode = "asynchronous"\nbuffer = 1\n[canary]\n', "canary: share needs rounds in step"),
    ],
)
def test_a_canary_that_is_none_is_refused_by_its_field(tmp_path, more, said):
    path = tmp_path / "fleet.toml"
    run = '[run]\nalgorithm = "fedavg"\n[run.spec]\nname = "imu_cnn"\ninput_shape = [6, 32]\nclasses = 3\n'
    path.write_text(f'[fleet]\nname = "watch"\ndevices = 2\n{more}{run}')
    with pytest.raises(ConfigError, match=said):
        load_config(path)
    path.write_text(f'[fleet]\nname = "watch"\nmembers = ["a"]\ngrows = true\n{run}')
    with pytest.raises(ConfigError, match="grows=True and members"):
        load_config(path)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ("[privacy]\nsecure = true\n", "needs devices with keys"),
        ("[identity]\nfolder = '.'\n[privacy]\nsecure = true\n", "2 devices: of a sum of fewer than 3"),
        ("[identity]\nfolder = '.'\n[privacy]\nsecure = true\nthreshold = 9\n", "asks 4 of 4 .* lower threshold"),
        ("fraction = 0.5\n[privacy]\nclip = 1.0\n", r"asks 2 of 4 .*fraction=0.5\), and needs 3 until its end; raise"),
        ("[privacy]\nclip = 1.0\nholders = 9\n", "needs 9 until its end; raise .* or lower holders"),
        (
            "[identity]\nfolder = '.'\n[privacy]\nsecure = true\nthreshold = 2\n",
            "threshold=2 must be more than half of",
        ),
        ("[privacy]\nepsilon = 8.0\n", "need clip"),
        ("[privacy]\nclip = 1.0\nnoise = 1.0\nnoise_by = 'devices'\n", "set secure=true"),
    ],
)
def test_a_fleet_that_could_not_keep_what_it_promises_is_never_served(tmp_path, more, why):
    text = GOOD.replace("devices = 4", "devices = 2") if why.startswith("2 devices") else GOOD
    if more.startswith("fraction"):
        text, more = text.replace("rounds = 2", "rounds = 2\nfraction = 0.5"), more.partition("\n")[2]
    with pytest.raises(ConfigError, match=why):
        load_config(written(tmp_path, text + more))


def test_a_devices_settings_are_not_taken_for_a_fleets(tmp_path):
    with pytest.raises(ConfigError, match=r"holds a device's settings, \[device\]; give the fleet's"):
        load_config(written(tmp_path, '[device]\nid = "a"\n[fleet]\nname = "watch"\nbroker = "mqtt://h"\n'))


SITE = "[gateways]\nsite-a = 20\n"


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("devices = 4", 'members = ["anna", "bela"]', "'site-a' is no member; add it"),
        ("rounds = 2", "rounds = 2\nfraction = 0.5", r"fraction=0.5 draws among members"),
        ("[run]", '[rounds]\nmode = "asynchronous"\nbuffer = 2\n[run]', "asynchronous run weighs each update"),
        ("[run]", '[rounds]\naggregator = "median"\n[run]', "Median looks at each update by itself"),
        ("[run]", "[canary]\nshare = 0.5\n[run]", r"\[canary\] asks the gates of single devices"),
        ("[run]", "[privacy]\nclip = 1.0\nnoise = 1.0\n[run]", "cuts or masks the updates of single devices"),
        (
            "[run]",
            "[identity]\nfolder = '.'\n[privacy]\nsecure = true\n[run]",
            r"cuts or masks the updates of single devices",
        ),
        ("fedavg", "pfedgm", "looks at each update by itself"),
    ],
)
def test_a_fleet_whose_rounds_need_single_updates_has_no_gateway(tmp_path, old, new, why):
    assert dict(load_config(written(tmp_path, SITE + GOOD)).gateways) == {"site-a": 20}
    with pytest.raises(ConfigError, match=why):
        load_config(written(tmp_path, SITE + GOOD.replace(old, new, 1)))
