"""The store: exactly once, one commit, fenced, and a log that shows tampering; the same on SQLite and PostgreSQL."""

import json
import os
import signal
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import event
from sqlalchemy.exc import OperationalError

from talaria.errors import ConfigError, StateError
from talaria.time import Clocks, told_by
from talaria_coordinator.fleet.cohort import roster
from talaria_coordinator.storage import updates
from talaria_coordinator.storage.audit import append
from talaria_coordinator.storage.database import answering
from talaria_coordinator.storage.devices import Sight
from talaria_coordinator.storage.engine import open_engine
from talaria_coordinator.storage.store import Store
from talaria_coordinator.storage.tables import EVENTS

A, B, C = "a" * 64, "b" * 64, "c" * 64
RUN = '{"rounds": 3, "seed": 0}'


def opened(store, round=1, cohort=("a", "b")):
    return store.attempts.open("watch", round, cohort, A)


def keep(store, number, device, digest=B):
    return store.updates.keep("watch", number, device, digest=digest, size=10, base_version=0)


def note(store, **detail):
    with store.database.writing("watch") as tx:
        append(tx, "note", detail, fleet="watch")


def test_a_fleet_is_entered_with_a_new_epoch_each_time(store):
    first = store.fleets.enter("watch", RUN, A, B)
    again = store.fleets.enter("watch", RUN, C, C)
    assert first.epoch < again.epoch
    assert (again.model_digest, again.server, again.round) == (A, B, 0)
    assert [f.name for f in store.fleets.all()] == ["watch"]
    assert store.fleets.get("other") is None


def test_another_run_is_refused_with_the_difference(store):
    store.fleets.enter("watch", RUN, A, B)
    with pytest.raises(ConfigError, match=r"seed: stored 0, given 7"):
        store.fleets.enter("watch", '{"rounds": 3, "seed": 7}', A, B)
    nested = '{{"rounds": 3, "seed": 0, "recipe": {{"batch": 8, "lr": {}}}}}'
    store.fleets.enter("other", nested.format(0.02), A, B)
    with pytest.raises(
        ConfigError, match=r"\(recipe.lr: stored 0.02, given 0.5\); .*`talaria coordinator next FLEET.TOML`"
    ):
        store.fleets.enter("other", nested.format(0.5), A, B)


def test_what_the_protocol_saves_goes_to_disk_once(tmp_path):
    """However SQLite was built: some builds write zeros to each page that the last one leaves."""
    store = Store(tmp_path / "coordinator.db")
    epoch = store.fleets.enter("watch", RUN, A, B).epoch
    log, written = tmp_path / "coordinator.db-wal", []
    for length in (1_000_000, 1_010_000, 1_020_000):
        with store.database.engine.connect() as connection:
            connection.connection.driver_connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        store.fleets.save_machine("watch", epoch, os.urandom(length))
        written.append(log.stat().st_size / length)
    store.close()
    assert max(written) < 1.1, written


def test_sqlite_is_asked_to_be_durable(tmp_path):
    store = Store(tmp_path / "coordinator.db")
    with store.database.reading() as tx:
        assert tx.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert tx.exec_driver_sql("PRAGMA synchronous").scalar() == 2
    store.close()


def test_what_was_entered_survives_a_crash_of_a_lazy_postgres(postgres):
    where = postgres.database()
    postgres.sql("ALTER ROLE talaria SET synchronous_commit = off")
    try:
        store = Store(where)
        store.fleets.enter("watch", RUN, A, B)
        number = opened(store).attempt
        keep(store, number, "a")
        postgres.crash()
        with pytest.raises(StateError, match="start its server"):
            store.updates.of("watch", number)
        postgres.start()
        assert [u.device for u in store.updates.of("watch", number)] == ["a"]
        assert keep(store, number, "b").status == "stored"
        store.close()
    finally:
        postgres.sql("ALTER ROLE talaria RESET synchronous_commit")


