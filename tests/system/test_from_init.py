"""From ``talaria fleet init`` to a learned round by commands alone, over a Mosquitto with TLS and per-device topics;
and nothing secret shows on the way."""

import json
import re
import socket
import subprocess
import sys

import httpx
import numpy as np
import psutil

MAIN = [sys.executable, "-c", "from talaria.cli.main import main; main()"]
DEVICE = """
[device]
id = "{device}"
[fleet]
name = "watch"
broker = "{url}"
[data]
source = "npz"
path = "{device}.npz"
[identity]
folder = "id-{device}"
"""


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def talaria(*args, text=None):
    done = subprocess.run(
        [*MAIN, *map(str, args)], input=text, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def write_data(path, seed):
    """What the settings that init writes ask for: windows of 6 x 100 in 7 classes."""
    rng = np.random.default_rng(seed)
    y = np.arange(35) % 7
    x = (rng.standard_normal((35, 6, 100)) + y[:, None, None]).astype(np.float32)
    parts = {"train": slice(0, 21), "val": slice(21, 28), "test": slice(28, 35)}
    np.savez(path, **{f"{k}_{name}": v[part] for name, part in parts.items() for k, v in (("x", x), ("y", y))})


def test_what_init_made_is_served_as_it_is_and_shows_no_secret(fleet, tmp_path):
    made = fleet(devices=())
    keys, secrets, shown = tmp_path / "keys", [], []
    shown += talaria(
        "fleet", "init", keys, "--name", "watch", "--port", free_port(), "--devices", 2, "--api-port", 0
    )  # fmt: skip
    for device in ("anna", "bela"):
        code, told = talaria("fleet", "enroll", keys, device)
        secrets.append(code.strip().rpartition(".")[2])
        shown.append(told)
        folder, answer = tmp_path / f"id-{device}", tmp_path / f"{device}.answer"
        shown += talaria("edge", "join", folder, text=code)
        shown += talaria("fleet", "admit", keys, folder / f"{device}.request", "-o", answer)
        shown += talaria("edge", "join", folder, "--answer", answer)
        write_data(tmp_path / f"{device}.npz", len(secrets))
    coordinator = made._start("coordinator", "serve", keys / "fleet.toml", "--json")
    ready = coordinator.wait_for("ready", seconds=150)
    assert ready["broker"].startswith("mqtts://")
    token = (keys / "api.token").read_text().strip()
    files = []
    for device in ("anna", "bela"):
        files.append(tmp_path / f"{device}.toml")
        files[-1].write_text(DEVICE.format(device=device, url=ready["broker"]))
    agents = made._start("edge", "run", *files, "--json")
    assert coordinator.wait_for("round-closed", seconds=150)["counted"] == 2

    url = (keys / "state" / "api.url").read_text().strip()
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/?", url)
    assert httpx.get(f"{url}/api/v1/fleets", timeout=20).status_code == 401
    right = {"Authorization": f"Bearer {token}"}
    (seen,) = httpx.get(f"{url}/api/v1/fleets", headers=right, timeout=20).json()
    assert (seen["name"], seen["algorithm"], seen["devices"]) == ("watch", "hermes", 2)

    started = [p for program in (coordinator, agents) for p in _family(program.process.pid)]
    assert any("mosquitto" in " ".join(p.cmdline()) for p in started)
    shown += [" ".join(p.cmdline()) for p in started]
    agents.close(), coordinator.close()
    shown += [json.dumps(event) for program in (coordinator, agents) for event in _all(program)]
    shown += [coordinator.errors, agents.errors]
    for file in (keys / "broker" / "mosquitto.conf", keys / "fleet.toml", keys / "members.json", *files):
        shown.append(file.read_text())
    private = [*keys.rglob("*.key"), *tmp_path.glob("id-*/*.key")]
    assert len(private) >= 8
    for key in private:
        assert key.stat().st_mode & 0o077 == 0
        lines = [line for line in key.read_text().splitlines() if not line.startswith("-----")]
        secrets += lines[:2]  # the third line of an elliptic curve's key is its public half
    for text in shown:
        for secret in (token, *secrets):
            assert secret not in text


def _family(pid):
    own = psutil.Process(pid)
    return [own, *own.children(recursive=True)]


def _all(program):
    return program.events + [item for item in program._new.queue if item]
