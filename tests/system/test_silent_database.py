"""A PostgreSQL, or a bucket's server, that falls silent while a fleet with keys learns: nobody is thrown off, the
operator is told, and once it answers again rounds go on by themselves, with all that had a receipt."""

import asyncio
import json
import urllib.request

import pytest
from keyed import FLEET
from psycopg.errors import IdleInTransactionSessionTimeout
from servers import BUCKET, PASSWORD
from sqlalchemy.exc import InternalError

from talaria_coordinator.config.api import ApiConfig
from talaria_coordinator.config.store import StoreConfig
from talaria_coordinator.fleet.scheduler import UNANNOUNCED
from talaria_coordinator.server.served import Served
from talaria_coordinator.storage.audit import append


@pytest.fixture
def on_postgres(keyed, postgres, tmp_path):
    secret = tmp_path / "database.password"
    secret.write_text(f"{PASSWORD}\n")
    secret.chmod(0o600)
    url = f"postgresql+psycopg://talaria@127.0.0.1:{postgres.port}/{postgres.database().database}"
    store = StoreConfig(database=url, password_file=secret)
    return keyed(1000, store=store, api=ApiConfig(port=0), quorum=1.0, deadline_s=0.0)


def test_a_database_that_falls_silent_holds_up_its_fleet_alone_and_no_longer_than_it_is_silent(
    on_postgres, postgres, monkeypatch
):
    monkeypatch.setattr("talaria_coordinator.storage.engine.SILENCE_S", 2.0)
    monkeypatch.setattr("talaria_coordinator.storage.engine.CONNECT_S", 2)
    fleet = on_postgres

    def healthy():
        url = fleet.of("ready")[0]["api"]
        with urllib.request.urlopen(f"{url}/healthz", timeout=60) as answer:
            return json.load(answer) == {"status": "ok"}

    async def story():
        async with fleet.running("anna", "bela"):
            await fleet.told_of("round-closed", count=2)
            with postgres.silent():
                assert await asyncio.to_thread(healthy)
                await fleet.told_of("failed", fleet=FLEET, count=2)  # told, and asked again
                assert await asyncio.to_thread(healthy)
                assert fleet.of("disconnected") == []
            done = len(fleet.of("round-closed"))
            await fleet.told_of("round-closed", count=done + 2)

    asyncio.run(story())
    assert "mend the way to it" in fleet.of("failed")[0]["error"]
    assert fleet.of("failed")[0]["again_in_s"] > 0
    assert len(fleet.of("ready")) == 1
    assert {tuple(devices) for devices in fleet.counted().values()} == {("anna", "bela")}
    with fleet.store as store:
        for told in fleet.of("received", outcome="stored"):
            status = {update.device: update.status for update in store.updates.of(FLEET, told["attempt"])}
            assert status[told["device"]] in ("stored", "counted")
        for row in store.attempts.of(FLEET):  # its last words may have opened a round of which it could not tell
            assert row.failure in (None, UNANNOUNCED)
            assert not (row.failure and store.updates.of(FLEET, row.attempt))
    assert fleet.of("quarantined") == []


def test_a_bucket_that_falls_silent_holds_its_fleet_up_no_longer_than_it_is_silent(keyed, s3, tmp_path, monkeypatch):
    monkeypatch.setattr("talaria_coordinator.storage.s3.READ_S", 1)
    store = StoreConfig(blobs=f"s3://{BUCKET}/{tmp_path.name}", endpoint=s3.endpoint)
    fleet = keyed(1000, store=store, quorum=1.0, deadline_s=0.0)

    async def story():
        async with fleet.running("anna", "bela"):
            await fleet.told_of("round-closed", count=2)
            with s3.silent():  # in each round the fleet's own thread reads from it
                while not (fleet.of("failed") or fleet.of("error")):
                    await asyncio.sleep(0.1)
            done = len(fleet.of("round-closed"))
            await fleet.told_of("round-closed", count=done + 2)

    asyncio.run(story())
    assert len(fleet.of("ready")) == 1
    assert {tuple(devices) for devices in fleet.counted().values()} == {("anna", "bela")}
    assert fleet.of("quarantined") == []


def test_a_coordinator_that_waits_for_its_database_ends_without_an_error_when_it_is_told_to(
    on_postgres, postgres, monkeypatch
):
    served, begin = [], Served.__init__
    monkeypatch.setattr(Served, "__init__", lambda self, *a, **k: (served.append(self), begin(self, *a, **k))[1])
    fleet = on_postgres

    async def story():
        async with fleet.running("anna", "bela") as tasks:
            await fleet.told_of("round-closed")
            postgres.crash()
            try:
                await fleet.told_of("failed")
                served[-1].stop()
                async with asyncio.timeout(30):
                    await tasks["co"]
            finally:
                postgres.start()

    asyncio.run(story())
    assert fleet.of("stopped")


def test_a_password_that_is_changed_at_the_database_and_in_its_file_counts_for_the_api_too(keyed, postgres, tmp_path):
    secret, name = tmp_path / "database.password", f"keeper{postgres.port}"

    def change(password, order):
        postgres.sql(f"{order} ROLE {name} SUPERUSER LOGIN PASSWORD '{password}'")
        secret.touch(0o600)
        secret.write_text(f"{password}\n")
        postgres.sql(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '{name}'")

    change("first", "CREATE")
    url = f"postgresql+psycopg://{name}@127.0.0.1:{postgres.port}/{postgres.database().database}"
    store = StoreConfig(database=url, password_file=secret)
    fleet = keyed(1000, store=store, api=ApiConfig(port=0), quorum=1.0, deadline_s=0.0)

    def fleets():
        with urllib.request.urlopen(f"{fleet.of('ready')[0]['api']}/api/v1/fleets", timeout=60) as answer:
            return [told["name"] for told in json.load(answer)]

    async def story():
        async with fleet.running("anna", "bela"):
            await fleet.told_of("round-closed")
            assert await asyncio.to_thread(fleets) == [FLEET]
            change("second", "ALTER")
            done = len(fleet.of("round-closed"))
            await fleet.told_of("round-closed", count=done + 2)
            assert await asyncio.to_thread(fleets) == [FLEET]

    asyncio.run(story())
    assert len(fleet.of("ready")) == 1


def test_a_coordinator_that_slept_within_a_transaction_begins_anew_as_after_a_silence(on_postgres, monkeypatch):
    fleet, slept = on_postgres, []

    def append_after_sleep(tx, event, *facts, **more):
        if event == "round-opened" and fleet.of("round-closed") and not slept:
            # What psycopg says where it reads the server's last word; else the connection is lost, as ever.
            slept.append(IdleInTransactionSessionTimeout("terminating connection due to idle-in-transaction timeout"))
            raise InternalError("", {}, slept[0]) from slept[0]
        return append(tx, event, *facts, **more)

    monkeypatch.setattr("talaria_coordinator.storage.attempts.append", append_after_sleep)

    async def story():
        async with fleet.running("anna", "bela"):
            assert "idle-in-transaction" in (await fleet.told_of("failed"))["error"]
            await fleet.told_of("round-closed", count=len(fleet.of("round-closed")) + 2)

    asyncio.run(story())
    assert {tuple(devices) for devices in fleet.counted().values()} == {("anna", "bela")}
