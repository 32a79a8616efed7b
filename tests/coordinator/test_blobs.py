"""Content-addressed blobs: durable, verified, and never half there; the same in a folder and on an S3 server."""

import errno
import hashlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from talaria.errors import StateError
from talaria_coordinator.fleet.aggregation import passing
from talaria_coordinator.storage import blobs as blobs_module
from talaria_coordinator.storage import s3 as s3_blobs
from talaria_coordinator.storage.blobs import FolderBlobs
from talaria_coordinator.storage.database import SilentError
from talaria_coordinator.storage.s3 import S3Blobs


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=4096))
def test_what_was_put_is_got(blobs, data):
    digest = blobs.put(data)
    assert digest == hashlib.sha256(data).hexdigest()
    assert blobs.get(digest) == data
    assert blobs.put(memoryview(data)) == digest
    assert blobs.has(digest)
    assert list(blobs.digests()).count(digest) == 1


def test_a_file_may_become_the_blob(blobs, tmp_path):
    for data in (b"an update", b"an update", b"another", b""):
        file = tmp_path / "upload.part"
        file.write_bytes(data)
        digest = hashlib.sha256(data).hexdigest()
        blobs.adopt(file, data, digest)
        assert blobs.get(digest) == data


def test_a_folder_takes_the_file_itself_and_from_another_disk_its_bytes(tmp_path, monkeypatch):
    blobs, whole = FolderBlobs(tmp_path / "blobs"), FolderBlobs(tmp_path / "others")
    whole.put(b"written")
    file, data = tmp_path / "upload.part", b"an update"
    digest = hashlib.sha256(data).hexdigest()
    file.write_bytes(data)
    file.chmod(0o600)
    number = file.stat().st_ino
    blobs.adopt(file, data, digest)
    kept = tmp_path / "blobs" / digest[:2] / digest[2:]
    assert not file.exists()
    assert kept.stat().st_ino == number
    assert kept.stat().st_mode == next((tmp_path / "others").glob("??/*")).stat().st_mode
    assert blobs.gc((), older_s=0.001).freed == 0, "what was just taken over is young"

    def far(*_):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    file.write_bytes(b"far")
    monkeypatch.setattr(blobs_module.durable, "rename", far)
    with pytest.raises(StateError, match="could not be written"):
        blobs.adopt(file, b"far", hashlib.sha256(b"far").hexdigest())
    monkeypatch.undo()
    monkeypatch.setattr(blobs_module.os, "chmod", far)
    blobs.adopt(file, b"far", hashlib.sha256(b"far").hexdigest())
    assert file.exists()
    assert blobs.get(hashlib.sha256(b"far").hexdigest()) == b"far"


def test_a_large_one(blobs):
    data = os.urandom(12 << 20)
    assert blobs.get(blobs.put(data)) == data


def test_damage_is_found_and_a_put_mends_what_has_another_size(blobs, depot):
    digest = blobs.put(b"the global model of round 3")
    for other in (b"the global model of round 4", b"", b"the global model of round 3 and more"):
        depot.spoil(digest, other)
        with pytest.raises(StateError, match=r"is damaged.*backup"):
            blobs.get(digest)
    assert blobs.put(b"the global model of round 3") == digest
    assert blobs.get(digest) == b"the global model of round 3"


@given(st.binary(min_size=1, max_size=40), st.data())
def test_any_damage_to_what_was_just_put_is_found(data, draw):
    with tempfile.TemporaryDirectory() as folder:
        blobs = FolderBlobs(Path(folder))
        digest = blobs.put(data)
        at, flipped = draw.draw(st.integers(0, len(data) - 1)), draw.draw(st.integers(1, 255))
        spoilt = data[:at] + bytes([data[at] ^ flipped]) + data[at + 1 :]
        for other in (spoilt, data[:at], data + bytes(at + 1)):
            (Path(folder) / digest[:2] / digest[2:]).write_bytes(other)
            with pytest.raises(StateError, match="is damaged"):
                blobs.get(digest)


