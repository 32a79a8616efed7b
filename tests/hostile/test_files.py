"""Files that anybody may hand in: damaged, huge, encrypted or of another kind, each reader refuses them with an error
made for people, before it allocates what they claim."""

import io
import json
import struct
import tracemalloc
import zipfile

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from talaria import recorded
from talaria.data import load
from talaria.errors import DataError, TalariaError
from talaria.federated import plan_compat
from talaria.planning.plan import Plan
from talaria_coordinator.config import fleet as fleet_config
from talaria_edge import config as device_config
from talaria_edge.data import NpzSource
from talaria_export import cli as export_cli

FLEET = """[fleet]
name = "watch"
members = ["anna", "bela", "carl"]
[broker]
url = "mqtt://127.0.0.1:1883"
[rounds]
quorum = 0.5
aggregator = "median:f=1"
[store]
blobs = "file:///srv/blobs"
[api]
port = 8420
[run]
algorithm = "fedprox"
rounds = 3
defaults = "smartwatch"
[run.recipe]
lr = 0.1
[run.hparams]
mu = 0.1
"""
DEVICE = """[device]
id = "anna"
labels = ["rest", "walk"]
[fleet]
name = "watch"
broker = "mqtt://127.0.0.1:1883"
[data]
source = "npz"
path = "mine.npz"
[plan.widths]
conv1 = 16
[guard]
min_battery = 0.3
hours = "22:00-06:30"
"""


def doors(path):
    """Every way in which a file of samples comes in."""
    return {
        "simulate and plan": lambda: load(f"npz:{path}"),
        "agent": lambda: NpzSource(path, "client-0").load(),
        "export": lambda: export_cli._arrays(path, 1),
        "verify": lambda: export_cli._arrays(path, 2),
    }


def good():
    return {"x": np.ones((12, 3), np.float32), "y": np.arange(12) % 2, "client": np.zeros(12, int)} | {
        "split": np.repeat([0, 1, 2], 4)
    }


def member(shape, descr="<f4", data=b"1234"):
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + data


def packed(path, name, data, **changes):
    """A valid file but for one member; ``changes`` are written over its entry in the archive's directory."""
    with zipfile.ZipFile(path, "w") as archive:
        for other, value in good().items():
            stream = io.BytesIO()
            np.save(stream, value)
            archive.writestr(f"{other}.npy", data if other == name else stream.getvalue())
    whole = bytearray(path.read_bytes())
    for signature, flags, method in ((b"PK\x03\x04", 6, 8), (b"PK\x01\x02", 8, 10)):
        at = whole.index(signature)
        if "flags" in changes:
            struct.pack_into("<H", whole, at + flags, changes["flags"])
        if "method" in changes:
            struct.pack_into("<H", whole, at + method, changes["method"])
    path.write_bytes(whole)


HARM = {
    "4 TB": (member((1 << 40,)), {}),
    "4 TB of nothing": (member((1 << 40, 0)), {}),
    "negative": (member((-1,)), {}),
    "objects": (member((1,), "|O"), {}),
    "encrypted": (member((1,)), {"flags": 1}),
    "method 99": (member((1,)), {"method": 99}),
    "no npy": (b"no array at all", {}),
    "empty": (b"", {}),
    "nested": (member("(" * 60 + ")" * 60), {}),
}


@pytest.mark.parametrize("harm", HARM)
@pytest.mark.parametrize("door", doors(None))
def test_a_file_of_samples_that_means_harm_is_refused_at_every_door(tmp_path, harm, door):
    path = tmp_path / "mine.npz"
    data, changes = HARM[harm]
    packed(path, "x", data, **changes)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=r"mine\.npz|x has"):
            doors(path)[door]()
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("door", doors(None))
def test_names_that_mean_harm_are_quoted_by_their_beginning(tmp_path, door):
    """Of an archive that holds other arrays, and of one whose two names of an array differ."""
    path, long = tmp_path / "mine.npz", "n" * 60_000
    np.savez(path, **{long: np.zeros(1)})
    with pytest.raises(DataError, match="is missing") as other:
        doors(path)[door]()
    np.savez(path, **good())
    whole = path.read_bytes()
    header = bytearray(whole[: whole.index(b"PK\x03\x04", 4)])
    struct.pack_into("<H", header, 26, len(whole) - 100)  # its name is all that follows
    path.write_bytes(bytes(header) + whole[len(header) :])
    with pytest.raises(DataError) as differing:
        doors(path)[door]()
    assert max(len(str(other.value)), len(str(differing.value))) < 1500


def test_the_same_file_is_read_at_every_door(tmp_path):
    path = tmp_path / "mine.npz"
    np.savez_compressed(path, **good())
    simulated, agent, export, verify = (read() for read in doors(path).values())
    assert len(simulated.clients["client-0"].train) == len(agent.train) == len(export[1]) == len(verify[1]) == 4
    assert simulated.clients["client-0"].val.y.tolist() == agent.val.y.tolist() == export[1].tolist()
    assert simulated.clients["client-0"].test.y.tolist() == agent.test.y.tolist() == verify[1].tolist()


@st.composite
def damage(draw, valid):
    """``valid`` with some bytes changed, cut out, doubled, or put in."""
    data = bytearray(valid)
    for _ in range(draw(st.integers(1, 4))):
        at, kind = draw(st.integers(0, max(0, len(data) - 1))), draw(st.sampled_from(("flip", "cut", "double", "put")))
        if kind == "flip" and data:
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del data[at : at + draw(st.integers(1, 40))]
        elif kind == "double":
            data[at:at] = data[at : at + draw(st.integers(1, 40))]
        else:
            data[at:at] = draw(
                st.sampled_from((b"\0", b"[" * 3000, b"9" * 5000, b"nan", b"-", b'"', b"\xff\xfe", b"{}"))
            )
    return bytes(data)


def _npz(**how):
    stream = io.BytesIO()
    (np.savez_compressed if how else np.savez)(stream, **good())
    return stream.getvalue()


def _npy():
    stream = io.BytesIO()
    np.save(stream, np.ones((4, 3)))
    return stream.getvalue()


READERS = {
    "mine.npz": (_npz(), recorded.read),
    "small.npz": (_npz(compressed=True), lambda path: doors(path)["agent"]()),
    "x.npy": (_npy(), export_cli._array),
    "x.csv": (b"1,2,3\n4,5,6\n", export_cli._array),
    "fleet.toml": (FLEET.encode(), fleet_config.load_config),
    "device.toml": (DEVICE.encode(), device_config.load_config),
    "plan.json": (json.dumps(Plan(widths={"a": 3}, steps=4).to_json()).encode(), plan_compat.read),
}


@pytest.mark.parametrize("name", READERS)
def test_a_valid_file_that_was_damaged_is_read_or_refused_and_nothing_else(tmp_path_factory, name):
    valid, read = READERS[name]
    path = tmp_path_factory.mktemp("damaged") / name
    path.write_bytes(valid)
    read(path)

    @settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
    @given(damage(valid))
    def damaged(data):
        path.write_bytes(data)
        told = "as it was"
        try:
            read(path)
        except TalariaError as error:
            told = str(error)
        assert 5 < len(told) < 1500, told

    damaged()
