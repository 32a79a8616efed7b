"""The store: exactly once, one commit, fenced, and a log that shows tampering."""

import sqlite3

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from talaria.errors import ConfigError, StateError
from talaria_coordinator.store import Store

A, B, C = "a" * 64, "b" * 64, "c" * 64
RUN = '{"rounds": 3, "seed": 0}'


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "state" / "coordinator.db")
    yield store
    store.close()


def opened(store, step=1, cohort=("a", "b")):
    return store.open_round("watch", step, cohort, A)


def keep(store, number, device, digest=B):
    return store.keep_update("watch", number, device, digest=digest, size=10, base=0)


def test_a_fleet_is_entered_with_a_new_epoch_each_time(store):
    first = store.enter("watch", RUN, A, B)
    again = store.enter("watch", RUN, C, C)
    assert (first.epoch, again.epoch) == (1, 2)
    assert (again.body, again.server, again.step) == (A, B, 0)
    assert [f.name for f in store.fleets()] == ["watch"]
    assert store.fleet("other") is None


def test_another_run_is_refused_with_the_difference(store):
    store.enter("watch", RUN, A, B)
    with pytest.raises(ConfigError, match=r"seed: stored 0, given 7"):
        store.enter("watch", '{"rounds": 3, "seed": 7}', A, B)


def test_durable_pragmas(store, tmp_path):
    store.enter("watch", RUN, A, B)
    with store._engine.connect() as connection:
        pragma = connection.exec_driver_sql
        assert pragma("PRAGMA journal_mode").scalar() == "wal"
        assert pragma("PRAGMA synchronous").scalar() == 2


def test_commit_names_body_and_devices_at_once(store):
    fleet = store.enter("watch", RUN, A, B)
    number = opened(store).round
    keep(store, number, "a"), keep(store, number, "b", C)
    store.commit_round(
        "watch", number, epoch=fleet.epoch, counted=[(number, "b"), (number, "a")], body=C, server=A, last=False
    )
    now = store.fleet("watch")
    assert (now.step, now.body, now.server, now.status) == (1, C, A, "running")
    (row,) = store.rounds("watch")
    assert row.counted == ((number, "a"), (number, "b"))
    assert row.body == C
    assert {u.device: u.status for u in store.updates("watch", number)} == {"a": "counted", "b": "counted"}


def test_nothing_counts_twice(store):
    fleet = store.enter("watch", RUN, A, B)
    one = opened(store).round
    keep(store, one, "a")
    values = {"epoch": fleet.epoch, "counted": [(one, "a")], "body": C, "server": A, "last": False}
    store.commit_round("watch", one, **values)
    with pytest.raises(StateError, match="not the open one"):
        store.commit_round("watch", one, **values)
    two = opened(store, step=2).round
    with pytest.raises(StateError, match="cannot count 'a'"):
        store.commit_round("watch", two, **values)
    assert store.fleet("watch").step == 1
    assert store.rounds("watch")[1].closed is None


def test_a_commit_with_a_missing_update_changes_nothing(store):
    fleet = store.enter("watch", RUN, A, B)
    number = opened(store).round
    keep(store, number, "a")
    with pytest.raises(StateError, match="cannot count 'b'"):
        store.commit_round(
            "watch", number, epoch=fleet.epoch, counted=[(number, "a"), (number, "b")], body=C, server=A, last=False
        )
    assert store.updates("watch", number)[0].status == "stored"
    assert store.fleet("watch").body == A


def test_an_older_coordinator_is_fenced(store):
    old = store.enter("watch", RUN, A, B)
    number = opened(store).round
    store.enter("watch", RUN, A, B)
    with pytest.raises(StateError, match=r"another coordinator has it \(epoch 2, ours 1\)"):
        store.commit_round("watch", number, epoch=old.epoch, counted=[], body=C, server=A, last=False)
    with pytest.raises(StateError, match="another coordinator"):
        store.save_machine("watch", old.epoch, b"state")
    assert store.machine("watch") is None


def test_the_first_update_stays(store):
    store.enter("watch", RUN, A, B)
    number = opened(store).round
    assert keep(store, number, "a", B).digest == B
    assert keep(store, number, "a", C).digest == B
    store.equivocation("watch", number, "a", B, C)
    store.equivocation("watch", number, "a", B, C)
    assert store.equivocations("watch") == [(number, "a", C)]
    rejected = store.reject_update("watch", number, "b", digest=C, size=3, base=0, reason="NaN in head.weight")
    assert (rejected.status, rejected.reason) == ("rejected", "NaN in head.weight")
    assert keep(store, number, "b", C).status == "rejected"