def test_missing_and_misnamed_are_refused(blobs, depot):
    assert not blobs.has("0" * 64)
    with pytest.raises(StateError, match="cannot be read"):
        blobs.get("0" * 64)
    for bad in ("../../etc/passwd", "0" * 63, "G" * 64, ""):
        for ask in (blobs.get, blobs.has):
            with pytest.raises(StateError, match="not a sha256"):
                ask(bad)
    digest = blobs.put(b"gone")
    depot.spoil(digest, None)
    assert not blobs.has(digest)
    assert digest not in set(blobs.digests())


def test_what_is_read_for_the_last_time_is_verified_and_leaves_no_pages_in_memory(tmp_path, monkeypatch):
    blobs, told = FolderBlobs(tmp_path), []
    real = os.posix_fadvise
    monkeypatch.setattr(os, "posix_fadvise", lambda *what: (told.append(what[1:]), real(*what)))
    data = bytes(range(256)) * 4096
    digest = blobs.put(data)
    assert blobs.get(digest) == data
    assert told == []
    assert blobs.get(digest, again=False) == data
    assert told == [(0, 0, os.POSIX_FADV_DONTNEED)]
    assert blobs.get(digest, again=False) == data, "it is still on disk"
    assert not blobs._sums, "what is read no more takes no memory"
    (tmp_path / digest[:2] / digest[2:]).write_bytes(data[:-1] + b"?")
    with pytest.raises(StateError, match="damaged"):
        FolderBlobs(tmp_path).get(digest, again=False)


def test_gc_keeps_what_is_in_use_and_what_is_young(blobs):
    kept, gone = blobs.put(b"kept"), blobs.put(b"gone!")
    assert blobs.gc({kept}, older_s=60) == (0, len(b"gone!")), "freed, and younger"
    assert blobs.gc({kept}, dry_run=True) == (len(b"gone!"), 0)
    assert blobs.has(gone)
    assert blobs.gc({kept}).freed == len(b"gone!")
    assert list(blobs.digests()) == [kept]


def test_what_came_since_the_last_sweep_is_kept_where_the_clock_was_set(blobs, monkeypatch):
    """The record is asked what is in use, an update comes in, and is entered; only then the sweep begins."""
    in_use = {blobs.put(b"global model")}
    update = blobs.put(b"update")
    real, day = time.time, 86_400.0
    monkeypatch.setattr(blobs_module.time, "time", lambda: real() + day)
    monkeypatch.setattr(s3_blobs, "_age", lambda found: day)
    assert blobs.gc(in_use, older_s=3600).freed == 0
    assert blobs.get(update) == b"update"
    assert blobs.gc(in_use, older_s=3600).freed == len(b"update"), (
        "by the next sweep the record has had its time to name it"
    )


def test_a_name_that_is_none_of_ours_is_left_alone(blobs, depot):
    digest = blobs.put(b"ours")
    depot.spoil("ab" + "notes.txt", b"somebody else's")
    assert list(blobs.digests()) == [digest]
    assert blobs.gc({digest}).freed == 0


def test_what_somebody_put_who_was_killed_before_its_name_was_flushed_is_flushed(tmp_path, monkeypatch):
    """It was taken for kept, and lost in a power cut; the new folder that it lies in was flushed by nobody."""
    flushed, real, kills = [], os.fsync, [True]

    def fsync(handle):
        flushed.append(Path(os.readlink(f"/proc/self/fd/{handle}")).relative_to(tmp_path))
        if len(flushed) == 3 and kills.pop():
            raise OSError(errno.EIO, "killed")
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    blobs, digest = FolderBlobs(tmp_path / "blobs"), hashlib.sha256(b"an update").hexdigest()
    name = Path("blobs", digest[:2], digest[2:])
    with pytest.raises(StateError, match="killed"):
        blobs.put(b"an update")
    assert (flushed[0], flushed[2]) == (Path("blobs"), name.parent)
    assert (tmp_path / name).exists()
    flushed[:], kills[:] = [], [False]
    assert FolderBlobs(tmp_path / "blobs").put(b"an update") == digest
    assert {name.parent, name, Path("blobs")} == set(flushed)


