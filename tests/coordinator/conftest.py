"""For the stores' laws: each kind of database and of blobs, and how to spoil it from outside."""

import subprocess
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path

import pytest
from servers import BUCKET, Postgres, S3Server, serving_s3
from sqlalchemy import URL

from talaria_coordinator.storage.blobs import FolderBlobs
from talaria_coordinator.storage.s3 import S3Blobs
from talaria_coordinator.storage.store import Store


@dataclass
class Place:
    """Where a store lies, and how to spoil it from outside."""

    where: Path | URL
    postgres: Postgres | None = None

    def open(self, **options):
        return Store(self.where, **options)

    def sql(self, text):
        """Run ``text`` behind the store's back."""
        if self.postgres is not None:
            return self.postgres.sql(text, self.where.database)
        import sqlite3

        with sqlite3.connect(self.where) as raw:
            found = raw.execute(text).fetchall()
        raw.close()
        return found

    @property
    def text(self):
        """For a child process; a test server's password may stand there."""
        return str(self.where) if self.postgres is None else self.where.render_as_string(hide_password=False)


OPEN = """
from pathlib import Path
from talaria_coordinator.storage.store import Store
def opened(text, **options):
    return Store(text if "://" in text else Path(text), **options)
"""


@pytest.fixture(params=["sqlite", "postgres"])
def place(request, tmp_path):
    """An empty place for a store, in each kind of database."""
    if request.param == "sqlite":
        return Place(tmp_path / "state" / "coordinator.db")
    server = request.getfixturevalue("postgres")
    return Place(server.database(), server)


@pytest.fixture
def store(place):
    """A new store in each kind of database."""
    store = place.open()
    yield store
    store.close()


@pytest.fixture
def child():
    """Runs Python in another process, which has ``opened(text)``; returns what it printed."""

    def run(code, *args, check=True):
        return subprocess.run(
            [sys.executable, "-c", OPEN + code, *map(str, args)],
            capture_output=True, text=True, timeout=120, check=check,
        )  # fmt: skip

    return run


@pytest.fixture
def start():
    """Starts Python in another process, which has ``opened(text)``; ends it with the test."""
    made = []

    def begin(code, *args):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        made.append(subprocess.Popen([sys.executable, "-c", OPEN + code, *map(str, args)], text=True, **pipes))
        return made[-1]

    yield begin
    for process in made:
        process.kill()
        process.communicate()


# -- blobs


@pytest.fixture
def new_s3():
    """An S3 server to stop and start."""
    with serving_s3() as server:
        yield server


@dataclass
class Depot:
    """Where blobs lie, and how to spoil them from outside."""

    where: Path | str
    s3: S3Server | None = None

    def open(self):
        return FolderBlobs(self.where) if self.s3 is None else S3Blobs(self.where, endpoint=self.s3.endpoint)

    def spoil(self, digest, data):
        """Put other bytes under a digest's name (None: take it away)."""
        key = f"{digest[:2]}/{digest[2:]}"
        if self.s3 is None:
            path = self.where / key
            path.parent.mkdir(exist_ok=True)
            path.unlink() if data is None else path.write_bytes(data)
            return
        what = {"Bucket": BUCKET, "Key": f"{self.where.removeprefix(f's3://{BUCKET}/')}/{key}"}
        client = self.s3.client
        client.delete_object(**what) if data is None else client.put_object(**what, Body=data)

    @property
    def code(self):
        """Python that opens it in a child process."""
        if self.s3 is None:
            return (
                "from pathlib import Path\nfrom talaria_coordinator.storage.blobs import FolderBlobs\n"
                f"blobs = FolderBlobs(Path({str(self.where)!r}))\n"
            )
        return (
            "from talaria_coordinator.storage.s3 import S3Blobs\n"
            f"blobs = S3Blobs({self.where!r}, endpoint={self.s3.endpoint!r})\n"
        )


@pytest.fixture(params=["folder", "s3"])
def depot(request, tmp_path_factory):
    """An empty place for blobs, of each kind."""
    if request.param == "folder":
        return Depot(tmp_path_factory.mktemp("blobs"))
    return Depot(f"s3://{BUCKET}/{uuid.uuid4().hex}", request.getfixturevalue("s3"))


@pytest.fixture
def blobs(depot):
    return depot.open()
