"""Settings, data sets and options that are wrong: each is answered by field, value and mend, never by a traceback."""

import errno
import os
import re
from pathlib import Path

import numpy as np
import pytest

import talaria
from talaria import durable
from talaria.cli.main import main

FLEET = """
[fleet]
name = "watch"
devices = 2
[run]
algorithm = "fedavg"
rounds = 2
[run.spec]
name = "imu_cnn"
input_shape = [6, 32]
classes = 3
"""
DEVICE = """
[device]
id = "anna"
[fleet]
name = "watch"
broker = "mqtt://127.0.0.1:1"
patience_s = 0.1
[data]
source = "npz"
path = "mine.npz"
"""


@pytest.fixture
def said(tmp_path, monkeypatch, capsys):
    """What a command that must fail says, in one line."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        monkeypatch.setattr("sys.argv", ["talaria", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code
        told = capsys.readouterr()
        return re.sub(r"\s+", " ", told.out + told.err)

    return run


def samples(**changed):
    """A device's own file, with arrays changed, or left out where they are None."""
    x = np.random.default_rng(0).standard_normal((30, 6, 32)).astype(np.float32)
    y = np.arange(30) % 3
    found = {"x_train": x[:20], "y_train": y[:20], "x_val": x[20:], "y_val": y[20:]} | changed
    np.savez("mine.npz", **{name: value for name, value in found.items() if value is not None})


@pytest.mark.parametrize(
    ("old", "new", "field", "value", "mend"),
    [
        ('"watch"', '"watch', "fleet.toml", "line 2", "mend that line"),
        ('"watch"', '"a/b"', "name", "'a/b'", "must be 1 to 36 of a-z"),
        ("devices = 2", 'devices = "two"', "[fleet] devices", "'two'", "must be a whole number, 0 or more"),
        ("devices = 2", 'devices = 2\nmember = ["a"]', "[fleet] member", "['a']", "did you mean 'members'?"),
        ("devices = 2", "device = 2", "[fleet] device", "2", "did you mean 'devices'?"),
        ("[fleet]", "[flet]", "[fleet] name", "is missing", "is [fleet] what [flet] is meant to be?"),
        ("[run]", "[membrs]\na = 1\n[run]", "membrs", "'a': 1", "known are api, broker, canary, fleet, gateways"),
        ("[run]", "[privacy]\nsecur = true\n[run]", "[privacy] secur", "True", "did you mean 'secure'?"),
        ("[run]", '[broker]\nusername = "me"\n[run]', "broker: username", "'me'", "give its url"),
        ("devices = 2", "devices = 2\naway_days = -1", "[fleet] away_days", "-1", "must be a number in 0..36500"),
        ("[run]", "[round]\nquorum = 0.5\n[run]", "round", "'quorum': 0.5", "did you mean 'rounds'?"),
        ("[run]", "[rounds]\nquorum = 1.5\n[run]", "[rounds] quorum", "1.5", "must be a number in 0..1"),
        ("[run]", "[canary]\nshare = 0\n[run]", "share", "0", "must be in (0, 1]"),
        ("[run]", "[ingest]\nworkers = 99\n[run]", "ingest: workers", "99", "must be in 0..16"),
        ("[run]", "[ingest]\nworker = 2\n[run]", "[ingest] worker", "2", "did you mean 'workers'?"),
        ("[run]", '[broker]\nurl = "amqtt"\n[ingest]\nworkers = 2\n[run]', "ingest: workers", "2", 'url = "mosquitto"'),
        ("[run]", "[gateways]\nsite-a = 0\n[run]", "[gateways] site-a", "0", "whole number in 1..100000"),
        ("fedavg", "fedavgg", "[run] algorithm", "'fedavgg'", "did you mean 'fedavg'?"),
        ("imu_cnn", "imu_cn", "[run] model", "'imu_cn'", "did you mean 'imu_cnn'?"),
        ("rounds = 2", "rounds = -2", "[run] rounds", "-2", "must be at least 1"),
        ("[run]", '[rounds]\naggregator = "median:f=1"\n[run]', "aggregator", "no fewer than 3", "lower its f"),
        (
            "[run]",
            '[rounds]\naggregator = "multi_krum:f=0,m=3"\n[run]',
            "aggregator",
            "no fewer than 3",
            "or m, or let",
        ),
        ("[run]", '[rounds]\naggregator = "mean:min_holders=3"\n[run]', "aggregator", "no fewer than 3", "min_holders"),
        ("classes = 3", "classes = 1", "[run] classes", "1", "must be at least 2"),
        ("[run]", "[privacy]\nsecure = true\nbits = 7\n[run]", "privacy: bits", "7", "must be 16 or 32"),
        (
            "[run]",
            '[privacy]\nsecure = true\nbound = "4"\n[run]',
            "privacy: bound",
            "'4'",
            "must be above 0, at most 1e+30",
        ),
        ("[run]", "[privacy]\nsecure = true\ntiers = 0\n[run]", "privacy: tiers", "0", "must be at least 1"),
        ("[run.spec]", '[run.recipe]\nlr = "fast"\n[run.spec]', "recipe: lr", "'fast'", "above 0, such as 0.02"),
        ("[run.spec]", "[run.hparams]\nmu = 1\n[run.spec]", "algorithm 'fedavg'", "option 'mu'", "it takes none"),
    ],
)
def test_a_wrong_fleet(said, tmp_path, old, new, field, value, mend):
    assert old in FLEET
    (tmp_path / "fleet.toml").write_text(FLEET.replace(old, new, 1).lstrip())
    text = said("coordinator", "status", "fleet.toml")
    for words in (field, value, mend):
        assert words in text


