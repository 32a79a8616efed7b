"""Light devices with real bytes on a real coordinator, in small; and a global model over a link that is cut."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from talaria_bench.fleet.forkserver import Nursery


@pytest.mark.timeout(600)
def test_light_devices_lose_nothing(command, tmp_path):
    status, out, errors = command(
        "bench", "load", "--devices", 12, "--rounds", 3, "--ask", 4, "--model-mib", 0.3, "--processes", 2,
        "--retry-s", 3, "--plot", tmp_path / "found.svg", "--json", seconds=580,
    )  # fmt: skip
    found = json.loads(out)
    assert status == 0, (found["wrong"], errors[-2000:])
    drawn = (tmp_path / "found.svg").read_text()
    assert all(word in drawn for word in ("12 devices, 4 asked", "coordinator", "broker", "plain: socket receive"))
    assert found["counted"] == found["receipts"] == 12
    assert found["outcomes"] == {"stored": 12}
    assert (found["rounds"], found["lost"], found["twice"], found["links_lost"]) == (3, 0, 0, 0)
    assert found["up_mib"] >= 12 * 0.29
    assert found["down_mib"] >= 24 * 0.29, (
        "each update began with a global model, and every device left with the last one"
    )
    assert 12 * 0.29 <= found["last_models_mib"] <= 12 * 0.31
    assert 0.97 <= found["down_of_asked"] <= 2, "3 where everybody downloads each model"
    assert found["coordinator_ms_per_mib"] > 0


@pytest.mark.timeout(600)
def test_a_body_survives_cuts_with_two_windows_each(command):
    status, out, errors = command("bench", "load", "--model-mib", 12, "--cuts", 3, "--json", seconds=580)
    found = json.loads(out)
    assert status == 0, (found["wrong"], errors[-2000:])
    assert found["cuts"] >= 3
    assert found["chunks"] == 103
    assert found["chunks_sent_again"] <= found["allowed_again"] == 48
    assert found["receiver_grew_mib"] <= 12 + 32


@pytest.mark.timeout(600)
def test_light_devices_add_up_what_nobody_sees_with_some_neighbours_each(command):
    status, out, errors = command(
        "bench", "load", "--secure", "--devices", 9, "--rounds", 2, "--ask", 9, "--degree", 4, "--model-mib", 0.2,
        "--processes", 2, "--retry-s", 3, "--json", seconds=580,
    )  # fmt: skip
    found = json.loads(out)
    assert status == 0, (found["wrong"], errors[-2000:])
    assert found["secure"] == {"degree": 4, "leaving": 0}
    assert found["counted"] == found["receipts"] == 18
    assert (found["rounds"], found["lost"], found["twice"]) == (2, 0, 0)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "words", ["load --devices 2 --rounds 900 --model-mib 0.1 --processes 1", "agent --devices 1 --rounds 900"]
)
def test_a_bench_that_is_told_to_end_leaves_no_program_and_no_folder(words, tmp_path):
    """As `timeout` tells it: programs of `agent` went on for ever, and every folder stayed."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    code = "from talaria.cli.main import main; main()"
    bench = subprocess.Popen(
        [sys.executable, "-c", code, "bench", *words.split()], env={**os.environ, "TMPDIR": str(folder)}
    )
    while not any("mosquitto" in one.name() for one in psutil.Process(bench.pid).children(recursive=True)):
        assert bench.poll() is None
        time.sleep(0.05)
    programs = psutil.Process(bench.pid).children(recursive=True)
    bench.terminate()
    assert bench.wait(60) == 128 + signal.SIGTERM
    assert psutil.wait_procs(programs, 10)[1] == []
    assert [path.name for path in folder.iterdir() if path.name.startswith("talaria")] == []


@pytest.mark.timeout(120)
def test_programs_of_a_nursery_end_with_whoever_asked_before_it_could_answer():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    code = "from talaria_bench.fleet.forkserver import main; main()"
    with theirs:
        nursery = subprocess.Popen([sys.executable, "-c", code, str(theirs.fileno())], pass_fds=[theirs.fileno()])
    out, own = os.pipe()
    asked = {"start": ["bench", "audit", "--trials", "100000000"]}
    with os.fdopen(out, "rb") as reader:
        socket.send_fds(ours, [json.dumps(asked).encode()], [own, own])
        os.close(own)
        ours.close()
        try:
            assert nursery.wait(60) == 0
            assert reader.read() == b""  # its end: nobody holds the other side
        finally:
            nursery.kill()


def test_an_interrupt_of_a_terminal_is_for_the_bench_and_not_for_its_nursery():
    """It ended the nursery, and the bench waited for ever for the program that it had asked for."""

    async def sessions():
        nursery = Nursery()
        await nursery.open()
        try:
            return os.getsid(nursery._process.pid)
        finally:
            await nursery.close()

    assert asyncio.run(sessions()) != os.getsid(0)
