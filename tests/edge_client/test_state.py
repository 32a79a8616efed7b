"""Private state on flash: replaced by rename only, checked when read, never half there."""

import hashlib
import threading

import msgpack
import numpy as np
import pytest

from talaria import tensors
from talaria.errors import StateError
from talaria_edge.storage import tensor_files
from talaria_edge.storage.state import DeviceStore, Trained, _sealed

PRIVATE = {
    "w": np.arange(6, dtype=np.float32).reshape(2, 3),
    "a/steps": np.array(7),
    "mask/c": np.array([3, 1], np.uint8),
}
BASE, RUN = "b" * 64, "r" * 64


def test_the_files_of_version_0_1_are_read_and_written_as_they_were(tmp_path):
    """Their checksum is over the dtypes by the names that torch has for them."""
    data = tensor_files.pack(PRIVATE, {"round": 3})
    assert hashlib.sha256(data).hexdigest() == "8a8f782cb875b1f1fd2816c037e04ceb80dd3aca71182b18b4f6ec8088519c47"
    found, facts = tensor_files.unpack(data, tmp_path, "")
    assert tensors.equal(found, PRIVATE)
    assert list(found) == list(PRIVATE)
    assert facts == {"round": 3}
    turned = tensor_files.pack({**PRIVATE, "w": np.asfortranarray(PRIVATE["w"])}, {"round": 3})
    assert turned == data


def round_(round, update=b"an update", base_digest=BASE):
    return Trained(update, round, base_digest, RUN)


@pytest.fixture
def store(tmp_path):
    with DeviceStore(tmp_path / "anna", "watch", "anna") as found:
        yield found


def test_a_new_device_has_nothing(store):
    assert store.private() is None
    assert store.trained() is None
    assert not store.publish()
    assert store.model_digests() == (b"", b"")
    assert store.protocol().boot > 10**9  # the clock: it may have connected before, and have lost its memory
    assert store.traffic() == {}


def test_staged_is_not_in_force_until_published(store):
    store.stage(round_(1), PRIVATE)
    assert store.private() is None
    assert store.trained() == round_(1)
    assert store.publish()
    found = store.private()
    assert (found.round, found.base_digest, found.run) == (1, BASE, RUN)
    assert tensors.equal(found.tensors, PRIVATE)
    assert list(found.tensors) == list(PRIVATE)
    assert store.trained() == round_(1), "the update stays until the next round, to be offered again"
    assert not store.publish()


def test_the_private_state_of_format_1_is_read_and_its_update_trained_again(store):
    old = {"format": 1, "fleet": "watch", "device": "anna", "step": 4, "base": BASE, "run": RUN, "epoch": 7}
    tensor_files.write(store.private_path, tensor_files.pack(PRIVATE, old))
    tensor_files.write(store.folder / "update.bin", _sealed({"step": 4, "base": BASE, "run": RUN}, b"an update"))
    found = store.private()
    assert (found.round, found.base_digest, found.run, found.epoch) == (4, BASE, RUN, 7)
    assert tensors.equal(found.tensors, PRIVATE)
    assert store.trained() is None
    store.stage(round_(5), PRIVATE)
    assert store.publish()
    assert store.private().round == 5


@pytest.mark.parametrize(
    "of", [lambda found: [found[0] + 1, found[1]], lambda found: [found[0], {**found[1], "mood": 1}]]
)
def test_what_a_newer_talaria_kept_is_told_by_its_file_and_how_to_go_on(store, of):
    store.save_protocol(store.protocol())
    path = store.folder / "protocol.bin"
    whole = msgpack.packb(of(msgpack.unpackb(path.read_bytes()[32:], strict_map_key=False)))
    tensor_files.write(path, hashlib.sha256(whole).digest() + whole)
    with pytest.raises(
        StateError, match=r"state: \S+protocol.bin is of another Talaria .*; update this one, or move \S+ away"
    ):
        store.protocol()
    facts = {"format": 3, "fleet": "watch", "device": "anna", "round": 1, "base_digest": BASE, "run": RUN}
    tensor_files.write(store.private_path, tensor_files.pack(PRIVATE, facts))
    with pytest.raises(
        StateError, match=r"private.safetensors is of format 3, this Talaria reads 2; update it, or restore"
    ):
        store.private()


@pytest.mark.parametrize("end", ["publish", "discard"])
def test_the_end_of_a_round_that_is_being_staged_waits_for_it(store, monkeypatch, end):
    """The worker stages a round while the loop hears that it is over: neither leaves half of it to the other."""
    half, ended, write = threading.Event(), threading.Event(), tensor_files.write

    def slow(path, data):
        if path.name == "update.bin":
            half.set()
            ended.wait(0.3)
        write(path, data)

    def over():
        getattr(store, end)()
        ended.set()

    monkeypatch.setattr(tensor_files, "write", slow)
    staging = threading.Thread(target=store.stage, args=(round_(1), PRIVATE))
    staging.start()
    assert half.wait(10)
    ending = threading.Thread(target=over)
    ending.start()
    staging.join(10), ending.join(10)
    if end == "publish":
        assert store.private().round == 1
        assert store.trained() == round_(1)
    else:
        assert store.private() is None
        assert store.trained() is None
        assert not (store.folder / "update.bin").exists()


def test_discard_keeps_what_is_in_force(store):
    store.stage(round_(1), PRIVATE)
    store.publish()
    store.stage(round_(2), {"w": np.zeros(1)})
    store.discard()
    assert not store.publish()
    assert store.private().round == 1
    assert store.trained() is None


def test_a_half_written_round_is_trained_again(store):
    store.stage(round_(1), PRIVATE)
    (store.folder / "update.bin").unlink()
    assert store.trained() is None
    assert not store.publish()
    assert store.private() is None


def test_an_update_of_another_round_does_not_publish(store):
    store.stage(round_(1), PRIVATE)
    update = (store.folder / "update.bin").read_bytes()
    store.stage(round_(2), PRIVATE)
    (store.folder / "update.bin").write_bytes(update)
    assert not store.publish()
    assert store.private() is None


def test_of_a_damaged_stage_it_is_not_said_that_anything_is_lost(store, caplog):
    (store.folder / "pending-private.safetensors").write_bytes(b"junk")
    assert store.staged() is None
    assert "the unfinished round is trained again: state: " in caplog.text
    assert "loses" not in caplog.text


@pytest.mark.parametrize(
    ("name", "work"),
    [
        ("update.bin", lambda store: store.stage(round_(1), PRIVATE)),
        ("pending-private.safetensors", DeviceStore.discard),
        ("kit-00.part", lambda store: store.adopt_kit("aa")),
        ("model-00.part", DeviceStore.clear_parts),
        ("body.bin", DeviceStore.clear_parts),
    ],
)
def test_what_cannot_be_removed_is_named(store, name, work):
    """A folder has its place, say: each round of the device ended in Python's words."""
    (store.folder / name).mkdir()
    store.kit_part("aa").write_bytes(b"a kit")
    with pytest.raises(tensor_files.DiskError, match=f"{name} could not be removed: .*; delete it by hand"):
        work(store)