def test_commit_names_body_and_devices_at_once(store):
    fleet = store.fleets.enter("watch", RUN, A, B)
    number = opened(store).attempt
    keep(store, number, "a"), keep(store, number, "b", C)
    store.attempts.commit(
        "watch", number, epoch=fleet.epoch, counted=[(number, "b"), (number, "a")], model_digest=C, server=A
    )
    now = store.fleets.get("watch")
    assert (now.round, now.model_digest, now.server, now.status) == (1, C, A, "running")
    (row,) = store.attempts.of("watch")
    assert row.counted == ((number, "a"), (number, "b"))
    assert row.model_digest == C
    assert {u.device: u.status for u in store.updates.of("watch", number)} == {"a": "counted", "b": "counted"}


def test_nothing_counts_twice(store):
    fleet = store.fleets.enter("watch", RUN, A, B)
    one = opened(store).attempt
    keep(store, one, "a")
    values = {"epoch": fleet.epoch, "counted": [(one, "a")], "model_digest": C, "server": A}
    store.attempts.commit("watch", one, **values)
    told = store.audit.verify()
    store.attempts.commit("watch", one, **values)  # the first answer may have been lost on the way
    assert (store.fleets.get("watch").round, store.audit.verify()) == (1, told)
    for other in ({"model_digest": "d" * 64}, {"counted": []}):
        with pytest.raises(StateError, match="not the open one"):
            store.attempts.commit("watch", one, **values | other)
    two = opened(store, round=2).attempt
    with pytest.raises(StateError, match="cannot count 'a'"):
        store.attempts.commit("watch", two, **values)
    assert store.fleets.get("watch").round == 1
    assert store.attempts.of("watch")[1].closed is None


@pytest.mark.parametrize("named", [1, 2, 500])
def test_updates_count_however_many_are_named_at_once(store, named, monkeypatch):
    monkeypatch.setattr(updates, "NAMED", named)
    fleet, names = store.fleets.enter("watch", RUN, A, B), ["a", "b", "c", "d", "e"]
    early = opened(store).attempt
    store.attempts.fail("watch", early, "slow")
    number = opened(store).attempt
    made = [(early, "a"), (early, "b"), *((number, name) for name in names)]
    for attempt, name in [*made, (number, "f")]:
        keep(store, attempt, name)
    values = {"epoch": fleet.epoch, "model_digest": C, "server": A}
    for wrong in ([*made, (number, "e")], [*made, (early, "c")]):
        with pytest.raises(StateError, match=f"cannot count '{wrong[-1][1]}'"):
            store.attempts.commit("watch", number, counted=wrong, **values)
    store.attempts.commit("watch", number, counted=made, **values)
    found = [one for attempt in (early, number) for one in store.updates.of("watch", attempt)]
    assert sorted((one.attempt, one.device) for one in found if one.status == "counted") == sorted(made)


def test_a_commit_with_a_missing_update_changes_nothing(store):
    fleet = store.fleets.enter("watch", RUN, A, B)
    number = opened(store).attempt
    keep(store, number, "a")
    with pytest.raises(StateError, match="cannot count 'b'"):
        store.attempts.commit(
            "watch",
            number,
            epoch=fleet.epoch,
            counted=[(number, "a"), (number, "b")],
            model_digest=C,
            server=A,
        )
    assert store.updates.of("watch", number)[0].status == "stored"
    assert store.fleets.get("watch").model_digest == A


def test_epochs_count_from_the_clock_so_that_a_lost_store_does_not_repeat_one(store, tmp_path):
    first = store.fleets.enter("watch", RUN, A, B)
    with Store(tmp_path / "begun anew") as other:
        anew = other.fleets.enter("watch", RUN, A, B)
        assert anew.epoch > first.epoch
        ahead = anew.epoch + 10**9  # days, as a clock that was wrong may be
        assert other.fleets.enter("watch", RUN, A, B, above=ahead).epoch == ahead + 1
    with told_by(Clocks(wall=lambda: 0.0)):  # a clock that was never set
        assert store.fleets.enter("watch", RUN, A, B).epoch == first.epoch + 1


def test_a_fleet_that_declines_all_day_does_not_fill_the_disk(store):
    """A thousand devices, asked again each two minutes: 720 tries a day."""
    cohort = [f"device-{i:04}" for i in range(1000)]
    store.fleets.enter("watch", RUN, A, B)
    for _ in range(150):
        store.attempts.fail("watch", store.attempts.open("watch", 1, cohort, A).attempt, "all declined")
    assert [row.attempt for row in store.attempts.of("watch")] == list(range(51, 151))
    with store.database.reading() as tx:
        told = sum(len(row.detail) for row in tx.execute(EVENTS.select()))
    assert told < 150 * 1000, f"{told / 150:.0f} bytes a try in the audit log"
    store.audit.verify()
    assert store.attempts.open("watch", 1, cohort, A).attempt == 151


