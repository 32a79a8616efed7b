"""Several ingest workers for one fleet: the same bytes as one process, whoever is killed and when."""

import asyncio
import os
import signal
import socket
import subprocess
import sys

from servers import PASSWORD

from talaria import tensors
from talaria_coordinator.config.store import StoreConfig
from talaria_coordinator.fleet.ingest.pool import owner
from talaria_coordinator.server.ingest import PROGRAM
from talaria_edge.agent.rounds import Rounds

MEMBERS = ("anna", "bela", "carl")
"""bela's worker is 0, that of the others 1."""
WORKERS = "[ingest]\nworkers = 2\n"


def test_devices_have_the_owner_that_they_always_had():
    assert [owner(name, 2) for name in MEMBERS] == [1, 0, 1]
    assert [owner(name, 5) for name in MEMBERS] == [3, 0, 2]
    assert [owner(name, 1) for name in MEMBERS] == [0, 0, 0]


def test_a_fleet_with_keys_on_postgresql_loses_nothing_with_its_workers(keyed, postgres, monkeypatch):
    """The workers stand still while devices offer what they learned, and are killed then, with uploads that they were
    told of; and once more when the first of the next round has come."""
    one = keyed(members=MEMBERS, quorum=1.0, workers=2)
    password = one.folder / "database.password"
    password.write_text(f"{PASSWORD}\n")
    password.chmod(0o600)
    database = postgres.database().database
    url = f"postgresql+psycopg://talaria@127.0.0.1:{postgres.port}/{database}"
    one.options["store"] = StoreConfig(database=url, password_file=password)

    real, may_learn = Rounds.learn, asyncio.Event()

    async def learn(rounds, learner, action):
        one.told.append({"event": "about-to-learn"})
        await may_learn.wait()
        await real(rounds, learner, action)

    monkeypatch.setattr(Rounds, "learn", learn)

    async def scenario():
        pids = [(await one.told_of("ingest", worker=number))["pid"] for number in (0, 1)]
        await one.told_of("about-to-learn", count=3)  # all have the model, which workers send
        while [(one.pid, one.connected, one.devices) for one in noted()] != [(pids[0], True, 1), (pids[1], True, 2)]:
            await asyncio.sleep(0.1)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        may_learn.set()
        for device in MEMBERS:
            await one.told_of("trained", device=device)
        await asyncio.sleep(0.3)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        await one.told_of("received", count=4)
        for number in (0, 1):
            again = await one.told_of("ingest", worker=number, count=2)
            assert again["pid"] not in pids
            os.kill(again["pid"], signal.SIGKILL)

    def noted():
        with one.store as store:
            return store.fleets.get("watch").workers

    one.live(scenario)
    assert noted() == (), "none is left when the coordinator has gone"
    assert [len(one.of("ingest-lost", worker=number)) for number in (0, 1)] == [2, 2]
    assert one.counted() == {round: list(MEMBERS) for round in (1, 2, 3)}
    assert one.learned_what_simulation_learns()
    assert not list((one.state / "uploads").iterdir())


def test_the_coordinator_is_killed_and_its_workers_go_with_it(fleet, a_run):
    one = fleet(a_run("hermes", threshold=0.0), devices=MEMBERS)
    one.extra = "quorum = 1.0\n" + WORKERS
    coordinator = one.serve()
    url = coordinator.wait_for("ready")["broker"]
    agents, pids = one.agents(url), []
    for round in (1, 2, 3):
        coordinator.wait_for("round-opened", round=round)
        coordinator.wait_for("progress", phase="working")
        coordinator.kill()
        pids += [event["pid"] for event in coordinator.events if event["event"] == "ingest"]
        coordinator = one.serve()
        assert coordinator.wait_for("ready")["broker"] == url
    assert (agents.end(), coordinator.end()) == (0, 0)
    simulated = one.simulated()
    assert tensors.equal(one.shared(), simulated.shared)
    for device in one.devices:
        assert tensors.equal(one.private(device), simulated.private[device]), device
    assert pids
    assert not any(alive(pid) for pid in pids)


def test_ctrl_c_in_a_terminal_reaches_the_coordinator_alone_also_while_its_workers_begin(fleet, a_run):
    one = fleet(a_run("hermes", threshold=0.0), devices=MEMBERS)
    one.extra = WORKERS
    coordinator = one.serve()
    pids = [coordinator.wait_for("ingest", worker=number)["pid"] for number in (0, 1)]
    assert os.getpgid(coordinator.process.pid) not in [os.getpgid(pid) for pid in pids]
    coordinator.process.send_signal(signal.SIGINT)
    assert coordinator.end() == 0
    assert "Traceback" not in "".join(coordinator.errors)
    assert not any(alive(pid) for pid in pids)


def test_a_worker_whose_coordinator_ends_before_it_says_a_word_ends_without_one():
    ours, theirs = socket.socketpair()
    ours.close()
    with theirs:
        done = subprocess.run(
            [sys.executable, "-m", PROGRAM], stdin=theirs, capture_output=True, timeout=120, check=False
        )
    assert (done.returncode, done.stderr) == (0, b"")


def alive(pid):
    try:
        return "talaria_coordinator.server.ingest" in open(f"/proc/{pid}/cmdline").read()
    except OSError:
        return False
