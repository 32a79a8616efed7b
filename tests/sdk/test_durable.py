"""Files of a state folder where somebody has put something else."""

import hashlib
import multiprocessing
import os
import signal
import subprocess
import sys

import pytest

from talaria import durable
from talaria.wire.chunks import FileAssembly, describe

KINDS = ["link", "hard link"]


@pytest.fixture
def elsewhere(tmp_path):
    """``elsewhere(path, kind)`` has ``path`` lead to a file that is none of ours, and gives that."""

    def lead(path, kind):
        there = tmp_path / "precious"
        there.write_bytes(b"precious")
        path.symlink_to(there) if kind == "link" else os.link(there, path)
        return there

    return lead


@pytest.mark.parametrize("kind", KINDS)
def test_a_lock_leaves_the_file_that_a_link_leads_to_as_it_is(tmp_path, elsewhere, kind):
    """It was emptied."""
    there = elsewhere(tmp_path / "lock", kind)
    if kind == "link":
        with pytest.raises(OSError, match="symbolic"):
            durable.lock(tmp_path / "lock", wait=False)
    else:
        durable.lock(tmp_path / "lock", wait=False).close()
    assert there.read_bytes() == b"precious"


@pytest.mark.parametrize("kind", KINDS)
def test_a_transfer_is_not_written_where_a_link_leads_to(tmp_path, elsewhere, kind):
    there, data = elsewhere(tmp_path / "model.part", kind), bytes(range(256)) * 40
    with FileAssembly(tmp_path / "model.part", describe(data), len(data)) as part:
        part.put(0, data)
        part.finish()
    assert there.read_bytes() == b"precious"
    assert hashlib.sha256((tmp_path / "model.part").read_bytes()).digest() == hashlib.sha256(data).digest()


def test_a_transfer_goes_on_in_its_own_file(tmp_path):
    data = bytes(range(256)) * 1000
    with FileAssembly(tmp_path / "model.part", describe(data), len(data)) as part:
        part.put(0, data[: part.cut.place(0)[1]])
    with FileAssembly(tmp_path / "model.part", describe(data), len(data)) as part:
        assert part.found() == {0}


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_is_no_file_is_not_read(tmp_path, kind):
    """A pipe gives nothing until somebody writes to it, and a device may have no end."""
    path = tmp_path / "private.safetensors"
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    with pytest.raises(OSError, match="it is no file"):
        durable.read(path)


def test_no_more_of_a_file_is_read_than_is_asked_for(tmp_path):
    """Who bounds what a folder may hold looks at no byte beyond."""
    (tmp_path / "port").write_bytes(b"1883 and much more")
    assert durable.read(tmp_path / "port", 4) == b"1883"
    assert durable.read(tmp_path / "port") == b"1883 and much more"


def test_a_folder_that_is_not_read_leaves_nothing_open(tmp_path):
    before = os.listdir("/proc/self/fd")
    with pytest.raises(IsADirectoryError):
        durable.read(tmp_path)
    assert os.listdir("/proc/self/fd") == before


def test_a_pipe_can_be_locked_and_holds_nobody_up(tmp_path):
    os.mkfifo(tmp_path / "lock")
    with durable.lock(tmp_path / "lock", wait=False), pytest.raises(BlockingIOError):
        durable.lock(tmp_path / "lock", wait=False)


def test_the_output_of_a_command_is_not_replaced_by_a_file(tmp_path):
    """Where it led to a file, a page to /dev/stdout took the place of that link for the whole machine."""
    stdout = tmp_path / "stdout"
    stdout.symlink_to("/proc/self/fd/1")
    script = "from pathlib import Path; from talaria import durable; durable.write_as('--out', Path('stdout'), b'page')"
    with open(tmp_path / "out.txt", "wb") as out:
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=tmp_path, stdout=out, stderr=subprocess.PIPE, text=True, check=False
        )
    assert "--out stdout cannot be written (it is no file that can be replaced); name a file" in done.stderr
    assert stdout.is_symlink()


def test_what_is_forked_does_not_go_on_to_have_a_folder(tmp_path):
    """Workers of a simulation that is killed work on for a while, and it could not be resumed."""
    context = multiprocessing.get_context("fork")
    end = context.Event()
    with durable.held(tmp_path):
        child = context.Process(target=end.wait)
        child.start()
    try:
        with durable.held(tmp_path), pytest.raises(BlockingIOError):
            durable.held(tmp_path).__enter__()
    finally:
        end.set()
        child.join()


KILLED = """
import os, signal, sys
from pathlib import Path
from talaria import durable
with durable.held(Path(sys.argv[1])):
    if os.fork():
        os.kill(os.getpid(), signal.SIGKILL)
    print("forked", flush=True)
    sys.stdin.read()
"""


def test_what_was_forked_does_not_keep_the_folder_of_who_was_killed(tmp_path):
    """A kill lets go of nothing: what was forked has let go of it when it began."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], **pipes) as killed:
        assert killed.stdout.readline() == b"forked\n"
        assert killed.wait() == -signal.SIGKILL
        with durable.held(tmp_path):
            pass