def test_a_folder_in_the_place_of_its_settings(said, tmp_path):
    assert ".: is a folder; name the .toml in it" in said("coordinator", "status", ".")


def test_a_fleet_whose_keys_are_not_there(said, tmp_path):
    (tmp_path / "fleet.toml").write_text(FLEET.lstrip() + '[identity]\nfolder = "keys"\n')
    text = said("coordinator", "serve", "fleet.toml")
    assert "identity: keys/broker/ca.crt cannot be read" in text
    assert "let [identity] folder be the one that `talaria fleet init` made" in text


@pytest.mark.parametrize("file", ["mosquitto.conf", "port"])
def test_a_brokers_file_that_the_disk_refuses(said, tmp_path, monkeypatch, file):
    write = durable.write

    def full(path, *given, **options):
        if path.name == file and path.parent.name == "broker":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(path, *given, **options)

    (tmp_path / "fleet.toml").write_text(FLEET.lstrip())
    monkeypatch.setattr(durable, "write", full)
    text = said("coordinator", "serve", "fleet.toml")
    assert f"broker: state/broker/{file} cannot be written (No space left on device); free space there" in text


@pytest.mark.timeout(60)
def test_a_pipe_in_the_place_of_the_brokers_log(said, tmp_path):
    """Nobody reads it: the start waited for somebody."""
    (tmp_path / "fleet.toml").write_text(FLEET.lstrip())
    (tmp_path / "state" / "broker").mkdir(parents=True)
    os.mkfifo(tmp_path / "state" / "broker" / "mosquitto.log")
    text = said("coordinator", "serve", "fleet.toml")
    assert "broker: state/broker/mosquitto.log cannot be written (No such device or address); name a file" in text


@pytest.mark.parametrize(
    ("old", "new", "field", "value", "mend"),
    [
        ('"anna"', '"an na"', "device: id", "'an na'", "must be 1 to 36 of a-z"),
        ('"watch"', '"Watch 2"', "fleet: name", "'Watch 2'", "must be 1 to 36 of a-z"),
        ("[fleet]", 'engine = "tensor"\n[fleet]', "engine", "'tensor'", "use 'torch' or 'onnx'"),
        ("mqtt://127.0.0.1:1", "127.0.0.1:x", "broker", "'127.0.0.1:x'", "write mqtt://host:1883"),
        ('"npz"', '"csv"', "[data] source", "'csv'", 'write "npz" or "folder"'),
        ("mine.npz", "none.npz", "data", "none.npz", "correct [data] path"),
        ("[data]", "[budget]\nlatency_ratio = 0.5\n[gard]\n[data]", "gard", "{}", "did you mean 'guard'?"),
        ("[data]", '[plan.widths]\nconv1 = "all"\n[data]', "[plan.widths] conv1", "'all'", "whole number, 1 or more"),
    ],
)
def test_a_wrong_device(said, tmp_path, old, new, field, value, mend):
    assert old in DEVICE
    (tmp_path / "device.toml").write_text(DEVICE.replace(old, new, 1))
    samples()
    text = said("edge", "check", "device.toml")
    for words in (field, value, mend):
        assert words in text