def test_a_server_that_falls_silent_in_mid_transaction_is_given_up_and_asked_again(postgres, monkeypatch):
    """SIGSTOP: its sockets stay open, and its kernel answers for it."""
    monkeypatch.setattr("talaria_coordinator.storage.engine.SILENCE_S", 1.0)
    with Store(postgres.database()) as store:
        store.fleets.enter("watch", RUN, A, B)
        with pytest.raises(StateError, match="no answer from the server within 1 s"):
            falls_silent(store)
        pid = store_pid(store)
        os.kill(pid, signal.SIGSTOP)  # between two transactions nobody needs to know
        try:
            store.fleets.set_status("watch", "paused")
        finally:
            os.kill(pid, signal.SIGCONT)
        assert store.fleets.get("watch").status == "paused"


@pytest.mark.parametrize(
    ("cause", "mend"),
    [
        ("database or disk is full", "free space"),
        ("cannot set transaction read-write mode during recovery", "let its server write"),
        ("unable to open database file", "let this user write its folder"),
        ("database is locked", "another program holds it"),
        ("database disk image is malformed", "talaria coordinator fsck"),
        ("server closed the connection unexpectedly", "start its server"),
        ('connection to server failed: FATAL:  too many connections for role "t"', "let it and this role have more"),
        ("permission denied for table fleets", "give its user the rights"),
        ('connection to server failed: FATAL:  password authentication failed for user "t"', "password_file"),
        ('connection to server failed: FATAL:  database "t" does not exist', "name the database that holds"),
        ("table x has no column y", "mend what its words say"),
    ],
)
def test_a_refusal_says_where_and_what_helps_against_its_cause(cause, mend, tmp_path):
    engine = open_engine(tmp_path / "coordinator.db")

    def refuse():
        with answering(engine):
            raise OperationalError("", {}, Exception(cause)) from Exception(cause)

    with pytest.raises(StateError, match=mend) as told:
        refuse()
    assert str(told.value).startswith(f"store {tmp_path / 'coordinator.db'}: the database refused")
    assert ("free space" in str(told.value)) == (mend == "free space")


def falls_silent(store):
    with store.database.writing("watch") as tx:
        pid = tx.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
        os.kill(pid, signal.SIGSTOP)
        try:
            tx.exec_driver_sql("SELECT 1")
        finally:
            os.kill(pid, signal.SIGCONT)


def store_pid(store):
    with store.database.reading() as tx:
        return tx.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()


def test_who_falls_silent_within_a_transaction_is_put_out_before_others_give_up(postgres):
    with Store(postgres.database()) as store, store.database.reading() as tx:
        idle, lock = (
            int(tx.exec_driver_sql(f"SELECT setting FROM pg_settings WHERE name = '{name}'").scalar_one())
            for name in ("idle_in_transaction_session_timeout", "lock_timeout")
        )
    assert 0 < idle < lock


def test_an_older_coordinator_is_fenced(store):
    old = store.fleets.enter("watch", RUN, A, B)
    number = opened(store).attempt
    new = store.fleets.enter("watch", RUN, A, B)
    with pytest.raises(StateError, match=rf"another coordinator has it \(epoch {new.epoch}, ours {old.epoch}\)"):
        store.attempts.commit("watch", number, epoch=old.epoch, counted=[], model_digest=C, server=A)
    with pytest.raises(StateError, match="another coordinator"):
        store.fleets.save_machine("watch", old.epoch, b"state")
    assert store.fleets.machine("watch") is None


def test_the_first_update_stays(store):
    store.fleets.enter("watch", RUN, A, B)
    number = opened(store).attempt
    assert keep(store, number, "a", B).digest == B
    assert keep(store, number, "a", C).digest == B
    store.updates.equivocation("watch", number, "a", B, C)
    store.updates.equivocation("watch", number, "a", B, C)
    assert store.updates.equivocations("watch") == [(number, "a", C)]
    rejected = store.updates.reject("watch", number, "b", digest=C, size=3, base_version=0, reason="NaN in head.weight")
    assert (rejected.status, rejected.reason) == ("rejected", "NaN in head.weight")
    assert keep(store, number, "b", C).status == "rejected"


