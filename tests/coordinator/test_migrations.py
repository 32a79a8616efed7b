"""The tables are made by migrations: they agree with the code, older databases are taken along, newer ones refused."""

import hashlib
import json
from dataclasses import asdict
from types import SimpleNamespace

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import MetaData, inspect

from talaria.errors import StateError
from talaria_coordinator.fleet.chronicle import chronicle
from talaria_coordinator.fleet.scheduler import Conductor
from talaria_coordinator.maintenance.backup import Manifest
from talaria_coordinator.maintenance.fsck import check
from talaria_coordinator.maintenance.restore import restore
from talaria_coordinator.storage import migrate
from talaria_coordinator.storage.audit import GENESIS, link
from talaria_coordinator.storage.blobs import FolderBlobs
from talaria_coordinator.storage.devices import Sight
from talaria_coordinator.storage.engine import open_engine
from talaria_coordinator.storage.store import Store
from talaria_coordinator.storage.tables import METADATA
from talaria_coordinator.web.queries import Views

A, B, C = (hashlib.sha256(data).hexdigest() for data in (b"a", b"b", b"c"))
FOUND = '{"metrics": {}, "weight": 1.0, "dense": 4}'
RUN = '{"rounds": 3, "seed": 0}'


def older(place, revision):
    """A database that has had the migrations up to ``revision`` only."""
    engine = open_engine(place.where)
    with engine.begin() as tx:
        migrate.migrate(tx, revision)
    engine.dispose()


def from_before_migrations(place):
    """A database as versions before migrations made it: the first tables, and no word of a revision."""
    older(place, "0001")
    place.sql("DROP TABLE alembic_version")


def written_before_the_names(place):
    """Rows as versions up to revision 0003 wrote them: a committed round, an open one, and a device that is shut
    out."""
    pairs, roster = '[[1, "a"]]', '["a"]'
    digest = hashlib.sha256(pairs.encode()).hexdigest()
    detail = json.dumps({"step": 1, "counted": [[1, "a"]], "body": C}, sort_keys=True)
    chain = link(GENESIS, 0.5, "watch", 1, None, "round-closed", detail)
    for table, values in (
        ("fleets", f"'watch', '{RUN}', 1, 1, 2, 'running', '{roster}', '{C}', '{B}', 0.5"),
        ("rounds", f"'watch', 1, 1, '{roster}', '{A}', 0.5, 0.5, NULL, '{C}', '{B}', '{pairs}', '{digest}'"),
        ("rounds", f"'watch', 2, 2, '{roster}', '{C}', 0.5, NULL, NULL, NULL, NULL, NULL, NULL"),
        ("devices", "'watch', 'a', 7, 1, '{}', 0.5, 0.5, NULL"),
        ("devices", "'watch', 'eve', 8, 0, '{}', 0.5, 0.5, 'two different updates'"),
        ("updates", f"'watch', 1, 'a', '{B}', 1, 0, 'counted', NULL, 0.5"),
        ("updates", f"'watch', 2, 'a', '{A}', 1, 1, 'stored', NULL, 0.5"),
        ("findings", f"'watch', 1, 'a', '{FOUND}'"),
        ("equivocations", f"'watch', 1, 'eve', '{C}', 0.5"),
        (
            "events (at, fleet, round, device, kind, detail, chain)",
            f"0.5, 'watch', 1, NULL, 'round-closed', '{detail}', '{chain}'",
        ),
        ("machines", "'watch', 'a state of format 2'"),
    ):
        place.sql(f"INSERT INTO {table} VALUES ({values})")


def is_what_was_written(store, folder):
    """The rows of :func:`written_before_the_names`, read by this version."""
    fleet = store.fleets.get("watch")
    assert (fleet.epoch, fleet.round, fleet.tried, fleet.model_digest, fleet.roster) == (1, 1, 2, C, ("a",))
    first, second = store.attempts.of("watch")
    assert (first.attempt, first.round, first.base_digest, first.model_digest, first.counted) == (
        1,
        1,
        A,
        C,
        ((1, "a"),),
    )
    assert (second.attempt, second.round, second.base_digest, second.model_digest) == (2, 2, C, None)
    versions = [update.base_version for number in (1, 2) for update in store.updates.of("watch", number)]
    assert versions == [0, 1]
    assert store.updates.equivocations("watch") == [(1, "eve", C)]
    assert store.audit.verify() == 1
    assert [event["kind"] for event in store.audit.events("watch")] == ["round-closed"]
    assert chronicle(store.audit.events("watch")).rounds == 1
    assert all("cannot be read" in text for text in check(store, FolderBlobs(folder)).damage), "only blobs are missing"


def filled(place):
    with place.open() as store:
        epoch = store.fleets.enter("watch", RUN, A, B).epoch
        number = store.attempts.open("watch", 1, ["a"], A).attempt
        store.devices.see("watch", Sight("a", 2**40, {"cpu": "arm"}))
        store.updates.keep("watch", number, "a", digest=B, size=1, base_version=0, found=FOUND)
        store.fleets.save_machine("watch", epoch, b"\0state")


def everything(place):
    with place.open() as store, store.database.reading() as tx:
        return {table.name: [tuple(row) for row in tx.execute(table.select())] for table in METADATA.sorted_tables}


def test_models_and_migrations_agree(place):
    place.open().close()
    engine = open_engine(place.where)
    with engine.begin() as tx:
        context = MigrationContext.configure(tx, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, METADATA) == []
    engine.dispose()


def test_the_series_is_what_the_code_says():
    script = ScriptDirectory.from_config(migrate.alembic_config())
    assert [step.revision for step in script.walk_revisions()] == list(reversed(migrate.REVISIONS))
    assert script.get_current_head() == migrate.HEAD


