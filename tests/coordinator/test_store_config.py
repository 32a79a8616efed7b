"""The [store] table: which URLs are taken, and no secret in any of them."""

from pathlib import Path

import pytest

from talaria.config import Section
from talaria.errors import ConfigError
from talaria_coordinator.config.store import StoreConfig, store_of

DATABASE = "postgresql+psycopg://talaria@127.0.0.1/talaria"


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for name in ("PGHOST", "PGHOSTADDR", "PGSERVICE", "PGSSLMODE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)


def test_the_default_is_sqlite_in_the_state_folder():
    config = store_of(Section({}, "fleet.toml", "store"))
    assert config == StoreConfig()
    assert config.where(Path("state")) == Path("state/coordinator.db")
    config.require_safe()


def test_the_password_comes_from_a_private_file_and_is_not_shown(tmp_path):
    file = tmp_path / "password"
    file.write_text("s3cr3t word\n")
    file.chmod(0o600)
    values = {"database": DATABASE.replace("+psycopg", ""), "password_file": "password"}
    config = store_of(Section(values, str(tmp_path / "fleet.toml"), "store"))
    where = config.where(tmp_path)
    assert (where.password, where.drivername) == ("s3cr3t word", "postgresql+psycopg")
    assert "s3cr3t" not in f"{config!r} {where!r} {where}"
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        config.where(tmp_path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"database": "postgresql://talaria:s3cr3t@h/talaria"}, "database holds a password"),
        ({"database": "postgresql://talaria@h/talaria?password=s3cr3t"}, "database holds a password"),
        ({"database": "mysql://s3cr3t@h/talaria"}, "must be a URL like"),
        ({"database": "s3cr3t"}, "database is not a URL like"),
        ({"password_file": "password"}, "needs database"),
        ({"blobs": "s3://s3cr3t@bucket/x"}, "keys come from the environment"),
        ({"blobs": "s3://bucket/x?key=s3cr3t"}, "keys come from the environment"),
        ({"blobs": "s3:///x"}, "blobs='s3:///x' must be"),
        ({"blobs": "gs://bucket"}, "must be"),
        ({"blobs": "file://host/folder"}, "must be"),
        ({"endpoint": "https://s3.example"}, 'give blobs = "s3://'),
        ({"blobs": "file:///srv", "profile": "x"}, 'give blobs = "s3://'),
        ({"blobs": "s3://b/x", "endpoint": "https://k:s3cr3t@s3.example"}, "endpoint holds keys"),
        ({"blobs": "s3://b/x", "endpoint": "s3.example"}, "must be a URL like"),
        ({"blob": "s3://b/x"}, "did you mean 'blobs'"),
    ],
)
def test_what_is_refused(values, message):
    with pytest.raises(ConfigError, match=message) as told:
        store_of(Section(values, "fleet.toml", "store"))
    if "holds" in message or "keys" in message:
        assert "s3cr3t" not in str(told.value)


def test_beyond_this_machine_a_verified_link_is_asked_for(monkeypatch):
    for database in (DATABASE, "postgresql:///talaria", "postgresql:///talaria?host=/run/postgresql"):
        StoreConfig(database=database).require_safe()
    far = "postgresql://talaria@db.example/talaria"
    for database in (
        far,
        f"{far}?sslmode=require",
        "postgresql:///talaria?host=db.example",
        f"{far}?hostaddr=10.1.2.3",
        "postgresql:///talaria?host=localhost&host=db.example",  # tried one after another
        "postgresql:///talaria?service=prod",
    ):
        with pytest.raises(ConfigError, match="sslmode=verify-full"):
            StoreConfig(database=database).require_safe()
    StoreConfig(database=f"{far}?sslmode=verify-full").require_safe()
    monkeypatch.setenv("PGHOST", "db.example")
    with pytest.raises(ConfigError, match=r"'db\.example' is beyond"):
        StoreConfig(database="postgresql:///talaria").require_safe()
    StoreConfig(blobs="s3://b/x").require_safe()
    StoreConfig(blobs="s3://b/x", endpoint="http://127.0.0.1:9000").require_safe()
    StoreConfig(blobs="s3://b/x", endpoint="https://s3.example").require_safe()
    with pytest.raises(ConfigError, match="without TLS"):
        StoreConfig(blobs="s3://b/x", endpoint="http://s3.example").require_safe()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://s3.example")
    with pytest.raises(ConfigError, match="without TLS"):
        StoreConfig(blobs="s3://b/x").require_safe()