@pytest.mark.parametrize(
    ("changed", "field", "value", "mend"),
    [
        ({"x_val": None}, "mine.npz lacks", "x_val", "write x and y of each part, train and val"),
        ({"y_train": np.arange(19)}, "y_train", "(19,)", "give one label per sample"),
        ({"x_train": np.full((20, 6, 32), np.nan, np.float32)}, "mine.npz", "x_train[0]", "drop or repair that sample"),
        ({"x_val": np.zeros((10, 6, 30), np.float32)}, "val samples", "(6, 30)", "cut alike"),
        ({"x_train": np.array([None] * 20, dtype=object)}, "'x_train'", "Python objects", "write numbers"),
        ({"y_train": np.array(["rest"] * 20)}, "y_train", "<U4", "label all alike"),
    ],
)
def test_a_devices_samples_that_are_wrong(said, tmp_path, changed, field, value, mend):
    (tmp_path / "device.toml").write_text(DEVICE)
    samples(**changed)
    text = said("edge", "check", "device.toml")
    for words in (field, value, mend):
        assert words in text


def test_a_device_whose_recording_has_not_begun(said, tmp_path):
    (tmp_path / "device.toml").write_text(DEVICE + 'client = "anna"\n')
    np.savez("mine.npz", x=np.zeros((0, 6, 32), np.float32), y=np.zeros(0, np.int64), client=np.zeros(0, "U4"))
    assert "mine.npz holds no sample; record some before this device takes part" in said("edge", "check", "device.toml")


@pytest.mark.parametrize("text", ["", "[1]", '{"rounds": ', "[" * 100_000, "\udce9"])
def test_a_devices_result_that_is_damaged(said, tmp_path, text):
    (tmp_path / "result.json").write_text(text, errors="surrogateescape")
    told = said("edge", "result", str(tmp_path))
    assert "result.json cannot be read (" in told
    assert "delete it, the next run writes another" in told


def test_samples_in_a_pipe(said, tmp_path):
    """Refused for what it is: a device such as /dev/zero, which has no end, was read into memory."""
    os.mkfifo("mine.npz")
    held = os.open("mine.npz", os.O_RDWR)  # so that nobody waits for somebody to write
    try:
        text = said("simulate", "-a", "fedavg", "-d", "npz:mine.npz", "--model", "imu_cnn", "--rounds", "1")
    finally:
        os.close(held)
    assert "mine.npz: is a device or a pipe; give the path of a .npz file" in text


