"""Backup, restore, fsck and gc: whatever is damaged is found, and a copy taken in the midst of things is whole."""

import json
import os
import shutil
import uuid
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from talaria.cli.main import main
from talaria.errors import ConfigError, StateError
from talaria_coordinator.cli.main import app
from talaria_coordinator.maintenance.backup import back_up
from talaria_coordinator.maintenance.fsck import check
from talaria_coordinator.maintenance.restore import restore
from talaria_coordinator.storage.blobs import FolderBlobs
from talaria_coordinator.storage.devices import Sight
from talaria_coordinator.storage.s3 import S3Blobs
from talaria_coordinator.storage.store import Store

RUN = '{"rounds": 9, "seed": 0}'


def learn(store, blobs, steps=3):
    """A fleet that has committed ``steps`` rounds, failed one, and waits for a device in an open one."""
    model_digest, server = blobs.put(b"body 0"), blobs.put(b"server 0")
    epoch = store.fleets.enter("watch", RUN, model_digest, server).epoch
    store.fleets.set_roster("watch", ["a", "b"])
    for device in "ab":
        store.devices.see("watch", Sight(device, 1, {"cpu": "arm"}))
    store.attempts.fail("watch", store.attempts.open("watch", 1, ["a", "b"], model_digest).attempt, "nobody came")
    for round in range(1, steps + 1):
        number = store.attempts.open("watch", round, ["a", "b"], model_digest).attempt
        for device in "ab":
            digest = blobs.put(b"update %d of " % round + device.encode())
            store.updates.keep("watch", number, device, digest=digest, size=13, base_version=round - 1, found="{}")
        model_digest, server = blobs.put(b"body %d" % round), blobs.put(b"server %d" % round)
        counted = [(number, "a"), (number, "b")]
        store.attempts.commit("watch", number, epoch=epoch, counted=counted, model_digest=model_digest, server=server)
    number = store.attempts.open("watch", steps + 1, ["a", "b"], model_digest).attempt
    waiting = blobs.put(b"waiting")
    store.updates.keep("watch", number, "a", digest=waiting, size=7, base_version=steps)
    store.fleets.save_machine("watch", epoch, b"\0machine\xff")
    blobs.gc(store.blobs_in_use())
    return SimpleNamespace(model_digest=model_digest, waiting=waiting, open=number, epoch=epoch)


@pytest.fixture
def whole(place, tmp_path, request):
    """A state on SQLite and a folder, and one on PostgreSQL and S3."""
    if place.postgres is None:
        blobs, spoil = FolderBlobs(tmp_path / "blobs"), None
    else:
        s3 = request.getfixturevalue("s3")
        blobs, spoil = S3Blobs(f"s3://{s3.bucket}/{uuid.uuid4().hex}", endpoint=s3.endpoint), s3
    store = place.open()
    facts = learn(store, blobs)

    def damage(digest, data):
        if spoil is None:
            path = tmp_path / "blobs" / digest[:2] / digest[2:]
            path.unlink() if data is None else path.write_bytes(data)
        else:
            key = {"Bucket": spoil.bucket, "Key": blobs._path(digest).partition("/")[2]}
            spoil.client.delete_object(**key) if data is None else spoil.client.put_object(**key, Body=data)

    yield SimpleNamespace(store=store, blobs=blobs, place=place, facts=facts, damage=damage)
    store.close()


def everything(store):
    """All that a fleet is, apart from its epoch and how many rounds were opened, which a restore moves on."""
    fleet = store.fleets.get("watch")
    return (
        (fleet.run, fleet.round, fleet.status, fleet.model_digest, fleet.server, fleet.roster),
        store.attempts.of("watch"),
        store.devices.of("watch"),
        [store.updates.of("watch", row.attempt) for row in store.attempts.of("watch")],
        store.fleets.machine("watch"),
        [event for event in store.audit.events("watch") if event["kind"] != "restored"],
    )


