"""The tables are made by migrations: they agree with the code, older databases are taken along, newer ones refused."""

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import inspect

from talaria.errors import StateError
from talaria.time import Clocks, told_by
from talaria_coordinator.storage import migrate
from talaria_coordinator.storage.engine import open_engine
from talaria_coordinator.storage.tables import METADATA
from talaria_coordinator.web.queries import Views

A, B, C = "a" * 64, "b" * 64, "c" * 64
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


def filled(place):
    with place.open() as store:
        epoch = store.enter("watch", RUN, A, B).epoch
        number = store.open_round("watch", 1, ["a"], A).round
        store.see("watch", "a", 2**40, {"cpu": "arm"})
        store.keep_update("watch", number, "a", digest=B, size=1, base=0, found=FOUND)
        store.save_machine("watch", epoch, b"\0state")


def everything(place):
    with place.open() as store, store.reading() as tx:
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


def test_an_older_database_is_brought_up_to_date_without_loss(place):
    older(place, "0001")
    place.sql(f"INSERT INTO fleets VALUES ('watch', '{{}}', 1, 0, 0, 'running', NULL, '{A}', '{B}', 0.5)")
    with pytest.raises(StateError, match="of revision 0001, this version's of 0003; serve it once"):
        place.open(make=False)
    with place.open() as store:
        assert (store.fleet("watch").body, store.fleet("watch").epoch) == (A, 1)
    place.open(make=False).close()


def test_a_database_from_before_migrations_is_adopted_without_loss(place):
    from_before_migrations(place)
    engine = open_engine(place.where)
    names = set(inspect(engine).get_table_names())
    engine.dispose()
    assert names == set(METADATA.tables)
    # Its rows as such a version wrote them: the statements have not changed since.
    place.sql("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL)")
    place.sql("INSERT INTO alembic_version VALUES ('0003')")
    with told_by(Clocks(wall=lambda: 5.0)):  # its epochs counted from one
        filled(place)
    before = everything(place)
    place.sql("DROP TABLE alembic_version")
    assert everything(place) == before
    assert len(before["updates"]) == len(before["findings"]) == 1
    assert place.sql("SELECT version_num FROM alembic_version")[0][0] == migrate.HEAD
    with place.open() as store:
        assert store.verify_log() == 4
        assert store.machine("watch") == b"\0state"


def test_one_that_lacks_the_newest_tables_gets_them(place):
    from_before_migrations(place)
    place.sql("DROP TABLE findings")
    filled(place)
    assert len(everything(place)["findings"]) == 1


def test_a_newer_database_is_refused_and_left_alone(place):
    filled(place)
    before = everything(place)
    place.sql("UPDATE alembic_version SET version_num = '0099'")
    for make in (True, False):
        with pytest.raises(StateError, match=r"of revision 0099.*none after 0003; update Talaria"):
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
    assert views.round("watch", 1).updates[0].device == "a"
    with pytest.raises(StateError, match="does not answer a reader"), views._reading() as tx:
        tx.exec_driver_sql("DELETE FROM events")
    views.close()
