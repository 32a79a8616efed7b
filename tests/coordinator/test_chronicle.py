"""What a fleet has lived through, from its audit log: as moments, lines and a page."""

import json
import re
from xml.etree import ElementTree

import pytest

from talaria.cli.main import main
from talaria.federated.run import Run
from talaria.model.spec import ModelSpec
from talaria_coordinator.cli import report
from talaria_coordinator.config.fleet import Canary, FleetConfig
from talaria_coordinator.fleet.chronicle import KINDS, chronicle
from talaria_coordinator.fleet.life import carry_out, judge, learning_of
from talaria_coordinator.fleet.operator_commands import Order
from talaria_coordinator.maintenance.backup import back_up
from talaria_coordinator.maintenance.restore import restore
from talaria_coordinator.storage.blobs import FolderBlobs
from talaria_coordinator.storage.devices import Sight
from talaria_coordinator.storage.store import Store

MEMBERS = ("anna", "bela", "carl")
CONFIG = """
[fleet]
name = "watch"
devices = 3
state = "after"
[run]
algorithm = "fedavg"
rounds = 1
[run.spec]
name = "imu_cnn"
input_shape = [6, 32]
classes = 3
"""


@pytest.fixture
def lived(tmp_path):
    """A fleet.toml whose store tells of all that can happen to a fleet."""
    run = Run(spec=ModelSpec("imu_cnn", (6, 32), 3), algorithm="fedavg", rounds=1)
    config = FleetConfig(name="watch", run=run, state=tmp_path, devices=3, grows=True, canary=Canary(share=0.4))
    blobs = FolderBlobs(tmp_path / "blobs")
    with Store(tmp_path / "coordinator.db") as store:

        def give(verb, *words, **facts):
            carry_out(Order(verb, *words, **facts), store.fleets.get("watch"), config, store, blobs)

        def round_():
            fleet = store.fleets.get("watch")
            row = store.attempts.open("watch", fleet.round + 1, fleet.roster, fleet.model_digest)
            facts = {"model_digest": fleet.model_digest, "server": fleet.server, "epoch": fleet.epoch}
            store.attempts.commit("watch", row.attempt, counted=[], **facts)

        store.fleets.enter("watch", run.to_json(), *learning_of(config, run, blobs).first())
        for name in MEMBERS:
            store.devices.see("watch", Sight(name, 1, {}))
        store.fleets.set_roster("watch", MEMBERS)
        give("pause", reason="the \x1b[31mseason")
        give("resume")
        round_()
        give("next", rounds=2)
        round_()
        round_()
        assert judge(store.fleets.get("watch"), store)["called_off"]
        give("next", rounds=3)
        tried = store.fleets.get("watch").life.canary
        for name in tried["members"]:
            store.devices.see("watch", Sight(name, 1, {"gate": {"run": tried["identity"][:16], "deployed": True}}))
        round_()
        round_()
        assert not judge(store.fleets.get("watch"), store)["called_off"]
        give("retire", "carl", reason="<sold>")
        round_()
        give("extend", rounds=1)
        back_up(store, blobs, tmp_path / "monday")
    after = FolderBlobs(tmp_path / "after" / "blobs")
    restore(tmp_path / "after" / "coordinator.db", after, tmp_path / "monday")
    with Store(tmp_path / "after" / "coordinator.db") as store:
        carry_out(Order("readmit", "carl"), store.fleets.get("watch"), config, store, after)
    path = tmp_path / "fleet.toml"
    path.write_text(CONFIG)
    return path


def told(capsys, monkeypatch, *words):
    monkeypatch.setattr("sys.argv", ["talaria", "coordinator", "report", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    return capsys.readouterr().out


def test_a_fleets_story_is_told_from_its_audit_log(lived, capsys, monkeypatch):
    found = json.loads(told(capsys, monkeypatch, lived, "--json"))
    kinds = [(m["kind"], m["round"], m["members"]) for m in found["moments"]]
    assert kinds == [
        ("begin", 0, 0), ("join", 0, 3), ("pause", 0, 3), ("resume", 0, 3), ("trial", 1, 3), ("off", 3, 3),
        ("trial", 3, 3), ("passed", 5, 3), ("leave", 5, 2), ("extend", 6, 2), ("restored", 6, 2), ("join", 6, 3),
    ]  # fmt: skip
    counts = {name: found[name] for name in ("rounds", "warm_starts", "trials", "trials_passed", "trials_called_off")}
    assert counts == {"rounds": 6, "warm_starts": 2, "trials": 2, "trials_passed": 1, "trials_called_off": 1}
    assert [found[name] for name in ("joined", "retired", "readmitted", "restores", "pauses", "extended")] == [
        3, 1, 1, 1, 1, 1,
    ]  # fmt: skip
    lines = told(capsys, monkeypatch, lived).splitlines()
    assert len(lines) == 1 + len(kinds)
    assert "anna, bela, carl come" in lines[2]
    assert lines[9].endswith("carl leaves for good: <sold>")
    assert "\x1b" not in "".join(lines)
    assert "the run goes on for 1 round more, to round 7" in lines[10]
    assert "; 3 members (3 came, 1 left for good, 1 came back); 2 warm starts; 2 trials, " in lines[0]


def test_one_of_a_kind_is_told_as_one():
    events = [
        {"kind": kind, "at": float(at), "device": "anna", **facts}
        for at, (kind, facts) in enumerate([
            ("device-joined", {}), ("roster-fixed", {"roster": ["anna"]}), ("round-closed", {"round": 1}),
            ("run-followed", {"rounds": 2, "tried_by": ["anna"]}), ("canary-members", {"members": ["anna"]}),
            ("canary-passed", {"asked": 1, "answered": 1, "refused": 0}),
        ])
    ]  # fmt: skip
    head, *lines = report.lines("watch", chronicle(events)).splitlines()
    assert "1 round from" in head
    assert "; 1 member (1 came, " in head
    assert "; 1 warm start; 1 trial, 1 passed" in head
    assert ["1 member  " in line for line in lines] == [True] * 4
    assert "of 1 gate 1 answered and 0 refused" in lines[-1]


def test_the_page_shows_each_moment_and_says_nothing_that_strangers_wrote_as_html(lived, tmp_path, capsys, monkeypatch):
    told(capsys, monkeypatch, lived, "-o", tmp_path / "story.html")
    page = (tmp_path / "story.html").read_text()
    svg = ElementTree.fromstring(re.search(r"<svg viewBox=\"0 0 .*?</svg>", page)[0])
    tips = [tip.text for tip in svg.iter("title")]
    assert [tip.split(": ")[-1] for tip in tips][:2] == ["the \ufffd[31mseason", tips[1].split(": ")[-1]]
    assert len(tips) == 7  # pause, two trials, called off, passed, more rounds, restored
    assert "&lt;sold&gt;" in page
    assert "<sold>" not in page


def test_a_fleet_of_no_events_and_one_of_many_devices():
    assert report.line(chronicle([])).startswith("<svg")
    many = [{"kind": "device-joined", "at": float(i), "device": f"d{i}"} for i in range(9)]
    assert chronicle(many).moments[0].text == "9 devices come"
    assert set(KINDS) >= {event["kind"] for event in many}


def test_a_fleet_given_as_a_saved_run_is_told_where_its_story_is(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["talaria", "report", "fleet.toml"])
    with pytest.raises(SystemExit):
        main()
    assert "`talaria coordinator report fleet.toml`" in " ".join(capsys.readouterr().err.split())