def test_updates_that_wait_are_entered_together_and_one_at_fault_fails_alone(store):
    store.fleets.enter("watch", RUN, A, B)
    number, names, commits = opened(store).attempt, [f"d{i}" for i in range(9)], []
    event.listen(store.database.engine, "commit", commits.append)
    with ThreadPoolExecutor(10) as threads:
        with store.database.line:
            kept = [threads.submit(keep, store, number, name) for name in names]
            stray = threads.submit(keep, store, number + 7, "d0")  # there is no such round
            while len(store.updates._brought) < 10:
                time.sleep(0.001)
        assert [one.result().device for one in kept] == names
        with pytest.raises(StateError):
            stray.result()
        assert len(commits) == len(names)
        commits.clear()
        with store.database.line:
            again = [threads.submit(keep, store, number, name, C) for name in names]
            while len(store.updates._brought) < 9:
                time.sleep(0.001)
        assert {one.result().digest for one in again} == {B}
        assert len(commits) == 1
    assert [row.device for row in store.updates.of("watch", number)] == names
    assert store.audit.verify() == 2 + len(names)
    assert store.updates._brought == []


def test_a_failed_round_is_tried_again_under_a_new_number(store):
    fleet = store.fleets.enter("watch", '{"rounds": 1, "seed": 0}', A, B)
    first = opened(store)
    store.attempts.fail("watch", first.attempt, "1 of at least 2 updates came")
    second = opened(store)
    assert (first.attempt, first.round, second.attempt, second.round) == (1, 1, 2, 1)
    with pytest.raises(StateError, match="not the open one"):
        store.attempts.commit("watch", 1, epoch=fleet.epoch, counted=[], model_digest=C, server=A)
    keep(store, 2, "a")
    store.attempts.commit("watch", 2, epoch=fleet.epoch, counted=[(2, "a")], model_digest=C, server=A)
    assert store.fleets.get("watch").status == "done"
    store.fleets.set_status("watch", "paused")  # ordered while it was committed
    assert store.fleets.get("watch").status == "done"
    assert [r.failure for r in store.attempts.of("watch")] == ["1 of at least 2 updates came", None]


def test_a_device_that_was_enrolled_anew_shows_online_though_it_counts_its_boots_from_one(store):
    store.fleets.enter("watch", RUN, A, B)
    store.devices.see("watch", Sight("a", 3, {"cpu": "arm"}))
    store.devices.see("watch", Sight("a", 3, {}, online=False))
    (device,) = store.devices.of("watch")
    assert (device.boot, device.online, device.profile) == (3, False, {"cpu": "arm"})
    store.devices.see("watch", Sight("a", 1, {"cpu": "arm64"}))
    (device,) = store.devices.of("watch")
    assert (device.boot, device.online, device.profile) == (1, True, {"cpu": "arm64"})


def test_devices_that_come_and_go_at_once_are_one_transaction(store):
    """A thousand that come back with their broker were a thousand; what is recorded is the same."""
    store.fleets.enter("watch", RUN, A, B)
    store.devices.see("watch", Sight("b", 1, {"gate": {"run": "r"}}))
    seen = [Sight("a", 1, {"cpu": "arm"}), Sight("b", 2, {"cpu": "arm64"}), Sight("a", 1, {}, online=False)]
    with pytest.raises(TypeError):
        store.devices.see("watch", *seen, Sight("c", 1, {"cpu": object()}))
    assert [device.device for device in store.devices.of("watch")] == ["b"]
    store.devices.see("watch", *seen)
    assert [(d.device, d.boot, d.online, d.profile) for d in store.devices.of("watch")] == [
        ("a", 1, False, {"cpu": "arm"}),
        ("b", 2, True, {"gate": {"run": "r"}, "cpu": "arm64"}),
    ]
    joined = [event["device"] for event in store.audit.events("watch") if event["kind"] == "device-joined"]
    assert joined == ["b", "a"]
    store.audit.verify()


