"""Private state on flash: replaced by rename only, checked when read, never half there."""

import errno
import hashlib
import os
import re
import subprocess
import sys
import threading
from contextlib import suppress
from itertools import count

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from talaria import tensors
from talaria.errors import StateError
from talaria.federated.fedbuff_run import Buffering
from talaria.wire.changes import changes
from talaria.wire.strict_safetensors import pack
from talaria_edge.storage import tensor_files
from talaria_edge.storage.state import DeviceStore, Trained, UnfitError, _sealed

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


@pytest.mark.parametrize("name", ["update.bin", "pending-private.safetensors"])
@pytest.mark.parametrize("where", [0, 9, 40, -1])
def test_a_damaged_stage_counts_as_none(store, name, where):
    store.stage(round_(1), PRIVATE)
    path = store.folder / name
    data = bytearray(path.read_bytes())
    data[where] ^= 0xFF
    path.write_bytes(data)
    assert store.trained() is None
    assert not store.publish()


@given(st.data())
def test_any_flipped_bit_of_private_state_is_found(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("anna")
    with DeviceStore(folder, "watch", "anna") as store:
        store.stage(round_(1), PRIVATE)
        store.publish()
        raw = bytearray(store.private_path.read_bytes())
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at] ^= 1 << data.draw(st.integers(0, 7))
        store.private_path.write_bytes(raw)
        mend = rf"{store.private_path} .*restore private.safetensors from a backup"
        try:
            found = store.private()
        except StateError as error:
            told = str(error)
        else:
            assert tensors.equal(found.tensors, PRIVATE), (
                "a flip in the header's blanks may pass, a changed value never"
            )
            return
    assert re.search(mend, told)


@pytest.mark.parametrize("data", [b"", b"\0" * 7, b"\xff" * 64, b"\x80\x04pickle", b"PK\x03\x04" + b"\0" * 60])
def test_files_that_are_no_tensors(store, data):
    store.private_path.write_bytes(data)
    with pytest.raises(StateError, match="is damaged"):
        store.private()


def test_another_devices_state_is_refused(store, tmp_path):
    store.stage(round_(1), PRIVATE)
    store.publish()
    store.close()
    with (
        DeviceStore(tmp_path / "anna", "watch", "bela") as other,
        pytest.raises(StateError, match="belongs to device 'anna', not 'bela'"),
    ):
        other.private()


def test_one_process_at_a_time(store):
    with pytest.raises(StateError, match="in use by another process"):
        DeviceStore(store.folder, "watch", "anna")


def test_the_protocols_memory(store):
    state = store.protocol()
    state.boot = 5
    store.save_protocol(state)
    assert store.protocol().boot == 5
    path = store.folder / "protocol.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(StateError, match=r"protocol.bin is damaged; move"):
        store.protocol()


def test_traffic(store):
    store.save_traffic({1: {"up": 5, "down": 6}})
    assert store.traffic() == {1: {"up": 5, "down": 6}}
    whole = (store.folder / "traffic.json").read_bytes()
    broken = (b"[", b"[" * 90_000, b'{"1": {"up": 1e999, "down": 1}}', b"\xff")
    for damaged in (
        *broken,
        *(bytes([*whole[:i], whole[i] ^ 1 << bit, *whole[i + 1 :]]) for i in range(len(whole)) for bit in range(8)),
    ):
        (store.folder / "traffic.json").write_bytes(damaged)
        assert isinstance(store.traffic(), dict), "an account of bytes is no reason not to start"


@pytest.mark.parametrize("damaged", [b"null", b"[" * 90_000, b'{"epsilon": %s, "delta": 1}' % (b"9" * 400), b"[]"])
def test_a_damaged_record_of_what_privacy_cost_is_none(store, damaged):
    """Each round was declined with a traceback."""
    (store.folder / "privacy.json").write_bytes(damaged)
    assert store.spent() == {}
    cost = {"epsilon": 1.5, "delta": 1e-5, "form": "central"}
    store.keep_spent(cost)
    assert store.spent() == cost


FULL = """
import resource, sys
import numpy as np
from pathlib import Path
from talaria.errors import StateError
from talaria.federated.fedbuff_run import Buffering
from talaria_edge.storage.state import DeviceStore, Trained
with DeviceStore(Path(sys.argv[1]), "watch", "anna") as store:
    store.stage(Trained(b"one", 1, "b", "r"), {"w": np.ones(10)})
    store.publish()
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    try:
        store.stage(Trained(b"two", 2, "b", "r"), {"w": np.ones(100_000, np.float32)})
    except StateError as error:
        print(error)
"""


def test_a_disk_that_is_full_while_saving_leaves_the_state_before(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, timeout=120, check=True
    )
    assert "could not be written" in done.stdout
    assert "The state saved before is intact" in done.stdout
    with DeviceStore(tmp_path, "watch", "anna") as store:
        assert store.private().round == 1
        assert np.array_equal(store.private().tensors["w"], np.ones(10))
        assert store.trained() is None
        assert not list(tmp_path.glob(".*.part"))