def test_what_is_too_large_is_refused_before_it_is_read(depot, monkeypatch):
    blobs = depot.open()
    digest = blobs.put(b"x" * 100)
    for module in (blobs_module, s3_blobs):
        monkeypatch.setattr(module, "LARGEST", 99)
    with pytest.raises(StateError, match="too many for one blob"):
        blobs.put(b"x" * 101)
    with pytest.raises(StateError, match=r"is damaged \(100 bytes\)"):
        blobs.get(digest)


def test_what_a_crash_left_in_a_folder_is_removed(tmp_path):
    blobs = FolderBlobs(tmp_path)
    kept = blobs.put(b"kept")
    (tmp_path / kept[:2] / ".half.1.part").write_bytes(b"of a crash")
    assert blobs.gc({kept}, older_s=60).freed == 0
    assert blobs.gc({kept}).freed == len(b"of a crash")


def test_a_put_makes_an_old_blob_young(tmp_path):
    blobs = FolderBlobs(tmp_path)
    digest = blobs.put(b"of an older round")
    os.utime(tmp_path / digest[:2] / digest[2:], (1, 1))
    blobs = FolderBlobs(tmp_path)
    assert blobs.gc((), older_s=60, dry_run=True).freed == 17
    blobs.put(b"of an older round")
    assert blobs.gc((), older_s=60).freed == 0


def test_a_put_makes_an_old_object_young(s3, monkeypatch):
    blobs = S3Blobs(f"s3://{s3.bucket}/ages", endpoint=s3.endpoint)
    digest = blobs.put(b"of an older round")
    first = blobs._info(digest)["LastModified"]
    blobs.put(b"of an older round")
    assert blobs._info(digest)["LastModified"] == first
    monkeypatch.setattr(s3_blobs, "FRESH_S", 0.5)
    time.sleep(1.1)
    blobs.put(b"of an older round")
    assert blobs._info(digest)["LastModified"] > first


def test_a_bucket_that_is_not_there_and_a_server_that_is_not_there(s3):
    with pytest.raises(StateError, match=r"s3://no-such-bucket/x could not be opened \(.*look at the server"):
        S3Blobs("s3://no-such-bucket/x", endpoint=s3.endpoint)
    with pytest.raises(StateError, match=r"could not be opened"):
        S3Blobs(f"s3://{s3.bucket}/x", endpoint="http://127.0.0.1:9")