def test_as_many_are_able_as_a_roster_is_made_of(store):
    store.fleets.enter("watch", RUN, A, B)
    assert store.devices.able("watch") == 0
    store.devices.see("watch", *(Sight(name, 1, {}, online=name != "d") for name in "abcd"))
    for many, change in (
        (4, lambda: None),
        (3, lambda: store.devices.quarantine("watch", "a", "5 damaged chunks")),
        (2, lambda: store.devices.retire("watch", "b", True)),
        (3, lambda: store.devices.quarantine("watch", "a", None)),
        (4, lambda: store.devices.retire("watch", "b", False)),
    ):
        change()
        found = store.devices.of("watch")
        assert store.devices.able("watch") == many == len(roster((), many, found))
        assert roster((), many + 1, found) == ()
    assert store.devices.able("other") == 0


def test_devices_are_found_by_what_their_profile_says_and_by_having_left(store):
    store.fleets.enter("watch", RUN, A, B)
    store.devices.see("watch", Sight("a", 1, {"gate": {"run": "12ab"}}), Sight("b", 1, {}), Sight("c", 1, {"x": "12a"}))
    store.devices.retire("watch", "b", True)
    assert [device.device for device in store.devices.naming("watch", "12ab")] == ["a"]
    assert (store.devices.naming("watch", "1%b"), store.devices.naming("other", "12a")) == ([], [])
    assert (store.devices.retired("watch"), store.devices.retired("other")) == ({"b"}, set())


def test_a_coordinator_that_starts_takes_nobody_for_here_before_it_hears_them(store):
    """A device may have gone meanwhile, and a backup is older than that."""
    store.fleets.enter("watch", RUN, A, B)
    store.devices.see("watch", Sight("a", 3, {"cpu": "arm"}))
    store.fleets.enter("watch", RUN, A, B)
    (device,) = store.devices.of("watch")
    assert (device.boot, device.online, device.profile) == (3, False, {"cpu": "arm"})


def test_a_device_in_quarantine_keeps_its_profile(store):
    store.fleets.enter("watch", RUN, A, B)
    store.devices.see("watch", Sight("a", 3, {"cpu": "arm"}))
    store.devices.see("watch", Sight("a", 3, {}, online=False))
    store.devices.quarantine("watch", "a", "5 damaged chunks")
    (device,) = store.devices.of("watch")
    assert (device.online, device.profile, device.quarantine) == (False, {"cpu": "arm"}, "5 damaged chunks")
    store.devices.quarantine("watch", "a", None)
    assert store.devices.of("watch")[0].quarantine is None


def test_machine_is_kept(store):
    epoch = store.fleets.enter("watch", RUN, A, B).epoch
    store.fleets.save_machine("watch", epoch, b"one")
    store.fleets.save_machine("watch", epoch, b"two")
    assert store.fleets.machine("watch") == b"two"


def test_blobs_in_use(store):
    epoch = store.fleets.enter("watch", RUN, A, B).epoch
    number = opened(store).attempt
    keep(store, number, "a", C)
    assert store.blobs_in_use() == {A, B, C}
    store.attempts.commit("watch", number, epoch=epoch, counted=[(number, "a")], model_digest="d" * 64, server=B)
    assert C not in store.blobs_in_use()


def test_what_came_for_a_round_that_failed_or_came_too_late_is_kept_no_longer(store):
    """A fleet whose rounds fail, or ask more devices than they need, filled the disk: nothing names these any more."""
    epoch = store.fleets.enter("watch", RUN, A, B).epoch
    failed, closed = opened(store).attempt, opened(store).attempt
    keep(store, failed, "a", C)
    store.attempts.fail("watch", failed, "1 of at least 2 updates came")
    keep(store, closed, "a", "d" * 64)
    keep(store, closed, "b", "e" * 64)
    facts = {"epoch": epoch, "counted": [(closed, "a")], "model_digest": A, "server": B}
    store.attempts.commit("watch", closed, **facts)
    assert store.blobs_in_use() == {A, B}


def test_what_a_buffer_holds_that_is_carried_over_is_kept(store):
    store.fleets.enter("watch", '{"rounds": 3, "seed": 0, "asynchronous": true}', A, B)
    number = opened(store).attempt
    keep(store, number, "a", C)
    store.attempts.fail("watch", number, "1 of at least 2 updates came")
    assert store.blobs_in_use() == {A, B, C}