def test_what_is_whole_is_found_whole(whole):
    found = check(whole.store, whole.blobs)
    assert (found.damage, found.orphans) == ((), ())
    assert (found.attempts, found.blobs) == (5, 6)
    orphan = whole.blobs.put(b"nobody names this")
    found = check(whole.store, whole.blobs)
    assert (found.damage, found.orphans) == ((), (orphan,))


def test_every_damage_is_found(whole):
    def damages():
        return " ".join(check(whole.store, whole.blobs).damage)

    blob = whole.facts.model_digest
    data = whole.blobs.get(blob)
    whole.damage(blob, b"other")
    assert "is damaged (its sha256 is another)" in damages()
    whole.damage(blob, None)
    assert f"{blob[:16]} cannot be read" in damages()
    assert whole.blobs.put(data) == blob
    assert damages() == ""
    ((counted, model_digest),) = whole.place.sql("SELECT counted, model_digest FROM attempts WHERE attempt = 3")
    ((server,),) = whole.place.sql("SELECT server FROM fleets")
    less = json.dumps(json.loads(counted)[:1])
    for table, change, undo, row, text in (
        ("events", "at = at + 1", "at = at - 1", "seq = 3", "event 3 of the audit log was altered"),
        (
            "attempts",
            f"counted = '{less}'",
            f"counted = '{counted}'",
            "attempt = 3",
            "attempt 3: its list of counted updates was",
        ),
        (
            "attempts",
            "counted = 'no'",
            f"counted = '{counted}'",
            "attempt = 3",
            "attempt 3: its list of counted updates is",
        ),
        (
            "updates",
            "status = 'stored'",
            "status = 'counted'",
            "attempt = 2 AND device = 'a'",
            "but not entered as counted",
        ),
        ("updates", "status = 'counted'", "status = 'stored'", "attempt = 5", "is entered as counted, but in no model"),
        ("attempts", "closed = NULL", "closed = 1", "attempt = 2", "attempt 2: it is half committed"),
        (
            "attempts",
            "failure = NULL",
            "failure = 'x'",
            "attempt = 1",
            "attempt 1: it was closed without a global model",
        ),
        (
            "attempts",
            "model_digest = NULL",
            f"model_digest = '{model_digest}'",
            "attempt = 3",
            "the audit log has a commit of it",
        ),
        (
            "attempts",
            f"model_digest = '{blob}'",
            f"model_digest = '{model_digest}'",
            "attempt = 3",
            "not those that the audit log has",
        ),
        ("fleets", "round = 4", "round = 3", "round = 3", "learned 4 rounds, but the committed ones are 1, 2, 3"),
        ("fleets", "tried = 4", "tried = 5", "tried = 5", "attempt 5 was opened, but only 4"),
        (
            "fleets",
            f"server = '{blob}'",
            f"server = '{server}'",
            "round = 3",
            "its global model is not the one that attempt 4",
        ),
    ):
        whole.place.sql(f"UPDATE {table} SET {change} WHERE {row}")
        assert text in damages(), (change, damages())
        back = {"round = 3": "round = 4", "tried = 5": "tried = 4"}.get(undo, row)
        whole.place.sql(f"UPDATE {table} SET {undo} WHERE {back}")
    assert damages() == ""


