"""An operator at work on a running fleet: pause, resume, abort, shut out and let in again; a port that is taken."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import httpx
import pytest
from servers import serving_mosquitto

from talaria import stopping, tensors


def with_api(one, port=0, **more):
    one.extra = f"[api]\nport = {port}\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in more.items())
    return one


def state(api):
    return api.get("/api/v1/fleets/watch").json()


def order(api, verb, status=200, **query):
    answer = api.post(f"/api/v1/fleets/watch/{verb}", params=query)
    assert answer.status_code == status, answer.text
    return answer.json()


@contextmanager
def in_the_first_round(one, coordinator, ready, api):
    """Agents whose first round is open, and stays so until the ``with`` statement ends."""
    order(api, "pause")
    agents = one.agents(ready["broker"])
    for _ in one.devices:
        coordinator.wait_for("device-up")
    with agents.stopped():
        order(api, "resume")
        coordinator.wait_for("round-opened", round=1)
        yield agents


def test_pause_resume_and_abort_change_no_byte_of_what_is_learned(fleet, a_run):
    one = with_api(fleet(a_run("fedper", rounds=5, epochs=3)))
    coordinator = one.serve()
    ready = coordinator.wait_for("ready")
    with httpx.Client(base_url=ready["api"], timeout=20) as api:
        with in_the_first_round(one, coordinator, ready, api) as agents:
            assert order(api, "pause", reason="night")["status"] == "paused"
            assert coordinator.wait_for("pause")["reason"] == "night"
        coordinator.wait_for("round-closed", round=1)
        time.sleep(1.0)
        assert (state(api)["round"], state(api)["tried"], state(api)["status"]) == (1, 1, "paused")
        with agents.stopped():
            assert order(api, "resume")["status"] == "running"
            opened = coordinator.wait_for("round-opened", round=2)
            assert order(api, "abort", reason="wrong data")["status"] == "aborted"
        failed = coordinator.wait_for("round-failed", attempt=opened["attempt"])
        assert failed["reason"] == "wrong data"
        assert "aborted" in order(api, "pause", 409)["detail"]
        time.sleep(1.0)
        assert (state(api)["round"], state(api)["status"]) == (1, "aborted")
        assert order(api, "resume")["status"] == "running"
        coordinator.wait_for("round-opened", round=2)
        text = api.get("/metrics").text
        assert 'talaria_attempts_total{fleet="watch",outcome="failed"} 1.0' in text
        assert 'talaria_attempts_total{fleet="watch",outcome="closed"} 1.0' in text
    assert coordinator.end() == 0
    assert agents.end() == 0
    assert tensors.equal(one.shared(), one.simulated().shared)


def test_a_paused_fleet_stays_paused_over_a_kill(fleet, a_run):
    one = with_api(fleet(a_run("fedavg", rounds=3)))
    first = one.serve()
    ready = first.wait_for("ready")
    one.port = int(ready["broker"].rsplit(":", 1)[1])
    with httpx.Client(base_url=ready["api"], timeout=20) as api:
        with in_the_first_round(one, first, ready, api):
            order(api, "pause")
        first.wait_for("round-closed", round=1)
    first.kill()
    second = one.serve()
    again = second.wait_for("ready")
    with httpx.Client(base_url=again["api"], timeout=20) as api:
        second.wait_for("connected")
        time.sleep(1.0)
        assert (state(api)["status"], state(api)["round"]) == ("paused", 1)
        order(api, "resume")
    assert second.end() == 0


def test_a_run_that_is_extended_while_the_broker_is_away_goes_on_when_it_is_back(fleet, a_run, tmp_path):
    """It begins anew for that, and ended with "does not answer" where it would have waited within a run."""
    with serving_mosquitto(tmp_path) as url:
        one = with_api(fleet(a_run("fedavg", rounds=1), broker=url))
        coordinator = one.serve()
        ready = coordinator.wait_for("ready")
        coordinator.wait_for("connected")
    coordinator.wait_for("disconnected")
    with httpx.Client(base_url=ready["api"], timeout=20) as api:
        order(api, "extend", rounds=2)
        assert coordinator.wait_for("failed")["again_in_s"] > 0
        with serving_mosquitto(tmp_path, port=int(url.rpartition(":")[2])):
            agents = one.agents(url)
            coordinator.wait_for("round-closed", round=3)
            assert coordinator.end() == 0
            assert agents.end() == 0


def test_a_device_is_shut_out_and_let_in_again(fleet, a_run):
    one = with_api(fleet(a_run("fedavg", rounds=4, epochs=3)))
    coordinator = one.serve()
    ready = coordinator.wait_for("ready")
    with httpx.Client(base_url=ready["api"], timeout=20) as api:
        with in_the_first_round(one, coordinator, ready, api) as agents:
            order(api, "pause")
        coordinator.wait_for("round-closed", round=1)
        order(api, "devices/dora/quarantine", reason="lent to a stranger")
        (out,) = api.get("/api/v1/fleets/watch/quarantine").json()
        assert (out["device"], out["quarantine"]) == ("dora", "lent to a stranger")
        with agents.stopped():
            order(api, "resume")
            assert coordinator.wait_for("round-opened", round=2)["cohort"] == 3
            order(api, "devices/dora/release")
        assert api.get("/api/v1/fleets/watch/quarantine").json() == []
        assert "not in quarantine" in order(api, "devices/dora/release", 409)["detail"]
        assert coordinator.wait_for("round-opened", round=3)["cohort"] == 4


def test_a_crash_below_python_tells_where_it_was(fleet):
    coordinator = fleet().serve()
    coordinator.wait_for("ready")
    coordinator.process.send_signal(signal.SIGSEGV)
    assert coordinator.end() == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in coordinator.errors
    assert re.search(r'talaria_coordinator/cli/main.py", line \d+ in serve', coordinator.errors)
    assert coordinator.errors.count("(most recent call first)") == 1  # no other thread's, which may have run on


def test_a_port_that_is_taken_ends_it_with_one_clear_message(fleet):
    with socket.create_server(("127.0.0.1", 0)) as other:
        one = with_api(fleet(), port=other.getsockname()[1])
        coordinator = one.serve()
        assert coordinator.end() == 1
    assert "give [api] another port" in coordinator.errors
    assert "Traceback" not in coordinator.errors


def test_a_token_is_asked_for_and_stands_in_no_log(fleet, a_run):
    one = fleet(a_run("fedavg", rounds=1))
    token = one.folder / "api.token"
    token.write_text("0123456789abcdef0123456789abcdef\n")
    token.chmod(0o600)
    with_api(one, token_file=str(token))
    coordinator = one.serve()
    ready = coordinator.wait_for("ready")
    assert httpx.get(f"{ready['api']}/api/v1/fleets").status_code == 401
    right = {"Authorization": "Bearer 0123456789abcdef0123456789abcdef"}
    coordinator.wait_for("connected")  # it has entered its fleet, once it knew that nobody else serves it
    assert httpx.get(f"{ready['api']}/api/v1/fleets", headers=right).json()[0]["name"] == "watch"
    coordinator.close()
    assert "0123456789abcdef" not in json.dumps(coordinator.events) + coordinator.errors


def test_every_event_of_the_journal_names_its_fleet_and_what_it_is_about(fleet, a_run):
    one = fleet(a_run("fedavg", rounds=1))
    coordinator = one.serve()
    agents = one.agents(coordinator.wait_for("ready")["broker"])
    assert (coordinator.end(), agents.end()) == (0, 0)
    about = {"progress": {"attempt", "device"}, "round-opened": {"attempt"}, "round-closed": {"attempt"},
             "device-up": {"device"}, "device-down": {"device"}}  # fmt: skip
    # The coordinator may leave once both devices have said goodbye, before they are down.
    assert {event["event"] for event in coordinator.events} >= set(about) - {"device-down"}
    for event in coordinator.events:
        assert {"at", "fleet", "event"} | about.get(event["event"], set()) <= set(event)


@pytest.mark.parametrize("asked", [signal.SIGTERM, signal.SIGHUP])
def test_who_is_told_to_end_says_so_and_has_not_failed(fleet, a_run, asked):
    """SIGHUP is what a terminal that is closed sends; a service manager takes other statuses than 0 for a failure."""
    one = fleet(a_run("fedavg", rounds=3), devices=("anna", "bela"))
    coordinator = one.serve()
    agent = one.agents(coordinator.wait_for("ready")["broker"], "anna")
    agent.wait_for("connected")
    for program in (agent, coordinator):
        program.process.send_signal(asked)
        assert program.end() == 0
        assert program.events[-1]["event"] == "stopped"
        assert "Traceback" not in program.errors


def buffered():
    """Python keeps what a file or pipe is to take, and tries once more when it ends, unless this says otherwise."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