def test_the_log_shows_tampering(store, place):
    store.fleets.enter("watch", RUN, A, B)
    opened(store)
    note(store, text="hello")
    assert store.audit.verify() == 3
    assert [e["kind"] for e in store.audit.events("watch")] == ["fleet-created", "round-opened", "note"]
    place.sql("UPDATE events SET detail = '{}' WHERE seq = 2")
    with pytest.raises(StateError, match="event 2 of the audit log was altered"):
        store.audit.verify()


def test_an_event_that_was_taken_out_is_missed(store, place):
    store.fleets.enter("watch", RUN, A, B)
    opened(store)
    note(store, text="hello")
    place.sql("DELETE FROM events WHERE seq = 2")
    with pytest.raises(StateError, match="event 3 of the audit log was altered"):
        store.audit.verify()


def test_every_write_of_an_older_coordinator_is_refused(place):
    with place.open() as old, place.open() as new:
        old.fleets.enter("watch", RUN, A, B)
        number = opened(old).attempt
        old.devices.see("watch", Sight("a", 1, {}))
        new.fleets.enter("watch", RUN, A, B)
        before = (new.attempts.of("watch"), new.devices.of("watch"), new.audit.verify())
        for write in (
            lambda: old.fleets.set_status("watch", "paused"),
            lambda: old.fleets.set_roster("watch", ["a"]),
            lambda: opened(old, 2),
            lambda: old.attempts.fail("watch", number, "late"),
            lambda: old.devices.see("watch", Sight("b", 1, {})),
            lambda: old.devices.quarantine("watch", "a", "late"),
            lambda: keep(old, number, "a"),
            lambda: old.updates.reject("watch", number, "a", digest=B, size=1, base_version=0, reason="late"),
            lambda: old.updates.equivocation("watch", number, "a", A, B),
            lambda: note(old),
        ):
            with pytest.raises(StateError, match=r"another coordinator has it \(epoch \d+, ours \d+\)"):
                write()
        assert before == (new.attempts.of("watch"), new.devices.of("watch"), new.audit.verify())
        assert keep(new, number, "a").status == "stored"


def test_events_are_told_oldest_first_and_without_the_details_that_nobody_wants(store):
    store.fleets.enter("watch", RUN, A, B)
    opened(store)
    store.devices.see("watch", *(Sight(f"d{i}", i, {}) for i in range(1, 250)))
    every = store.audit.events("watch", last=10**9)
    assert [event["seq"] for event in every] == list(range(1, 252))
    brief = store.audit.events("watch", last=10**9, without=("boot", "cohort"))
    assert brief == [{k: v for k, v in event.items() if k not in ("boot", "cohort")} for event in every] != every
    assert store.audit.events("watch", 2) == every[-2:]


def test_rounds_are_found_by_what_became_of_them(store):
    fleet = store.fleets.enter("watch", RUN, A, B)
    numbers = [opened(store).attempt]
    store.attempts.fail("watch", numbers[0], "nobody came")
    for round, devices in ((1, "ab"), (2, "a")):
        numbers.append(opened(store, round).attempt)
        counted = [(keep(store, numbers[-1], device) and numbers[-1], device) for device in devices]
        store.attempts.commit("watch", numbers[-1], epoch=fleet.epoch, counted=counted, model_digest=C, server=A)
    numbers.append(opened(store, 3).attempt)
    keep(store, numbers[-1], "b")
    store.devices.see("watch", *(Sight(name, 1, {}) for name in "abc"))
    assert [row.attempt for row in store.attempts.of("watch")] == numbers
    assert [row.attempt for row in store.attempts.of("watch", last=2)] == numbers[-2:]
    assert [row.attempt for row in store.attempts.unclosed("watch")] == numbers[-1:]
    assert [row.attempt for row in store.attempts.unclosed("watch", [numbers[1], 999])] == [numbers[1], numbers[-1]]
    assert store.updates.counted_rounds("watch") == {"a": 2, "b": 1}
    assert (store.attempts.unclosed("phone"), store.updates.counted_rounds("phone")) == ([], {})