def test_a_copy_is_restored_whole_into_any_store(whole, tmp_path, request):
    dest = tmp_path / "copies" / "today"
    made = back_up(whole.store, whole.blobs, dest)
    assert sorted(FolderBlobs(dest / "blobs").digests()) == sorted(whole.store.blobs_in_use())
    assert dest.stat().st_mode & 0o077 == 0
    assert list(dest.parent.iterdir()) == [dest]
    other = tmp_path / "other" / "coordinator.db"
    if whole.place.postgres is None:
        other = request.getfixturevalue("postgres").database()
    blobs = FolderBlobs(tmp_path / "other blobs")
    assert restore(other, blobs, dest) == made
    with Store(other) as store:
        assert everything(store) == everything(whole.store)
        assert check(store, blobs).damage == ()
        fleet, before = store.fleets.get("watch"), whole.store.fleets.get("watch")
        assert fleet.epoch > before.epoch
        assert fleet.tried == before.tried
        assert store.audit.events("watch")[-1]["kind"] == "restored"
        # It goes on where it was: the open round can be committed by the next coordinator, and a new one opened.
        epoch = store.fleets.enter("watch", RUN, "", "").epoch
        counted, model_digest = [(whole.facts.open, "a")], blobs.put(b"body 4")
        store.attempts.commit(
            "watch",
            whole.facts.open,
            epoch=epoch,
            counted=counted,
            model_digest=model_digest,
            server=model_digest,
        )
        assert store.attempts.open("watch", 5, ["a"], model_digest).attempt == fleet.tried + 1
        assert check(store, blobs).damage == ()
    with pytest.raises(ConfigError, match="the store holds 'watch' already"):
        restore(other, blobs, dest)


WRITE = """
import sys, time
from talaria_coordinator.storage.blobs import FolderBlobs
from pathlib import Path
store, blobs, model = opened(sys.argv[1]), FolderBlobs(Path(sys.argv[2])), ""
model = server = blobs.put(b"0" * 50_000)
epoch = store.fleets.enter("watch", sys.argv[3], model, server).epoch
for round in range(1, 10_000):
    number = store.attempts.open("watch", round, ["a", "b"], model).attempt
    for device in "ab":
        digest = blobs.put(b"%d %s" % (round, device.encode()) * 10_000)
        store.updates.keep("watch", number, device, digest=digest, size=1, base_version=round - 1)
    model, server = blobs.put(b"b%d" % round * 10_000), blobs.put(b"s%d" % round * 10_000)
    store.attempts.commit("watch", number, epoch=epoch, counted=[(number, "a"), (number, "b")], model_digest=model,
                         server=server)
    blobs.gc(store.blobs_in_use(), older_s=60)
    if round == 3:
        print("up", flush=True)
    time.sleep(0.02)
"""


def test_copies_taken_while_rounds_are_committed_are_whole(place, start, tmp_path):
    writer = start(WRITE, place.text, tmp_path / "blobs", RUN)
    assert writer.stdout.readline() == "up\n", writer.communicate()
    steps = []
    with place.open(make=False) as store:
        for i in range(3):
            back_up(store, FolderBlobs(tmp_path / "blobs"), tmp_path / f"copy {i}")
            assert writer.poll() is None
    writer.kill()
    for i in range(3):
        into, blobs = tmp_path / f"restored {i}.db", FolderBlobs(tmp_path / f"blobs {i}")
        restore(into, blobs, tmp_path / f"copy {i}")
        with Store(into) as store:
            found = check(store, blobs)
            assert (found.damage, found.orphans) == ((), ())
            steps.append(store.fleets.get("watch").round)
    assert steps == sorted(steps)
    assert steps[0] >= 3


def test_a_copy_begins_again_where_the_coordinator_drops_what_it_was_to_hold(tmp_path):
    commits = iter(range(4, 6))

    class Busy(FolderBlobs):
        """While its blobs are copied, rounds are committed and what they replace is freed."""

        def get(self, digest, *, again=True):
            if (round := next(commits, None)) is not None:
                (number,) = [row.attempt for row in store.attempts.of("watch") if row.closed is None]
                model_digest, server = self.put(b"body %d" % round), self.put(b"server %d" % round)
                counted = [(number, u.device) for u in store.updates.of("watch", number)]
                store.attempts.commit(
                    "watch", number, epoch=epoch, counted=counted, model_digest=model_digest, server=server
                )
                store.attempts.open("watch", round + 1, ["a", "b"], model_digest)
                self.gc(store.blobs_in_use())
            return super().get(digest, again=again)

    blobs = Busy(tmp_path / "blobs")
    with Store(tmp_path / "db") as store:
        epoch = learn(store, FolderBlobs(tmp_path / "blobs")).epoch
        made = back_up(store, blobs, tmp_path / "copy")
        assert next(commits, None) is None
        assert made.blobs == len(store.blobs_in_use())
    restore(tmp_path / "restored.db", kept := FolderBlobs(tmp_path / "restored"), tmp_path / "copy")
    with Store(tmp_path / "restored.db") as store:
        found = check(store, kept)
        assert (found.damage, found.orphans, store.fleets.get("watch").round) == ((), (), 5)