@pytest.mark.parametrize("log", [">/dev/full", ">&-"])
def test_a_log_that_nobody_can_write_takes_no_program_along(fleet, a_run, log):
    """As of a disk that is full, or of a terminal that is gone."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    one = fleet(a_run("fedavg", rounds=2), devices=("anna", "bela"), port=port)
    files = [one.device_config(device, f"mqtt://127.0.0.1:{port}") for device in one.devices]
    told = ["sh", "-c", f'exec "$@" {log}', "sh", sys.executable, "-m", "talaria"]
    programs = [
        subprocess.Popen([*told, *map(str, words)], stderr=subprocess.PIPE, text=True, env=buffered())
        for words in (["coordinator", "serve", one.config], ["edge", "run", *files])
    ]
    try:
        for program in programs:
            _, errors = program.communicate(timeout=90)
            assert (program.returncode, "Traceback" in errors) == (0, False), errors
    finally:
        for program in programs:
            program.kill()
    assert tensors.equal(one.shared(), one.simulated().shared)


def test_what_a_full_disk_does_not_take_of_a_command_is_told_without_a_traceback(tmp_path):
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "talaria", "algorithms", "--json"]
        done = subprocess.run(
            words, check=False, stdout=full, stderr=subprocess.PIPE, text=True, timeout=90, env=buffered()
        )
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


def test_who_is_started_by_nohup_goes_on_without_its_terminal(monkeypatch):
    monkeypatch.setattr(signal, "getsignal", {signal.SIGHUP: signal.SIG_DFL}.get)
    assert signal.SIGHUP in stopping.asked_by()
    monkeypatch.setattr(signal, "getsignal", {signal.SIGHUP: signal.SIG_IGN}.get)
    assert stopping.asked_by() == [signal.SIGTERM, signal.SIGINT]