def test_a_failed_round_is_tried_again_under_a_new_number(store):
    fleet = store.enter("watch", RUN, A, B)
    first = opened(store)
    store.fail_round("watch", first.round, "1 of at least 2 updates came")
    second = opened(store)
    assert (first.round, first.step, second.round, second.step) == (1, 1, 2, 1)
    with pytest.raises(StateError, match="not the open one"):
        store.commit_round("watch", 1, epoch=fleet.epoch, counted=[], body=C, server=A, last=False)
    keep(store, 2, "a")
    store.commit_round("watch", 2, epoch=fleet.epoch, counted=[(2, "a")], body=C, server=A, last=True)
    assert store.fleet("watch").status == "done"
    assert [r.failure for r in store.rounds("watch")] == ["1 of at least 2 updates came", None]


def test_devices_by_boot(store):
    store.enter("watch", RUN, A, B)
    store.see("watch", "a", 3, {"cpu": "arm"})
    store.see("watch", "a", 2, {"cpu": "old"}, online=False)
    (device,) = store.devices("watch")
    assert (device.boot, device.online, device.profile) == (3, True, {"cpu": "arm"})
    store.see("watch", "a", 3, {}, online=False)
    store.quarantine("watch", "a", "5 damaged chunks")
    (device,) = store.devices("watch")
    assert (device.online, device.profile, device.quarantine) == (False, {"cpu": "arm"}, "5 damaged chunks")
    store.quarantine("watch", "a", None)
    assert store.devices("watch")[0].quarantine is None


def test_machine_is_kept(store):
    epoch = store.enter("watch", RUN, A, B).epoch
    store.save_machine("watch", epoch, b"one")
    store.save_machine("watch", epoch, b"two")
    assert store.machine("watch") == b"two"


def test_blobs_in_use(store):
    epoch = store.enter("watch", RUN, A, B).epoch
    number = opened(store).round
    keep(store, number, "a", C)
    assert store.blobs_in_use() == {A, B, C}
    store.commit_round("watch", number, epoch=epoch, counted=[(number, "a")], body="d" * 64, server=B, last=False)
    assert C not in store.blobs_in_use()


def test_the_log_shows_tampering(store, tmp_path):
    store.enter("watch", RUN, A, B)
    opened(store)
    store.log("watch", "note", text="hello")
    assert store.verify_log() == 3
    assert [e["kind"] for e in store.events("watch")] == ["fleet-created", "round-opened", "note"]
    store.close()
    path = tmp_path / "state" / "coordinator.db"
    with sqlite3.connect(path) as raw:
        raw.execute("UPDATE events SET detail = '{}' WHERE seq = 2")
    raw.close()
    again = Store(path)
    with pytest.raises(StateError, match="event 2 of the audit log was altered"):
        again.verify_log()
    again.close()


def test_a_file_that_is_no_database(tmp_path):
    path = tmp_path / "coordinator.db"
    path.write_bytes(b"not a database" * 100)
    with pytest.raises(StateError, match="file is not a database"):
        Store(path)


class ExactlyOnce(RuleBasedStateMachine):
    """Whatever order things happen in, each (round, device) is in at most one body."""

    @initialize()
    def begin(self):
        import tempfile
        from pathlib import Path

        self.folder = tempfile.TemporaryDirectory()
        self.store = Store(Path(self.folder.name) / "db")
        self.epoch = self.store.enter("watch", RUN, A, B).epoch
        self.open = None
        self.step = 0

    @precondition(lambda self: self.open is None)
    @rule()
    def open_(self):
        self.open = self.store.open_round("watch", self.step + 1, ("a", "b", "c"), A).round

    @precondition(lambda self: self.open is not None)
    @rule(device=st.sampled_from("abc"), digest=st.sampled_from([A, B, C]))
    def update(self, device, digest):
        self.store.keep_update("watch", self.open, device, digest=digest, size=1, base=self.step)

    @precondition(lambda self: self.open is not None)
    @rule()
    def fail(self):
        self.store.fail_round("watch", self.open, "no quorum")
        self.open = None

    @precondition(lambda self: self.open is not None)
    @rule(older=st.booleans())
    def commit(self, older):
        rounds = [self.open, self.open - 1] if older else [self.open]
        pairs = [(n, u.device) for n in rounds for u in self.store.updates("watch", n) if u.status == "stored"]
        self.store.commit_round("watch", self.open, epoch=self.epoch, counted=pairs, body=C, server=B, last=False)
        self.open, self.step = None, self.step + 1

    @rule()
    def restart(self):
        self.epoch = self.store.enter("watch", RUN, A, B).epoch

    @invariant()
    def once(self):
        counted = [pair for r in self.store.rounds("watch") for pair in r.counted or ()]
        assert len(counted) == len(set(counted))
        assert self.store.fleet("watch").step == self.step

    def teardown(self):
        self.store.verify_log()
        self.store.close()
        self.folder.cleanup()


ExactlyOnce.TestCase.settings = settings(max_examples=15, stateful_step_count=15, deadline=None)
TestExactlyOnce = ExactlyOnce.TestCase