def test_damaged_copies_are_refused_and_leave_the_store_empty(tmp_path):
    blobs = FolderBlobs(tmp_path / "blobs")
    with Store(tmp_path / "db") as store:
        facts = learn(store, blobs)
        back_up(store, blobs, tmp_path / "copy")
        with pytest.raises(ConfigError, match="is there already"):
            back_up(store, blobs, tmp_path / "copy")
    model_digest = f"blobs/{facts.model_digest[:2]}/{facts.model_digest[2:]}"

    def damaged(name, change):
        copy = tmp_path / uuid.uuid4().hex
        shutil.copytree(tmp_path / "copy", copy)
        change(copy / name)
        return copy

    def pipe(path):  # which nobody writes to
        path.unlink()
        os.mkfifo(path)

    manifest = json.loads((tmp_path / "copy" / "manifest.json").read_text())
    rows = (tmp_path / "copy" / "rows.jsonl").read_bytes()
    into, target = tmp_path / "into.db", FolderBlobs(tmp_path / "into")
    for name, change, text in (
        ("rows.jsonl", lambda p: p.write_bytes(rows.replace(b"arm", b"x86")), "its sha256 is another"),
        ("rows.jsonl", lambda p: p.unlink(), "cannot be read"),
        (model_digest, lambda p: p.write_bytes(b"other"), "is damaged"),
        (model_digest, lambda p: p.unlink(), "the backup lacks 1 blobs"),
        ("manifest.json", lambda p: p.write_text("{"), "is damaged"),
        *((name, pipe, "is damaged .it is no file") for name in ("manifest.json", "rows.jsonl", model_digest)),
        ("manifest.json", lambda p: p.write_text("[" * 70_000), "is damaged"),
        ("manifest.json", lambda p: p.unlink(), "cannot be read"),
        ("manifest.json", lambda p: p.write_text(json.dumps(manifest | {"revision": "0099"})), "revision '0099'"),
        ("manifest.json", lambda p: p.write_text(json.dumps(manifest | {"rows": 1})), "has not the 1 rows"),
        ("manifest.json", lambda p: p.write_text(json.dumps(manifest | {"created": 1e300})), "is damaged"),
        ("manifest.json", lambda p: p.write_text(json.dumps(manifest | {"created": float("nan")})), "is damaged"),
        ("manifest.json", lambda p: p.write_text(json.dumps(manifest | {"created": "monday"})), "is damaged"),
    ):
        with pytest.raises((ConfigError, StateError), match=text):
            restore(into, target, damaged(name, change))
        with Store(into) as store:
            assert store.fleets.all() == []
    for line in (b"no json\n", b"[1, 2]\n", b'["fleets", {"fleet": "x"}]\n', b'["secrets", {}]\n'):
        from hashlib import sha256

        def swap(path, line=line):
            path.write_bytes(line)
            changed = manifest | {"sha256": sha256(line).hexdigest()}
            (path.parent / "manifest.json").write_text(json.dumps(changed))

        with pytest.raises(StateError, match=r"damaged|is no row|does not fit"):
            restore(into, target, damaged("rows.jsonl", swap))
    for column, value in (
        ("round", "3"), ("round", True), ("tried", 1 << 64), ("epoch", 1.5), ("run", 3), ("roster", ["a"]),
        ("status", "\ud800"), ("created", float("inf")), ("created", -1), ("created", "now"),
    ):  # fmt: skip
        lines = [json.loads(line) for line in rows.splitlines()]
        next(values for table, values in lines if table == "fleets")[column] = value
        line = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        with pytest.raises(StateError, match=rf"restore: fleets.{column} is damaged; take another backup"):
            restore(into, target, damaged("rows.jsonl", partial(swap, line=line)))
    restore(into, target, tmp_path / "copy")
    with Store(into) as store:
        assert store.fleets.get("watch").round == 3


