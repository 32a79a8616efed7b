"""Every Python program of the README and the guides runs as it stands there, in a process and a folder of its own, and
so does the example that is one."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import forked
import pytest
from readme import ROOT, program, programs

import talaria
from talaria import data

PORT = "1883"
"""The broker's, in the programs; the tests take a free one instead."""
IN_FLOWER = {name for name in programs() if name.startswith("flower.md")}
"""What tests/flower/test_programs.py runs, where flwr is (`make flower`)."""
IN_WHEEL = {name for name, text in programs().items() if name.startswith("README") and "talaria.resume(" in text}
"""What test_wheel.py runs."""
SERVED = {name for name, text in programs().items() if PORT in text or "talaria_coordinator" in text}
FLEET = """
[fleet]
name = "watch"
members = ["s01-left", "device"]
stay = false
[broker]
url = "mosquitto"
port = {port}
[run]
algorithm = "fedper"
rounds = 2
defaults = "smartwatch"
[run.spec]
name = "imu_cnn"
input_shape = [6, 100]
classes = 7
"""


def started(text, folder):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)}
    return subprocess.Popen(
        [sys.executable, "-c", text], cwd=folder, env=environment, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def ended(process, seconds=500):
    said, _ = process.communicate(timeout=seconds)
    assert process.returncode == 0, said[-3000:]
    return said


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    wearer = data.load("smartwatch").clients["s01-left"]
    personal = talaria.Personalizer(talaria.ModelSpec("imu_cnn", (6, 100), 7), plan=talaria.Plan())
    path = tmp_path_factory.mktemp("bundle") / "me.talaria"
    personal.fit(wearer.train, wearer.val, epochs=1).export(path, seconds=0)
    return path


def test_the_readme_shows_every_way_of_use():
    text = "\n".join(text for name, text in programs().items() if name.startswith("README"))
    for word in (
        "talaria.simulate(",
        "talaria.resume(",
        "talaria_edge.Device(",
        ".join(",
        "talaria_coordinator.serve(",
    ):
        assert word in text


ALONE = "alone.py"
ALL = [*sorted(set(programs()) - SERVED - IN_WHEEL - IN_FLOWER), ALONE]


@pytest.fixture(scope="module")
def told(tmp_path_factory, bundle):
    commands = {}
    for name in ALL:
        folder = tmp_path_factory.mktemp("program")
        script = ROOT / "examples" / ALONE if name == ALONE else folder / "mine.py"
        if name != ALONE:
            script.write_text(programs()[name])
            shutil.copytree(ROOT / "tests" / "mypkg", folder / "mypkg")
        for other in ("me.talaria", "newer.talaria"):
            shutil.copy(bundle, folder / other)
        commands[name] = folder, script
    return forked.run(commands, tmp_path_factory.mktemp("said"), "exports")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ALL)
def test_a_program_runs(name, told):
    said, status = told[name]
    assert status == 0, said[-3000:]
    if "==" in programs().get(name, ""):
        assert said.splitlines()[-1] == "True"
    if name == ALONE:
        assert "% right" in said


@pytest.mark.broker
@pytest.mark.timeout(900)
def test_the_programs_of_a_fleet_learn_together(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    folder = Path(tmp_path, "watch")
    folder.mkdir()
    folder.joinpath("fleet.toml").write_text(FLEET.format(port=port))
    assert len(SERVED) == 3
    texts = [program("README", word) for word in (".serve(", "Device(", ".join(")]
    running = [started(text.replace(f":{PORT}", f":{port}"), tmp_path) for text in texts]
    try:
        served, device, _ = (ended(process) for process in running)
    finally:
        for process in running:
            process.kill()
    assert "'ready'" in served
    assert "'rounds': 2" in device
    assert (tmp_path / "me.talaria").is_file()
    assert (tmp_path / "state" / "device" / "result.json").is_file()