@pytest.mark.parametrize("at", [1, 2])
def test_a_cut_while_a_run_is_called_off_loses_nothing_of_the_run_before(tmp_path, monkeypatch, at):
    with DeviceStore(tmp_path, "watch", "anna") as store:
        for number, run in enumerate(("first", "off"), 1):
            store.stage(Trained(b"update", number, "b", run), {"w": np.full(2, number)})
            store.publish()
        rename, calls = tensor_files.rename, count(1)

        def cut(source, path):
            if next(calls) == at:
                raise tensor_files.DiskError("cut")
            rename(source, path)

        with monkeypatch.context() as patched:
            patched.setattr(tensor_files, "rename", cut)
            with suppress(tensor_files.DiskError):
                store.take_back()
        found = store.private()
        if found is not None and found.run == "off":  # it is called off still, as the agent finds when it starts again
            store.take_back()
        assert store.private().run == "first"
        assert store.before() is None
    kept = tmp_path / "called-off-private.safetensors"
    assert tensor_files.unpack(kept.read_bytes(), kept, "")[1]["run"] == "off", "what was called off is kept beside it"


def test_of_what_a_device_learned_nothing_stays_once_it_is_erased(house, run_all):
    one = house(names=("anna",))
    run_all(one.serve(), one.agent("anna"))
    with DeviceStore(one.folder / "anna", "watch", "anna") as store:
        tensor_files.make_folder(store.folder / "bundles")
        for cut in ("candidate.talaria", "bundles/.0a.talaria.part"):
            (store.folder / cut).write_bytes(b"a kill came")
        store.left()
        store.erase()
        assert sorted(path.name for path in store.folder.iterdir()) == ["left.json", "lock"]


def test_what_a_device_keeps_is_for_its_owner_alone(tmp_path):
    tensor_files.write(tmp_path / "personal.safetensors", b"x")
    assert (tmp_path / "personal.safetensors").stat().st_mode & 0o777 == 0o600


def test_write_replaces_or_leaves_alone(tmp_path):
    path = tmp_path / "x"
    tensor_files.write(path, b"one")
    tensor_files.write(path, b"two")
    assert path.read_bytes() == b"two"
    with pytest.raises(StateError, match="could not be written"):
        tensor_files.write(tmp_path / "missing" / "x", b"one")


@pytest.mark.parametrize(
    ("code", "mend"),
    [(errno.ENOSPC, "free space there"), (errno.EROFS, "let this program write"), (errno.ENOENT, "make that folder"),
     (errno.EIO, "check that disk")],
)  # fmt: skip
def test_what_could_not_be_written_says_the_mend_for_its_own_cause(tmp_path, monkeypatch, code, mend):
    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(tensor_files.DiskError, match=mend):
        tensor_files.write(tmp_path / "x", b"1")


def model(step):
    return pack({"w": np.arange(3000, dtype=np.float32) * np.float32(1 + step / 1000)})


def test_what_changed_of_the_model_on_flash_makes_the_next_one(store):
    first, second = model(0), model(1)
    store.model_part("one").write_bytes(first)
    assert store.adopt_model("one") == b""
    store.model_part("two").write_bytes(changes(first, second))
    assert store.adopt_model("two", less=True) == hashlib.sha256(second).digest()
    assert store.model() == second
    assert store.model_digests() == (hashlib.sha256(second).digest(),) * 2
    assert not store.model_part("two").exists()


def test_changes_of_another_model_leave_the_one_on_flash_as_it_is(store):
    store.model_part("one").write_bytes(model(0))
    store.adopt_model("one")
    store.model_part("two").write_bytes(changes(model(1), model(2)))
    with pytest.raises(UnfitError, match="of no use here: the changes are of another global model"):
        store.adopt_model("two", less=True)
    assert store.model() == model(0)
    store._model.unlink()
    with pytest.raises(UnfitError, match=r"of no use here: state: .* cannot be read"):
        store.adopt_model("two", less=True)


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


@pytest.mark.parametrize("buffered", [True, False])
def test_what_the_last_round_taught_is_in_force_though_a_full_disk_met_its_receipt(
    house, run_all, a_run, monkeypatch, buffered
):
    """The receipt was kept before what follows of it: the update counted, and an asynchronous device let go of what it
    had learned with it."""
    more = {"buffering": Buffering(buffer=1)} if buffered else {}
    one = house(a_run("fedper", asynchronous=buffered), names=("anna",), **more)
    rename, refused = tensor_files.rename, []

    def full_once(source, path):
        if path.name == "private.safetensors" and not refused:
            refused.append(path)
            raise tensor_files.DiskError("no room")
        rename(source, path)

    monkeypatch.setattr(tensor_files, "rename", full_once)

    async def twice():
        with pytest.raises(tensor_files.DiskError):
            await one.agent("anna")
        return await one.agent("anna")

    _, found = run_all(one.serve(), twice())
    assert refused
    assert found["rounds"] == 1