def test_a_copy_of_damaged_state_is_not_made(tmp_path):
    blobs = FolderBlobs(tmp_path / "blobs")
    with Store(tmp_path / "db") as store:
        facts = learn(store, blobs)
        (tmp_path / "blobs" / facts.model_digest[:2] / facts.model_digest[2:]).write_bytes(b"other")
        with pytest.raises(StateError, match=r"is damaged.*restore it from a backup"):
            back_up(store, blobs, tmp_path / "copy")
    assert not list(tmp_path.glob("*copy*"))


@pytest.mark.parametrize("other_fails", [True, False])
def test_of_two_copies_to_one_folder_at_once_neither_touches_what_the_other_writes(tmp_path, other_fails):
    class Away(FolderBlobs):
        def get(self, digest, *, again=True):
            raise StateError("the blobs do not answer")

    class Meanwhile(FolderBlobs):
        """While its first blob is copied, somebody else makes a copy there."""

        def get(self, digest, *, again=True):
            if others:
                blobs = others.pop()
                with pytest.raises(StateError, match="do not answer") if other_fails else nullcontext():
                    back_up(store, blobs, tmp_path / "copy")
            return super().get(digest, again=again)

    others = [Away(tmp_path / "blobs") if other_fails else FolderBlobs(tmp_path / "blobs")]
    with Store(tmp_path / "db") as store:
        learn(store, FolderBlobs(tmp_path / "blobs"))
        with nullcontext() if other_fails else pytest.raises(StateError, match="could not be written"):
            back_up(store, Meanwhile(tmp_path / "blobs"), tmp_path / "copy")
    assert others == []
    assert restore(tmp_path / "into.db", FolderBlobs(tmp_path / "into"), tmp_path / "copy").blobs == 6
    assert not list(tmp_path.glob(".*"))


def test_a_name_that_is_too_long_is_one_line(tmp_path, capsys, monkeypatch):
    (tmp_path / "fleet.toml").write_text(FLEET)
    with Store(tmp_path / "state" / "coordinator.db"):
        pass
    words = ["coordinator", "backup", str(tmp_path / "fleet.toml"), str(tmp_path / ("long" * 70))]
    monkeypatch.setattr("sys.argv", ["talaria", *words])
    with pytest.raises(SystemExit, match="1"):
        main()
    assert capsys.readouterr().err.endswith("File name too long; give a shorter one\n")


FLEET = """
[fleet]
name = "watch"
devices = 2
[run]
algorithm = "fedavg"
rounds = 9
[run.spec]
name = "imu_cnn"
input_shape = [6, 100]
classes = 7
"""


@pytest.fixture
def config(tmp_path, request, place):
    """A fleet.toml for each pair of stores, with a state in them."""
    folder = tmp_path / "fleet"
    folder.mkdir()
    path, text = folder / "fleet.toml", FLEET
    if place.postgres is not None:
        s3 = request.getfixturevalue("s3")
        shown = place.where._replace(password=None).render_as_string()
        (folder / "secret").write_text(f"{place.where.password}\n")
        (folder / "secret").chmod(0o600)
        text += f'[store]\ndatabase = "{shown}"\npassword_file = "secret"\n'
        text += f'blobs = "s3://{s3.bucket}/{uuid.uuid4().hex}"\nendpoint = "{s3.endpoint}"\n'
    path.write_text(text)
    return path