def test_no_keys(s3, monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    keys = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(keys))
    with pytest.raises(StateError, match="AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        S3Blobs(f"s3://{s3.bucket}/x", endpoint=s3.endpoint.replace("127.0.0.1", "localhost"))
    keys.write_text("[fleet]\naws_access_key_id = one\naws_secret_access_key = the other\n")
    blobs = S3Blobs(f"s3://{s3.bucket}/x", endpoint=s3.endpoint, profile="fleet")
    assert blobs.get(blobs.put(b"with a profile")) == b"with a profile"
    with pytest.raises(StateError, match="nobody"):
        S3Blobs(f"s3://{s3.bucket}/x", endpoint=s3.endpoint, profile="nobody")


def test_a_server_that_goes_away_and_comes_back(new_s3):
    blobs = S3Blobs(f"s3://{new_s3.bucket}/again", endpoint=new_s3.endpoint)
    digest = blobs.put(b"before")
    new_s3.stop()
    for act in (
        lambda: blobs.put(b"after"),
        lambda: blobs.get(digest),
        lambda: blobs.has(digest),
        lambda: blobs.gc(()),
    ):
        with pytest.raises(StateError, match="all earlier state is intact"):
            act()
    new_s3.start()
    assert blobs.get(blobs.put(b"after")) == b"after"


class Half(BaseHTTPRequestHandler):
    """Of each object, said to have a thousand bytes, it sends ten, and cuts the link."""

    def do_HEAD(self):
        self.answer(1000)

    def do_GET(self):
        listed = b"<ListBucketResult><KeyCount>0</KeyCount></ListBucketResult>" if "list-type" in self.path else b""
        self.answer(len(listed) or 1000)
        self.wfile.write(listed or bytes(10))

    def answer(self, size):
        self.send_response(200)
        self.send_header("Content-Length", str(size))
        self.send_header("Last-Modified", "Sun, 01 Nov 2026 00:00:00 GMT")
        self.end_headers()

    def log_message(self, *_):
        pass


class Silent(Half):
    """It answers to no question about an object before its server is ``over``."""

    asked = 0

    def do_HEAD(self):
        Silent.asked += 1
        self.server.over.wait()


@pytest.mark.parametrize("kind", [Half, Silent])
def test_a_link_that_is_cut_in_the_midst_of_an_object_or_says_nothing_is_given_up_and_no_sender_is_to_blame(
    s3, kind, monkeypatch
):
    monkeypatch.setattr(s3_blobs, "READ_S", 1)
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        server.over = threading.Event()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        blobs = S3Blobs(f"s3://{s3.bucket}/half", endpoint=f"http://127.0.0.1:{server.server_port}")
        with pytest.raises(SilentError, match="could not be read") as refused:
            blobs.get("ab" * 32)
        server.over.set()
        server.shutdown()
    assert passing(refused.value)
    assert Silent.asked <= s3_blobs.TRIES * s3_blobs.AGAIN


def test_a_put_that_is_refused_leaves_no_trace(tmp_path, monkeypatch):
    blobs = FolderBlobs(tmp_path)
    before = blobs.put(b"before")

    def full(_handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StateError, match=r"No space left.*all earlier state is intact"):
        blobs.put(b"after")
    monkeypatch.undo()
    assert list(blobs.digests()) == [before]
    assert not list(tmp_path.glob("??/.*"))
    assert blobs.get(before) == b"before"


WRITER = """
import resource, signal, sys
from pathlib import Path
from talaria.errors import StateError
from talaria_coordinator.storage.blobs import FolderBlobs
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
blobs = FolderBlobs(Path(sys.argv[1]))
blobs.put(b"a" * 1000)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    blobs.put(b"b" * 100_000)
except StateError as error:
    print(error)
"""


def test_a_disk_that_takes_no_more(tmp_path):
    out = subprocess.run(
        [sys.executable, "-c", WRITER, str(tmp_path)], capture_output=True, text=True, timeout=60, check=True
    )
    assert "100000 bytes could not be written" in out.stdout
    assert "free space" in out.stdout
    blobs = FolderBlobs(tmp_path)
    assert [blobs.get(d) for d in blobs.digests()] == [b"a" * 1000]
    assert not list(tmp_path.glob("??/.*"))


@pytest.mark.parametrize("signal_after", [0.02, 0.2])
def test_kill_while_writing_leaves_whole_blobs_only(depot, signal_after):
    code = depot.code + "import os\nwhile True: print(blobs.put(os.urandom(300_000)), flush=True)\n"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        first = child.stdout.readline()
        time.sleep(signal_after)
        child.kill()
        told = [line.strip() for line in (first, *child.stdout) if line.endswith("\n")]
    blobs = depot.open()
    found = sorted(blobs.digests())
    assert told
    assert set(told) <= set(found), "what was put is there"
    assert {len(blobs.get(digest)) for digest in found} == {300_000}


def test_two_processes_put_the_same(depot):
    code = depot.code + "for i in range(20): print(blobs.put(b'%d' % i * 1000))\n"
    children = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    told = [child.communicate(timeout=120)[0].split() for child in children]
    assert [child.returncode for child in children] == [0, 0]
    assert told[0] == told[1]
    blobs = depot.open()
    assert sorted(blobs.digests()) == sorted(told[0])
    assert [blobs.get(digest) for digest in told[0]] == [b"%d" % i * 1000 for i in range(20)]
