"""A fleet that waits says how many are missing, and who; one that could never be complete says so at the start."""

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

from talaria.federated.fedbuff_run import Buffering
from talaria.federated.run import Run
from talaria.model.spec import ModelSpec
from talaria.protocol.coordinator.state import Attempt, Participant, Peer
from talaria_coordinator.cli.status import read_status, render
from talaria_coordinator.config.fleet import FleetConfig
from talaria_coordinator.fleet.scheduler import Conductor
from talaria_coordinator.fleet.waiting import AFTER_S, EVERY_S, GATHER_S, NAMED, Gathering, Patience, waits
from talaria_coordinator.server.open_state import held
from talaria_coordinator.storage.devices import Devices, Sight
from talaria_coordinator.storage.records import Device
from talaria_coordinator.storage.store import Store


def config(state=".", **changes):
    run = Run(spec=ModelSpec("imu_cnn", (6, 32), 3), algorithm="fedavg")
    return FleetConfig(name="watch", run=run, state=state, **changes)


def device(name, quarantine=None):
    return Device("watch", name, 1, True, {}, 0.0, 0.0, quarantine)


def test_members_that_never_came_are_named():
    named = config(members=("anna", "bela", "carl"))
    found = waits(named.draw, 1, (), [device("anna"), device("bela", "lied"), device("eve")], {"anna"})
    assert (found.here, found.needed, found.missing) == (1, 3, ("bela", "carl"))
    assert "1 of 3 devices have come" in found.reason
    assert "in quarantine: bela" in found.reason
    assert waits(named.draw, 1, (), [device(n) for n in named.members], ()) is None


def test_devices_that_have_no_names_yet_are_counted():
    found = waits(config(devices=300).draw, 1, (), [device(f"d{i}") for i in range(248)], ())
    assert (found.here, found.needed, found.missing) == (248, 300, ())
    assert "248 of 300 devices have come" in found.reason


def test_who_left_before_learning_began_has_not_come():
    """The fleet waited for another device, as it should, and said nothing of that."""
    devices = [device("anna"), device("bela"), replace(device("carl"), retired=1.0)]
    found = waits(config(devices=3).draw, 1, (), devices, {"anna", "bela", "carl"})
    assert (found.here, found.needed, found.missing) == (2, 3, ())
    assert "2 of 3 devices have come" in found.reason
    assert "left for good: carl" in found.reason
    named = waits(config(members=("anna", "bela", "carl")).draw, 1, (), devices, {"anna", "bela", "carl"})
    assert (named.here, named.needed, named.missing) == (2, 3, ("carl",))
    assert "left for good: carl" in named.reason


def test_who_is_away_is_named_once_the_roster_stands():
    half = config(devices=4)
    roster = ("a", "b", "c", "d")
    devices = [*map(device, "abc"), device("d", "lied")]
    found = waits(half.draw, 3, roster, devices, {"a"})
    assert (found.here, found.needed, found.missing) == (1, 2, ("b", "c"))
    assert "1 of the 3 devices" in found.reason
    assert waits(half.draw, 3, roster, devices, {"a", "b"}) is None
    assert "in quarantine" in waits(half.draw, 3, roster, [device(n, "lied") for n in roster], set(roster)).reason
    many = config(members=tuple(f"d{i:03}" for i in range(99)))
    assert waits(many.draw, 1, (), [], ()).facts()["missing"][NAMED:] == [f"and {99 - NAMED} more"]


def test_it_is_told_after_a_while_and_then_each_minute():
    one = Patience()
    told = [now for now in range(200) if one.due(now)]
    assert told == [AFTER_S, AFTER_S + EVERY_S, AFTER_S + 2 * EVERY_S, AFTER_S + 3 * EVERY_S]
    one.over(200)
    assert [now for now in range(200, 300) if one.due(now)] == [245], "no sooner than a minute after the last time"
    one.over(310)
    assert not one.due(310)
    assert one.due(310 + AFTER_S)


def test_a_fleet_begins_without_members_that_do_not_come_while_a_quorum_is_here():
    named, one = config(members=("anna", "bela", "carl"), quorum=0.6), Gathering()
    assert not one.over(named.draw, 1, {"anna"}, {"anna"}, 0.0)
    assert not one.over(named.draw, 1, {"anna"}, {"anna"}, 2 * GATHER_S), "one of three is no quorum"
    assert not one.over(named.draw, 1, {"anna", "bela", "eve"}, {"anna", "bela"}, 2 * GATHER_S), "somebody new came"
    assert not one.over(named.draw, 1, {"anna", "bela"}, {"anna", "bela"}, 3 * GATHER_S - 1)
    assert not one.over(named.draw, 1, {"anna", "bela"}, {"anna"}, 3 * GATHER_S)
    assert one.over(named.draw, 1, {"anna", "bela"}, {"anna", "bela"}, 3 * GATHER_S)
    everybody = config(members=named.members, quorum=1.0)
    assert not one.over(everybody.draw, 1, {"anna", "bela"}, {"anna", "bela"}, 9 * GATHER_S)