@pytest.mark.parametrize(
    ("changed", "words", "field", "value", "mend"),
    [
        ({"split": np.array(["train"] * 40)}, (), "split", "<U5", "write 0 for train, 1 for validation, 2 for test"),
        ({"split": np.full(40, 4)}, (), "split", "4", "use 0 train, 1 validation, 2 test, 3 unlabelled"),
        ({"split": np.full(40, 3)}, (), "split", "3", "mark some 0 train, 1 validation, 2 test"),
        ({"client": np.arange(39)}, (), "client", "(39,)", "give one for each"),
        ({"y": np.linspace(0, 1, 40)}, (), "y", "float64", "numpy.digitize"),
        ({}, ("-o", "lam=0.5"), "option", "'lam'", "it takes none"),
        ({}, ("-d", "mine.npz"), "dataset", "'mine.npz'", "write npz:mine.npz"),
        ({}, ("--report", "."), "--report", ".", "name a file in a folder of yours"),
        ({}, ("--baselines",), "--baselines", "--report", "give --report FILE with it"),
        ({}, ("--codec", "int3"), "codec", "'int3'", "use raw, fp16"),
        ({}, ("--fraction", "2"), "fraction", "2.0", "must be in (0, 1]"),
        ({}, ("--task", "regress"), "task", "'regress'", "use one of classification"),
        (
            {},
            ("--aggregator", "median:f=1"),
            "aggregator",
            "no fewer than 3 updates, and a round counts 2",
            "lower its f",
        ),
        (
            {},
            ("--plan", "client-0=p.json", "--plan", "client-0=p.json"),
            "--plan",
            "client-0=",
            "leave one of them out",
        ),
        ({}, ("--plan", "p.json", "--plan", "p.json"), "--plan", "p.json", "leave one of them out"),
        ({}, ("--aggregator", "server_adam"), "aggregator 'server_adam'", "'inner'", "such as inner=mean"),
        (
            {},
            ("--asynchronous", "--clip", "1"),
            "privacy",
            "an asynchronous run",
            "learn in rounds, or leave privacy out",
        ),
        ({"client": np.repeat(["n" * 65, "b"], 20)}, (), "client", "has 65 characters", "name it with 1 to 64 letters"),
        (
            {"client": np.repeat(["a\x1b[31m", "b"], 20)},
            (),
            "client",
            r"'a\x1b[31m'",
            "no line breaks or other controls",
        ),
        (
            {},
            ("--model", "mypkg.nets:Steps"),
            "task='classification' takes (N, classes)",
            "gives (2, 32, 2)",
            "average what it gives over its steps",
        ),
        (
            {"y": np.arange(40 * 32).reshape(40, 32) % 3},
            ("--task", "per_step"),
            "task='per_step' takes (N, steps, classes)",
            "gives (2, 3)",
            "end it with a Linear layer that reads each step",
        ),
        (
            {"y": np.arange(40 * 31).reshape(40, 31) % 3},
            ("--task", "per_step", "--model", "mypkg.nets:Steps"),
            "per_step",
            "31 labelled steps",
            "it must give (31, classes)",
        ),
        ({}, ("-d", "npz:."), "array 'x'", "it holds none", "name a .npz file, or put x.npy there"),
    ],
)
def test_a_simulation_that_is_given_something_wrong(said, changed, words, field, value, mend):
    x = np.random.default_rng(0).standard_normal((40, 6, 32)).astype(np.float32)
    np.savez("mine.npz", **{"x": x, "y": np.arange(40) % 2, "client": np.repeat([0, 1], 20)} | changed)
    Path("p.json").write_text('{"plan": {"batch": 8}}')
    given = ("-a", "fedavg", "-d", "npz:mine.npz", "--model", "imu_cnn", "--rounds", "1")
    text = said("simulate", *given, "--write-fleet", "fleet", "--save", "kept", *words)
    for each in (field, value, mend):
        assert each in text
    assert not Path("fleet").exists()
    assert not Path("kept").exists()


@pytest.mark.parametrize("out", [".", "..", "/", ""])
def test_a_folder_where_a_file_is_to_be_written(said, out):
    text = said("programs", "build", "--model", "mlp", "--shape", "4", "--classes", "2", "-o", out)
    assert "cannot be written" in text
    assert text.strip().endswith("name a file")


def test_options_beside_a_run_that_goes_on_with_its_own(said, tmp_path):
    x = np.random.default_rng(0).standard_normal((40, 4)).astype(np.float32)
    data = talaria.Federated.from_arrays(x, np.arange(40) % 2, np.repeat([0, 1], 20))
    talaria.simulate("fedavg", data, rounds=1, save=tmp_path / "kept")
    for words in (("--rounds", "9"), ("-a", "ditto"), ("--lr", "0.1"), ("--asynchronous",)):
        text = said("simulate", "--resume", "kept", *words)
        assert "is that of the run in kept, which goes on as it began; leave it out" in text
        assert words[0] in text or words[0] == "-a"


def test_a_run_that_goes_on_in_another_folder_than_it_began_in(said, tmp_path, monkeypatch):
    """Its data is named as seen from there, and no other data can be named beside --resume."""
    draw = np.random.default_rng(0)
    np.savez(tmp_path / "mine.npz", x=draw.standard_normal((40, 4)), y=np.arange(40) % 2, client=np.repeat([0, 1], 20))
    talaria.simulate("fedavg", "npz:mine.npz", rounds=1, save="kept")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    text = said("simulate", "--resume", "../kept")
    assert "the run in ../kept began with data='npz:mine.npz' in its working folder: go on in that folder" in text
    monkeypatch.chdir(tmp_path)
    assert talaria.resume("kept").clients.keys() == {"client-0", "client-1"}


def test_keys_go_to_a_folder_of_their_own(said, tmp_path):
    """A folder of keys is shut to others: nothing else may lie there."""
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    (shared / "notes.txt").write_text("read by all")
    assert "is not empty, and a fleet's folder is for its keys alone; name a new one" in said(
        "fleet", "init", "shared", "--name", "watch"
    )
    assert shared.stat().st_mode & 0o777 == 0o755
    assert [path.name for path in shared.iterdir()] == ["notes.txt"]