def test_an_older_database_is_brought_up_to_date_without_loss(place, tmp_path):
    older(place, "0001")
    written_before_the_names(place)
    with pytest.raises(StateError, match="of revision 0001, this version's of 0010; serve it once"):
        place.open(make=False)
    with place.open() as store:
        is_what_was_written(store, tmp_path)
    place.open(make=False).close()


def test_protocol_states_of_the_old_format_are_let_go_of_and_who_is_shut_out_stays_so(place):
    older(place, "0003")
    written_before_the_names(place)
    config = SimpleNamespace(name="watch", run=SimpleNamespace(to_json=lambda: RUN), draw=None)
    with place.open() as store:
        assert store.fleets.machine("watch") is None
        conductor = Conductor(config, store, None, None, 1.0)
        state = conductor.begin()
        assert state.quarantined() == {"eve": "two different updates"}
        conductor.settle(state)
        assert [row.failure is None for row in store.attempts.of("watch")] == [True, False]
        assert store.attempts.unclosed("watch") == []


def test_a_database_from_before_migrations_is_adopted_without_loss(place, tmp_path):
    from_before_migrations(place)
    engine = open_engine(place.where)
    names = set(inspect(engine).get_table_names())
    engine.dispose()
    assert names == set(METADATA.tables) - {"attempts", "words"} | {"rounds"}
    written_before_the_names(place)
    with place.open() as store:
        is_what_was_written(store, tmp_path)
    assert place.sql("SELECT version_num FROM alembic_version")[0][0] == migrate.HEAD


def test_one_that_lacks_the_newest_tables_gets_them(place):
    from_before_migrations(place)
    place.sql("DROP TABLE findings")
    filled(place)
    assert len(everything(place)["findings"]) == 1


def test_a_backup_with_the_old_names_is_restored_under_the_new_ones(place, tmp_path):
    older(place, "0003")
    written_before_the_names(place)
    place.sql("DELETE FROM machines")
    engine, tables, lines = open_engine(place.where), MetaData(), b""
    with engine.begin() as tx:
        tables.reflect(tx)
        for table in tables.sorted_tables:
            if table.name != "alembic_version":
                rows = tx.execute(table.select()).mappings().all()
                lines += b"".join(json.dumps([table.name, dict(row)]).encode() + b"\n" for row in rows)
    engine.dispose()
    backup, blobs = tmp_path / "backup", FolderBlobs(tmp_path / "blobs")
    for data in (b"a", b"b", b"c"):
        FolderBlobs(backup / "blobs").put(data)
    (backup / "rows.jsonl").write_bytes(lines)
    manifest = Manifest(1, "0003", 1.0, lines.count(b"\n"), hashlib.sha256(lines).hexdigest(), 3, 3)
    (backup / "manifest.json").write_text(json.dumps(asdict(manifest)))
    assert restore(tmp_path / "new" / "coordinator.db", blobs, backup) == manifest
    with Store(tmp_path / "new" / "coordinator.db") as store:
        assert (store.fleets.get("watch").round, store.fleets.get("watch").model_digest) == (1, C)
        assert [(row.attempt, row.round, row.base_digest) for row in store.attempts.of("watch")] == [
            (1, 1, A),
            (2, 2, C),
        ]
        assert [event["kind"] for event in store.audit.events("watch")] == ["round-closed", "restored"]
        assert check(store, blobs).damage == ()


def test_a_newer_database_is_refused_and_left_alone(place):
    filled(place)
    before = everything(place)
    place.sql("UPDATE alembic_version SET version_num = '0099'")
    for make in (True, False):
        with pytest.raises(StateError, match=r"of revision 0099.*none after 0010; update Talaria"):
            place.open(make=make)
    place.sql(f"UPDATE alembic_version SET version_num = '{migrate.HEAD}'")
    assert everything(place) == before


def test_somebody_elses_tables_are_refused(place):
    older(place, "0001")
    place.sql("DROP TABLE alembic_version")
    place.sql("DROP TABLE events")
    place.sql("CREATE TABLE events (id INTEGER, name TEXT)")
    with pytest.raises(StateError, match=r"a table 'events' that is not Talaria's; give \[store\] database one of"):
        place.open()


def test_an_upgrade_that_fails_leaves_all_as_it_was(place):
    older(place, "0001")
    place.sql("CREATE INDEX events_by_fleet ON events (kind)")
    with pytest.raises(StateError, match=r"the database refused \(.*already exists"):
        place.open()
    engine = open_engine(place.where)
    assert {index["name"] for index in inspect(engine).get_indexes("updates")} == set()
    engine.dispose()
    assert place.sql("SELECT version_num FROM alembic_version")[0][0] == "0001"
    place.sql("DROP INDEX events_by_fleet")
    place.open().close()


def test_two_that_start_at_once_make_the_tables_once(place, start):
    racers = [start("import sys\nopened(sys.argv[1]).close()\nprint('made')", place.text) for _ in range(2)]
    told = [racer.communicate(timeout=120) for racer in racers]
    assert [out for out, _ in told] == ["made\n", "made\n"], told
    filled(place)


def test_an_empty_database_is_not_looked_at_but_served(place):
    if place.postgres is not None:
        with pytest.raises(StateError, match="holds no fleet yet"):
            place.open(make=False)


def test_readers_cannot_write(place):
    filled(place)
    views = Views(place.where)
    assert [fleet.name for fleet in views.fleets()] == ["watch"]
    assert views.attempt("watch", 1).updates[0].device == "a"
    with pytest.raises(StateError, match="does not answer a reader"), views._reading() as tx:
        tx.exec_driver_sql("DELETE FROM events")
    views.close()