def test_the_commands(config):
    from talaria_coordinator.config.fleet import load_config
    from talaria_coordinator.server.open_state import held, open_blobs, open_store

    def talaria(*args):
        done = CliRunner().invoke(app, [str(arg) for arg in args])
        assert "of the tests" not in done.output
        return done

    assert "serve" in str(talaria("fsck", config).exception)
    loaded = load_config(config)
    assert "of the tests" not in repr(loaded) + str(loaded.database) + repr(loaded.database)
    blobs = open_blobs(loaded)
    with open_store(loaded) as store:
        facts = learn(store, blobs)
    orphan = blobs.put(b"nobody names this")
    done = talaria("fsck", config)
    # What a later round frees is no news: the verdict first, and one calm line.
    whole, left = done.stdout.splitlines()
    assert (done.exit_code, whole.endswith("6 blobs in use are whole")) == (0, True)
    assert left.startswith("1 blobs are left over from earlier rounds, which is no damage")
    assert orphan not in done.stdout
    assert json.loads(talaria("fsck", config, "--json").stdout)["orphans"] == [orphan]
    assert talaria("gc", config, "--dry-run", "--hours", 0).stdout == "17 bytes would be freed\n"
    for options in ((), ("--dry-run",)):
        said = talaria("gc", config, *options).stdout
        assert said.startswith("0 bytes ")
        assert "; 17 more are younger than 1 h, which --hours 0 frees while no coordinator serves" in said
    assert json.loads(talaria("gc", config, "--json").stdout) == {"freed": 0, "dry_run": False, "younger": 17}
    with held(loaded.state):  # as a coordinator that runs does
        assert isinstance(talaria("gc", config, "--hours", 0).exception, StateError)
    assert json.loads(talaria("gc", config, "--hours", 0, "--json").stdout)["freed"] == 17
    copy = config.parent / "copy"
    done = talaria("backup", config, copy, "--json")
    assert json.loads(done.stdout)["blobs"] == 6, done.output
    assert "already" in str(talaria("restore", config, copy).exception)
    blobs.gc(set(blobs.digests()) - {facts.model_digest})
    done = talaria("fsck", config, "--json")
    assert done.exit_code == 1
    assert [facts.model_digest[:16] in text for text in json.loads(done.stdout)["damage"]] == [True]
    assert "1 things are damaged" in talaria("fsck", config).stdout
    if loaded.store.database is None:
        (config.parent / "state" / "coordinator.db").rename(config.parent / "damaged.db")
        other = config.with_name("other.toml")
        other.write_text(config.read_text().replace(f'name = "{loaded.name}"', 'name = "other"', 1))
        refused = str(talaria("restore", other, copy).exception)
        assert f"copy holds '{loaded.name}', and fleet.toml names 'other'" in refused
        assert not list(config.parent.glob("state/coordinator.db*"))
        done = talaria("restore", config, copy)
        assert done.exit_code == 0, done.exception
        assert talaria("fsck", config).exit_code == 0


def test_a_snapshot_that_nobody_may_write_is_checked_and_copied_without_a_trace(tmp_path, monkeypatch):
    folder = tmp_path / os.fsdecode(b"snapshot \xff")  # a name need not be text
    with Store(folder / "coordinator.db") as store:
        learn(store, FolderBlobs(folder / "blobs"))
    there = sorted(folder.rglob("*"))
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: real(path, mode) and not (mode & os.W_OK and path == folder))
    with Store(folder / "coordinator.db", make=False) as store:
        blobs = FolderBlobs(folder / "blobs")
        assert check(store, blobs).damage == ()
        back_up(store, blobs, tmp_path / "copy")
        with pytest.raises(StateError, match=r"read-?only.*let this user write its folder"):
            store.fleets.set_status("watch", "paused")
        assert sorted(folder.rglob("*")) == there