RACE = """
import json, random, sys, time
from talaria.errors import StateError
from talaria_coordinator.storage.tables import EVENTS
store, digest, epoch, won, lost = opened(sys.argv[1]), "a" * 64, 0, [], 0
print("up", flush=True)
sys.stdin.readline()

def over():
    # Twelve rounds, and however the machine divides its time, after two of the racers took the fleet back.
    with store.database.reading() as tx:
        starts = len(tx.execute(EVENTS.select().where(EVENTS.c.kind == "coordinator-started")).all())
    return store.fleets.get("watch").round >= 12 and starts >= 4

while not over():
    # Long enough for the other one to take the fleet in the midst of a round, however the machine divides its time.
    time.sleep(random.uniform(0.005, 0.02))
    try:
        if not epoch:
            epoch = store.fleets.enter("watch", sys.argv[2], digest, digest).epoch
        for row in store.attempts.of("watch"):
            if row.closed is None:
                store.attempts.fail("watch", row.attempt, "another coordinator opened it")
        round = store.fleets.get("watch").round + 1
        number = store.attempts.open("watch", round, ["a", "b"], digest).attempt
        for device in "ab":
            store.updates.keep("watch", number, device, digest=digest, size=1, base_version=round - 1)
        model = f"{round:032x}{epoch:032x}"
        store.attempts.commit("watch", number, epoch=epoch, counted=[(number, "a"), (number, "b")], model_digest=model,
                           server=digest)
        won.append([round, model])
    except StateError as error:
        if "another coordinator has it" not in str(error):
            raise
        # Let the other one learn two rounds, then take the fleet from it in the midst of the next.
        epoch, lost, until = 0, lost + 1, store.fleets.get("watch").round + 2
        while store.fleets.get("watch").round < until and not over():
            time.sleep(0.02)
        time.sleep(random.uniform(0, 0.05))
print(json.dumps([won, lost]))
store.close()
"""


def test_two_processes_race_for_one_fleet(place, store, start):
    store.fleets.enter("watch", RUN, A, B)
    racers = [start(RACE, place.text, RUN) for _ in range(2)]
    for racer in racers:
        assert racer.stdout.readline() == "up\n"
    for racer in racers:
        racer.stdin.write("go\n")
        racer.stdin.flush()
    told = [racer.communicate(timeout=120) for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0], told
    results = [json.loads(out) for out, _ in told]
    claimed = dict(pair for won, _ in results for pair in won)
    committed = [r for r in store.attempts.of("watch") if r.model_digest is not None]
    assert sorted(claimed) == list(range(1, len(committed) + 1))
    assert {r.round: r.model_digest for r in committed} == claimed
    assert sum(len(won) for won, _ in results) == len(claimed) == store.fleets.get("watch").round >= 12
    counted = [pair for r in committed for pair in r.counted]
    assert len(counted) == len(set(counted)) == 2 * len(committed)
    assert sum(lost for _, lost in results) >= 2, "they did not race"
    assert store.audit.verify() > 40


def test_writers_in_many_threads_make_one_chain(store):
    store.fleets.enter("watch", RUN, A, B)

    def write(name):
        for i in range(10):
            note(store, who=name, i=i)

    threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.audit.verify() == 41
    notes = [(e["who"], e["i"]) for e in store.audit.events("watch") if e["kind"] == "note"]
    assert sorted(notes) == [(name, i) for name in "abcd" for i in range(10)]


CRASH = """
import os, signal, sys
from sqlalchemy import event
where, run, a, b, c = sys.argv[1:]
store = opened(where)
epoch = store.fleets.enter("watch", run, a, b).epoch
number = store.attempts.open("watch", 1, ["a", "b"], a).attempt
for device in "ab":
    store.updates.keep("watch", number, device, digest=b, size=1, base_version=0)
store.close()
statements = 0
while True:
    statements += 1
    pid = os.fork()
    if pid == 0:
        store, left = opened(where), [statements]
        def die(*_):
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
        event.listen(store.database.engine, "after_cursor_execute", die)
        store.attempts.commit("watch", number, epoch=epoch, counted=[(number, "a"), (number, "b")], model_digest=c,
                         server=a)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    if status == 0:
        break
    store = opened(where)
    fleet, (row,) = store.fleets.get("watch"), store.attempts.of("watch")
    assert (fleet.round, fleet.model_digest, row.closed, row.counted) == (0, a, None, None), (statements, fleet, row)
    assert {u.status for u in store.updates.of("watch", number)} == {"stored"}, statements
    assert store.audit.verify() == 4
    store.close()
    assert os.WIFSIGNALED(status), status
print(statements)
"""


