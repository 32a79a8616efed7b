"""Real processes over Mosquitto learn another package's algorithm, network and rule, from the current folder."""

import json
import shutil
from pathlib import Path

import mypkg
from nursery import nursery

from talaria_coordinator.storage.store import Store


def test_a_fleet_of_somebody_elses_code_learns_what_was_simulated(tmp_path, monkeypatch):
    shutil.copytree(Path(mypkg.__file__).parent, tmp_path / "mypkg", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(tmp_path)
    env = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "OMP_NUM_THREADS": "1"}

    def begin(*words):
        return nursery().start(list(words), env)

    mine = ("-a", "mypkg.mine:FedHalf", "--model", "mypkg.nets:plain:width=6", "--aggregator", "mypkg.mine:First:f=2")
    words = ("simulate", *mine, "-d", "mypkg.sets:rings", "--rounds", "2", "--write-fleet", "watch", "--json")
    simulation = begin(*words)
    out, errors = simulation.communicate(timeout=200)
    assert simulation.returncode == 0, errors
    told = json.loads(out)
    assert told["model"]["options"] == {"width": 6}
    assert 'allow = ["mypkg"]' in (tmp_path / "watch" / "client-0.toml").read_text()

    coordinator = begin("coordinator", "serve", "watch/fleet.toml", "--json")
    agents = begin("edge", "run", "watch/client-0.toml", "watch/client-1.toml", "--json")
    try:
        assert agents.wait(200) == 0, agents.stderr.read()
        assert coordinator.wait(100) == 0, coordinator.stderr.read()
    finally:
        for program in (agents, coordinator):
            if program.poll() is None:
                program.kill()
            program.communicate()
    store = Store(tmp_path / "watch" / "state" / "coordinator" / "coordinator.db")
    try:
        assert store.fleets.get("fedhalf").model_digest == told["model_digest"], (
            "the fleet's last global model is not the simulation's"
        )
    finally:
        store.close()
