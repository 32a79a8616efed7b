"""Content-addressed blobs: durable, verified, and never half there."""

import errno
import hashlib
import os
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from talaria.errors import StateError
from talaria_coordinator.blobs import FolderBlobs


@given(st.binary(max_size=4096))
def test_what_was_put_is_got(tmp_path_factory, data):
    blobs = FolderBlobs(tmp_path_factory.mktemp("blobs"))
    digest = blobs.put(data)
    assert digest == hashlib.sha256(data).hexdigest()
    assert blobs.get(digest) == data
    assert blobs.put(memoryview(data)) == digest
    assert list(blobs.digests()) == [digest]


def test_damage_is_found(tmp_path):
    blobs = FolderBlobs(tmp_path)
    digest = blobs.put(b"the body of round 3")
    path = tmp_path / digest[:2] / digest[2:]
    path.write_bytes(b"the body of round 4")
    with pytest.raises(StateError, match=r"is damaged.*backup"):
        blobs.get(digest)


def test_missing_and_misnamed_are_refused(tmp_path):
    blobs = FolderBlobs(tmp_path)
    assert not blobs.has("0" * 64)
    with pytest.raises(StateError, match="cannot be read"):
        blobs.get("0" * 64)
    for bad in ("../../etc/passwd", "0" * 63, "G" * 64, ""):
        with pytest.raises(StateError, match="not a sha256"):
            blobs.get(bad)


def test_gc_keeps_what_is_in_use_and_what_is_young(tmp_path):
    blobs = FolderBlobs(tmp_path)
    kept, gone = blobs.put(b"kept"), blobs.put(b"gone!")
    (tmp_path / kept[:2] / ".half.1.part").write_bytes(b"of a crash")
    assert blobs.gc({kept}, older_s=60) == 0
    assert blobs.gc({kept}) == len(b"gone!") + len(b"of a crash")
    assert blobs.has(kept)
    assert not blobs.has(gone)


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
from talaria_coordinator.blobs import FolderBlobs
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


@pytest.mark.parametrize("signal_after", [0.02, 0.05, 0.1])
def test_kill_while_writing_leaves_whole_blobs_only(tmp_path, signal_after):
    code = (
        "import sys, os\nfrom pathlib import Path\nfrom talaria_coordinator.blobs import FolderBlobs\n"
        "blobs = FolderBlobs(Path(sys.argv[1]))\nprint('up', flush=True)\n"
        "while True: blobs.put(os.urandom(300_000))\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(signal_after)
        child.kill()
    blobs = FolderBlobs(tmp_path)
    for digest in blobs.digests():
        assert len(blobs.get(digest)) == 300_000