def test_a_crash_between_any_two_statements_of_a_commit_leaves_nothing_of_it(place, child, store):
    done = child(CRASH, place.text, RUN, A, B, C, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 8
    fleet, (row,) = store.fleets.get("watch"), store.attempts.of("watch")
    assert (fleet.round, fleet.model_digest, row.counted) == (1, C, ((1, "a"), (1, "b")))
    assert store.audit.verify() == 5


def test_a_reader_sees_one_state_while_others_write(store):
    epoch = store.fleets.enter("watch", RUN, A, B).epoch
    number = opened(store).attempt
    keep(store, number, "a", C)
    with store.database.reading() as tx:
        before = tx.exec_driver_sql("SELECT round FROM fleets").scalar()
        store.attempts.commit("watch", number, epoch=epoch, counted=[(number, "a")], model_digest=C, server=B)
        assert tx.exec_driver_sql("SELECT round FROM fleets").scalar() == before == 0
    assert store.fleets.get("watch").round == 1


def test_what_strangers_say_is_stored_as_text(store):
    store.fleets.enter("watch", RUN, A, B)
    number = opened(store).attempt
    store.devices.see("watch", Sight("a", 2**53, {"cpu": "\0\ud800"}))
    store.devices.quarantine("watch", "a", "bad name 'x\0y\ud800'")
    (device,) = store.devices.of("watch")
    assert (device.boot, device.quarantine) == (2**53, "bad name 'x\\x00y\\ud800'")
    row = store.updates.reject("watch", number, "a", digest=B, size=2**40, base_version=2**53, reason="\0")
    assert (row.base_version, row.size, row.reason) == (2**53, 2**40, "\\x00")
    assert store.audit.verify() == 5


def test_a_file_that_is_no_database(tmp_path):
    path = tmp_path / "coordinator.db"
    path.write_bytes(b"not a database" * 100)
    with pytest.raises(StateError, match="file is not a database"):
        Store(path)


class ExactlyOnce(RuleBasedStateMachine):
    """Whatever order things happen in, each (round, device) is in at most one global model."""

    @initialize()
    def begin(self):
        self.store = self.begun()
        self.epoch = self.store.fleets.enter("watch", RUN, A, B).epoch
        self.open = None
        self.round = 0

    @precondition(lambda self: self.open is None)
    @rule()
    def open_(self):
        self.open = self.store.attempts.open("watch", self.round + 1, ("a", "b", "c"), A).attempt

    @precondition(lambda self: self.open is not None)
    @rule(device=st.sampled_from("abc"), digest=st.sampled_from([A, B, C]))
    def update(self, device, digest):
        self.store.updates.keep("watch", self.open, device, digest=digest, size=1, base_version=self.round)

    @precondition(lambda self: self.open is not None)
    @rule()
    def fail(self):
        self.store.attempts.fail("watch", self.open, "no quorum")
        self.open = None

    @precondition(lambda self: self.open is not None)
    @rule(older=st.booleans())
    def commit(self, older):
        rounds = [self.open, self.open - 1] if older else [self.open]
        pairs = [(n, u.device) for n in rounds for u in self.store.updates.of("watch", n) if u.status == "stored"]
        self.store.attempts.commit("watch", self.open, epoch=self.epoch, counted=pairs, model_digest=C, server=B)
        self.open, self.round = None, self.round + 1

    @rule()
    def restart(self):
        self.epoch = self.store.fleets.enter("watch", RUN, A, B).epoch

    @invariant()
    def once(self):
        counted = [pair for r in self.store.attempts.of("watch") for pair in r.counted or ()]
        assert len(counted) == len(set(counted))
        assert self.store.fleets.get("watch").round == self.round

    def teardown(self):
        self.store.audit.verify()
        self.store.close()


def exactly_once(where, examples):
    machine = type("OnThisStore", (ExactlyOnce,), {"begun": lambda self: Store(where())})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples, stateful_step_count=15, deadline=None, database=None)
    )


def test_exactly_once_on_sqlite(tmp_path):
    exactly_once(lambda: tmp_path / uuid.uuid4().hex, 15)


def test_exactly_once_on_postgres(postgres):
    exactly_once(postgres.database, 8)
