"""``talaria edge check`` names what is wrong before the first round, by field, value and mend."""

import asyncio
import errno
import json
import os
import shutil
import socket
import subprocess
import sys

import numpy as np
import pytest
from tests.keyed import packet
from tests.servers import free_port, serving_mosquitto
from tests.torchless import torchless

from talaria.federated.run import Run
from talaria.model.spec import ModelSpec
from talaria.planning.plan import Plan
from talaria.time import Clocks, told_by
from talaria.wire.frames import Header, encode_frame
from talaria.wire.messages import CoordinatorBirth, encode_message
from talaria_edge.check import check
from talaria_edge.storage.state import DeviceStore, Trained


def samples(folder, name="data.npz", shape=(6, 32), labels=3, change=lambda x, y: (x, y)):
    y = np.arange(30) % labels
    x, y = change(np.random.default_rng(0).standard_normal((30, *shape)).astype(np.float32), y)
    np.savez(folder / name, x=x, y=y, split=np.arange(len(x)) // 10)
    return folder / name


NPZ = "source = 'npz'\npath = 'data.npz'"


def written(folder, device="", fleet="", data=NPZ, more="", broker="mqtt://127.0.0.1:9", name="watch", id="mallory"):
    path = folder / "device.toml"
    tables = f'[device]\nid = "{id}"\n{device}\n[fleet]\nname = "{name}"\nbroker = "{broker}"\n{fleet}\n'
    path.write_text(f"{tables}[data]\n{data}\n{more}\n")
    return path


def wrong(found):
    return {one.what: one.said for one in found if one.state == "wrong"}


def nan(x, y):
    return np.where(np.arange(len(x))[:, None, None] == 7, np.nan, x).astype(np.float32), y


WITHOUT_A_FLEET = {
    "a field that nobody knows": ({"device": "colour = 3"}, "settings", "colour"),
    "a broker that is no URL": ({"broker": "somewhere"}, "settings", "somewhere"),
    "a name that no topic takes": ({"id": "Mal_lory"}, "settings", "Mal_lory"),
    "an engine that is none": ({"device": 'engine = "steam"'}, "settings", "steam"),
    "hours that are none": ({"more": '[guard]\nhours = "25:00-26:00"'}, "settings", "hours"),
    "no data file": (
        {"data": "source = 'npz'\npath = 'gone.npz'"},
        "data",
        "gone.npz is not there; correct [data] path",
    ),
    "a path by another name": (
        {"data": "source = 'npz'\npth = 'data.npz'"},
        "settings",
        "is it what pth='data.npz' is",
    ),
    "a folder without windows": (
        {"data": "source = 'folder'\npath = 'gone'"},
        "data",
        "gone yet; record some, or correct [data] path",
    ),
    "a bundle where no folder can be": ({"device": "bundle = 'data.npz/b.talaria'"}, "bundle", "data.npz is no folder"),
    "a state where no folder can be": ({"device": "state = 'data.npz'"}, "space", "or set [device] state"),
    "a source that ends its program": (
        {"data": "source = 'mypkg.data:leave'", "more": '[code]\nallow = ["mypkg"]'},
        "data",
        "'mypkg.data:leave' failed (SystemExit: goodbye); mend it",
    ),
    "a data set that nobody knows": ({"data": "source = 'moon'\nclient = 'a'"}, "data", "moon"),
    "a kit that is none": ({"device": 'engine = "onnx"\nkit = "data.npz"'}, "kit", "make it again"),
    "no keys where some are named": ({"more": '[identity]\nfolder = "gone"'}, "keys", "gone"),
    "no keys where rounds must be secure": ({"more": "[privacy]\nsecure = true"}, "keys", "secure declines each round"),
    "no broker there": ({}, "broker", "127.0.0.1:9"),
    "a stranger's machine without TLS": ({"broker": "mqtt://192.0.2.1:1883"}, "keys", "talaria edge join"),
    "a variant that no bundle has": (
        {"device": 'variants = ["fp8"]'},
        "settings",
        "'fp8'] are unknown; choose",
    ),
    "a password that is not there": ({"fleet": 'username = "a"\npassword_file = "gone"'}, "keys", "write the password"),
    "a password of nobody": (
        {"fleet": 'password_file = "data.npz"'},
        "settings",
        "username is missing, whose password",
    ),
    "nothing to write to": ({"device": 'state = "/proc/nowhere"'}, "space", "/proc"),
}


@pytest.mark.parametrize("case", WITHOUT_A_FLEET)
def test_what_is_wrong_on_the_device_is_named(case, tmp_path):
    changes, what, says = WITHOUT_A_FLEET[case]
    samples(tmp_path)
    found = wrong(check(written(tmp_path, **changes)))
    assert says in found[what], found


@pytest.mark.broker
def test_what_a_stranger_at_the_broker_says_begins_no_line_and_steers_no_terminal(tmp_path):
    """Where there is no torch, nobody knows which names of models are none: one was printed as it came."""
    samples(tmp_path)
    run = json.loads(Run(spec=ModelSpec("imu_cnn", (6, 32), 3), algorithm="fedavg").to_json())
    run["spec"]["name"] = "imu_cnn\nok     samples      can be learned from \x1b[8m"
    birth = CoordinatorBirth(
        online=True, key=b"", chunk=300, credit=8, max_update=10_000, retry=1.0, spec=json.dumps(run).encode()
    )
    said = encode_frame(Header(birth.TYPE, "watch", boot=1), encode_message(birth))
    port = free_port()
    with serving_mosquitto(tmp_path, port=port) as broker, socket.create_connection(("127.0.0.1", port)) as link:
        link.sendall(bytes.fromhex("100d00044d5154540402003c000178") + packet("fl/1/watch/co/state", said, retain=True))
        assert link.recv(4)[0] == 0x20, "it is let in"
        path = written(tmp_path, broker=broker)
        out, _ = torchless("edge", "check", str(path), stdout=subprocess.PIPE).communicate(timeout=100)
    assert r"\x1b[8m" in out
    assert all(line.isprintable() for line in out.splitlines())


def test_a_bundle_that_no_package_here_makes_is_told(tmp_path, monkeypatch):
    samples(tmp_path)
    path = written(tmp_path, device='engine = "onnx"\nbundle = "me.talaria"')
    assert "bundle" not in wrong(check(path))
    monkeypatch.setitem(sys.modules, "onnx", None)  # as where it is not installed
    assert wrong(check(path))["bundle"] == "no bundle is written without onnx: pip install 'talaria[bundle]'"


def test_what_another_device_kept_is_told_and_stays_as_it_is(tmp_path):
    samples(tmp_path)
    with DeviceStore(tmp_path / "kept", "watch", "anna") as store:
        store.stage(Trained(b"update", 1, "b" * 64, "run"), {"head.bias": np.zeros(3, np.float32)})
        assert store.publish()
        kept = store.private_path.read_bytes()
        assert "state" not in wrong(check(written(tmp_path, device='state = "kept"'))), "an agent holds it"
    assert "state" not in wrong(check(written(tmp_path, device='state = "kept"', id="anna")))
    found = wrong(check(written(tmp_path, device='state = "kept"')))
    assert "belongs to device 'anna', not 'mallory'" in found["state"]
    store.private_path.write_bytes(kept[:-1])
    assert "is damaged" in wrong(check(written(tmp_path, device='state = "kept"', id="anna")))["state"]
    assert store.private_path.read_bytes() == kept[:-1]


@pytest.mark.parametrize(
    ("change", "says"),
    [(nan, "NaN"), (lambda x, y: (x[:0], y[:0]), "no sample")],
    ids=["not a number", "nothing"],
)
def test_samples_that_teach_nothing_are_named(change, says, tmp_path):
    samples(tmp_path, change=change)
    assert says in wrong(check(written(tmp_path)))["data"]


def test_a_name_at_the_broker_is_no_key(tmp_path):
    samples(tmp_path)
    (keys,) = (one for one in check(written(tmp_path, fleet='username = "mallory"')) if one.what == "keys")
    assert (keys.state, keys.said.startswith("none: others who may use it, and whoever runs it,")) == ("note", True)


def test_one_whole_number_may_be_a_class_or_a_number_until_the_run_is_known(tmp_path):
    samples(tmp_path, change=lambda x, y: (x, 0 * y + 5))
    (found,) = (one for one in check(written(tmp_path)) if one.what == "data")
    assert found.state == "note"
    assert "only class 5" in found.said
    assert found.said.endswith("unless the run learns numbers")


@pytest.mark.parametrize(("count", "says"), [(0, "6 to test, each of"), (4, "6 to test, 4 unlabelled, each of")])
def test_the_windows_without_a_label_are_counted(count, says, tmp_path):
    x, split = np.zeros((30, 6, 32), np.float32), np.arange(30) // 12
    np.savez(tmp_path / "data.npz", x=x, y=np.arange(30) % 3, split=np.where(np.arange(30) < count, 3, split))
    (said,) = (one.said for one in check(written(tmp_path)) if one.what == "data")
    assert said == f"{12 - count} to learn from, 12 to validate, {says} shape (6, 32)"


def test_a_clock_that_was_not_set_is_told_as_a_date(tmp_path):
    np.savez(tmp_path / "data.npz", x=np.zeros((30, 6, 32), np.float32), y=np.arange(30) % 3)
    with told_by(Clocks(wall=lambda: 1_701_132_392.0)):
        found = wrong(check(written(tmp_path)))
    assert found["clock"].startswith("says 2023-11-28 00:46 UTC")


def test_a_fleet_is_looked_at_and_hears_nothing(keyed, tmp_path, command):
    fleet = keyed(2, others=("mallory",))
    home = fleet.folder / "mallory-home"
    home.mkdir()

    def looked(shape=(6, 32), labels=3, own="mallory", **changes):
        samples(home, shape=shape, labels=labels)
        keys = f'[identity]\nfolder = "{fleet.folder / f"id-{own}"}"'
        path = written(home, **{"more": keys, "broker": fleet.url, **changes})
        return list(check(path, wait_s=20.0))

    def look():
        fine = looked()
        assert wrong(fine) == {}
        assert {one.what for one in fine} >= {"settings", "data", "clock", "space", "engine", "keys", "broker"}
        assert {"coordinator", "run", "samples"} <= {one.what for one in fine if one.state == "ok"}
        assert "(6, 32)" in wrong(looked(shape=(5, 32)))["samples"]
        assert "label" in wrong(looked(labels=5))["samples"]
        (home / "plan.json").write_text(json.dumps(Plan(widths={"conv9": 8}).to_json()))
        assert "conv9" in wrong(looked(device='plan = "plan.json"'))["plan"]
        named = looked(device="bundle = 'me.talaria'\nlabels = ['rest', 'walk']")
        assert "labels=2 names are not for the 3 classes" in wrong(named)["labels"]
        assert "'bela'" in wrong(looked(own="bela"))["keys"]
        mixed = shutil.copytree(fleet.folder / "id-mallory", fleet.folder / "id-mixed")
        for file, says in [("tls.key", "KEY_VALUES_MISMATCH"), ("tls.crt", "the certificate of 'bela', for whom")]:
            shutil.copy(fleet.folder / "id-bela" / file, mixed)
            assert says in wrong(looked(own="mixed"))["keys"]
        (mixed / "tls.crt").write_bytes(b"")
        assert "cannot load" in wrong(looked(own="mixed"))["keys"]
        assert "another" in wrong(looked(name="other"))["keys"] or "other" in wrong(looked(name="other"))["keys"]
        plain = looked(broker=fleet.url.replace("mqtts", "mqtt"), more="")
        assert "broker" in wrong(plain)
        with DeviceStore(home / "state" / "mallory", "watch", "mallory"):
            running = [one for one in looked() if one.what == "broker"]
        assert [(one.state, "an agent runs" in one.said) for one in running] == [("note", True)]

    async def beside():
        await fleet.told_of("round-opened")
        await asyncio.to_thread(look)

    fleet.live(beside)
    assert fleet.of("device-up", device="mallory") == []
    assert fleet.of("refused", device="mallory") == []
    fleet.learned_what_simulation_learns()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        status, out, _ = command("edge", "check", written(home, broker=f"mqtt://127.0.0.1:{silent.getsockname()[1]}"))
    assert status == 1
    assert any(line.startswith("wrong  broker") for line in out.splitlines()), out


def test_a_look_leaves_a_folder_of_windows_as_it_is(tmp_path):
    """A round would make the folder, let the oldest files go and remember the first day; a look does nothing of it."""
    folder = tmp_path / "windows"
    path = written(tmp_path, data="source = 'folder'\npath = 'windows'\ndrift = true\nmost = 3")
    found = {one.what: one for one in check(path)}
    assert (found["data"].state, folder.exists()) == ("wrong", False)
    folder.mkdir()
    for number in range(6):
        np.savez(folder / f"{number}.npz", x=np.zeros((1, 6, 32), np.float32), y=[number % 2])
        os.utime(folder / f"{number}.npz", (1.7e9 + number, 1.7e9 + number))
    (folder / "broken.npz").write_bytes(b"half")
    before = sorted(one.name for one in folder.iterdir())
    said = [(one.state, one.said) for one in check(path) if one.what == "data"]
    assert sorted(one.name for one in folder.iterdir()) == before
    assert [state for state, _ in said][:2] == ["note", "note"]
    assert said[0][1].startswith(f"3 files leave {folder} before the next round")
    assert "broken.npz is not read: " in said[1][1]


def test_a_state_folder_that_is_closed_to_this_user_is_told(tmp_path, monkeypatch):
    samples(tmp_path)
    path = written(tmp_path)
    (tmp_path / "state").mkdir()
    closed = str(tmp_path / "state" / "mallory")
    really = os.stat

    def stat(path, *given, **options):
        if os.fspath(path).startswith(closed) if isinstance(path, str | os.PathLike) else False:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return really(path, *given, **options)

    monkeypatch.setattr(os, "stat", stat)  # who runs the tests may be root, whom no folder is closed to
    assert "settings" in {one.what for one in check(path)}