def test_status_says_who_is_missing(tmp_path, capsys):
    named = config(tmp_path, members=("anna", "bela"))
    with Store(tmp_path / "coordinator.db") as store:
        store.fleets.enter("watch", named.run.to_json(), "0" * 64, "0" * 64)
        store.devices.see("watch", Sight("anna", 1, {}))
    found = read_status(named)
    assert found["waiting"]["missing"] == ["bela"]
    render(found)
    assert "waiting: 1 of 2 devices have come" in capsys.readouterr().out
    with Store(tmp_path / "coordinator.db") as store:
        store.devices.see("watch", Sight("bela", 1, {}))
    assert read_status(named)["waiting"] is None
    prepared = replace(named.run, seed=9, rounds=named.run.rounds + 5)
    assert read_status(replace(named, run=prepared))["rounds"] == named.run.rounds, "[run] has what is to follow it"
    with Store(tmp_path / "coordinator.db") as store:
        store.fleets.set_roster("watch", ["anna", "bela", "carl", "dora"])
        store.devices.see("watch", Sight("bela", 1, {}, online=False))
    assert read_status(named)["waiting"]["missing"] == ["bela", "carl", "dora"]
    buffered = replace(named, run=replace(prepared, asynchronous=True), buffering=Buffering(buffer=2))
    assert read_status(buffered)["waiting"]["missing"] == ["bela", "carl", "dora"], "rounds are learned, not buffers"


def test_status_says_whether_a_coordinator_serves(tmp_path, capsys):
    named = config(tmp_path, members=("anna",))
    with Store(tmp_path / "coordinator.db") as store:
        store.fleets.enter("watch", named.run.to_json(), "0" * 64, "0" * 64)
        store.devices.see("watch", Sight("anna", 1, {}))

    def told():
        found = read_status(named)
        render(found)
        text = capsys.readouterr().out
        return found["served"], [word for word in ("no coordinator serves it now", " yes ", " was ") if word in text]

    assert told() == (None, [" yes "])  # its state folder is of another machine: nobody here ever had it
    with held(tmp_path):
        assert told() == (True, [" yes "])
    assert told() == (False, ["no coordinator serves it now", " was "])


def test_a_fleet_that_waits_reads_the_record_of_all_devices_only_where_one_may_take_a_place(tmp_path, monkeypatch):
    """It looks at each word of a device: with somebody shut out, thousands of records were read each time."""
    fleet, known = config(tmp_path, devices=3), ("anna", "bela", "carl")
    hands = SimpleNamespace(tell=lambda *_, **__: None, feed=lambda _: None)
    learning = SimpleNamespace(first=lambda: ("0" * 64, "0" * 64))
    with Store(tmp_path / "coordinator.db") as store:
        conductor = Conductor(fleet, store, learning, hands, 1.0)
        state = conductor.begin()
        store.devices.see("watch", *(Sight(name, 1, {}) for name in known))
        store.devices.quarantine("watch", "carl", "lied")
        state.peers["carl"] = Peer(out="lied")
        store.fleets.set_roster("watch", known)
        conductor.refresh()
        read, of = [], Devices.of
        monkeypatch.setattr(Devices, "of", lambda self, fleet: read.append(fleet) or of(self, fleet))
        for _ in range(3):
            conductor.advance(state)
        assert (read, conductor.fleet.roster) == ([], known)
        store.devices.see("watch", Sight("dora", 1, {}))
        for _ in range(3):
            conductor.advance(state)
        assert (len(read), conductor.fleet.roster) == (1, ("anna", "bela", "dora"))


def test_a_fleet_of_which_all_decline_for_days_is_tried_again_and_again(tmp_path):
    """The pause between two tries was a power of two of all failures in a row, which no float holds after 34 hours."""
    told = []
    hands = SimpleNamespace(tell=lambda _, **facts: told.append(facts["again_in_s"]), feed=lambda _: None)
    learning = SimpleNamespace(first=lambda: ("0" * 64, "0" * 64))
    with Store(tmp_path / "coordinator.db") as store:
        conductor = Conductor(config(tmp_path, devices=1), store, learning, hands, 1.0)
        conductor.begin()
        for _ in range(1100):
            conductor.failed(1, "0 of at least 1 updates came")
    assert (told[:4], told[-1]) == ([2.0, 4.0, 8.0, 16.0], 120.0)


def test_a_buffer_that_a_device_learns_for_still_is_kept_however_many_were_carried_over_since(tmp_path):
    """As one that took it in the evening, and comes back in the morning: its update could not be entered, ever."""
    hands = SimpleNamespace(tell=lambda *_, **__: None, feed=lambda _: None)
    learning = SimpleNamespace(first=lambda: ("0" * 64, "0" * 64))
    with Store(tmp_path / "coordinator.db") as store:
        conductor = Conductor(config(tmp_path, devices=1), store, learning, hands, 1.0)
        state = conductor.begin()
        for number in range(1, 131):
            assert store.attempts.open("watch", 1, ("anna", "bela"), "0" * 64).attempt == number
            if number == 7:
                taken = {"anna": Participant(b"", "working")}
                state.attempts[7] = Attempt(7, 0, bytes(32), None, 1, 2, 20, taken, "carried")
            conductor.failed(number, "1 of at least 2 updates came")
        assert [row.attempt for row in store.attempts.of("watch")] == [7, *range(31, 131)]


LIMITED = """
import resource, sys
from talaria.errors import ConfigError
from talaria_coordinator.broker import open_broker
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
try:
    with open_broker("mosquitto", devices=300):
        print("soft", resource.getrlimit(resource.RLIMIT_NOFILE)[0])
except ConfigError as error:
    print(error)
"""


def limited(soft, hard):
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(soft), str(hard)], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_too_few_open_files_for_the_devices_expected_are_told_at_the_start():
    said = limited(200, 256)
    for part in ("300 devices need 428 open files", "may have 256", "LimitNOFILE=", "ulimit -Hn"):
        assert part in said


def test_a_limit_that_may_be_raised_is_raised():
    assert "soft 428" in limited(200, 1024)
