"""Real servers for the stores' laws: PostgreSQL as Debian packages it, and S3 over HTTP.

PostgreSQL runs as an unprivileged user on a free port with its data in a temporary folder, once per test process. S3
is moto's server: an emulation that keeps objects in memory but speaks the real protocol over real sockets to the real
client; no S3 server that keeps its objects on disk is packaged by Debian 12 or PyPI. A missing server fails the tests.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError

import psycopg
import pytest
from sqlalchemy import URL

from talaria_coordinator.blobs import FolderBlobs
from talaria_coordinator.s3_blobs import S3Blobs
from talaria_coordinator.store import Store

PASSWORD = "of the tests"
BUCKET = "fleet-blobs"
KEYS = {"AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "of the tests", "AWS_DEFAULT_REGION": "us-east-1"}


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class Postgres:
    """One PostgreSQL server of this test process."""

    def __init__(self, folder):
        self.folder, self.port = folder, free_port()
        self.user = {"user": "postgres", "group": "postgres", "extra_groups": []} if os.getuid() == 0 else {}
        found = sorted(Path("/usr/lib/postgresql").glob("*/bin")) or [Path(shutil.which("initdb") or "initdb").parent]
        self.bin = found[-1]
        if self.user:
            shutil.chown(folder, "postgres", "postgres")
        secret = folder / "password"
        secret.write_text(PASSWORD)
        secret.chmod(0o644)
        self._run(
            "initdb", "-D", "data", "-U", "talaria", "-A", "scram-sha-256", "--pwfile=password", "-E", "UTF8", "-N"
        )
        self.start()

    def _run(self, program, *args):
        done = subprocess.run(
            [self.bin / program, *args], cwd=self.folder, capture_output=True, text=True, timeout=120, check=False,
            **self.user,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{program}: {done.stderr}{done.stdout}; PostgreSQL is needed: scripts/needs postgresql")

    def start(self):
        options = f"-h 127.0.0.1 -p {self.port} -k {self.folder} -c shared_buffers=16MB -c max_connections=40"
        self._run("pg_ctl", "start", "-D", "data", "-w", "-l", "log", "-o", options)

    def crash(self):
        """As if the server were killed: nothing in its memory is written."""
        self._run("pg_ctl", "stop", "-D", "data", "-m", "immediate")

    def stop(self):
        self._run("pg_ctl", "stop", "-D", "data", "-m", "fast")

    def url(self, name):
        return URL.create("postgresql+psycopg", "talaria", PASSWORD, "127.0.0.1", self.port, name)

    def sql(self, text, name="postgres"):
        with psycopg.connect(
            host="127.0.0.1", port=self.port, user="talaria", password=PASSWORD, dbname=name, autocommit=True
        ) as connection:
            cursor = connection.execute(text)
            return cursor.fetchall() if cursor.description else []

    def database(self):
        """A new, empty database."""
        name = f"t{uuid.uuid4().hex[:12]}"
        self.sql(f"CREATE DATABASE {name}")
        return self.url(name)


@pytest.fixture(scope="session")
def postgres():
    folder = Path(tempfile.mkdtemp(prefix="talaria-postgres-"))
    folder.chmod(0o755)
    try:
        server = Postgres(folder)
        yield server
        server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


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
from talaria_coordinator.store import Store
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


class S3Server:
    """moto's S3 server in a process of its own."""

    bucket = BUCKET

    def __init__(self):
        self.port = free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        end = time.monotonic() + 60
        while time.monotonic() < end:
            try:
                urllib.request.urlopen(f"{self.endpoint}/moto-api/", timeout=5).close()
                break
            except (URLError, OSError):
                if self.process.poll() is not None:
                    break
                time.sleep(0.1)
        else:
            raise RuntimeError("moto's server does not answer")
        self.client.create_bucket(Bucket=BUCKET)

    def stop(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(20)

    @property
    def client(self):
        import boto3

        return boto3.session.Session().client("s3", endpoint_url=self.endpoint)


@contextmanager
def serving_s3():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in KEYS.items():
            patch.setenv(name, value)
        server = S3Server()
        try:
            yield server
        finally:
            server.stop()


@pytest.fixture(scope="session")
def s3():
    """An S3 server, and keys for it in the environment."""
    with serving_s3() as server:
        yield server


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
                "from pathlib import Path\nfrom talaria_coordinator.blobs import FolderBlobs\n"
                f"blobs = FolderBlobs(Path({str(self.where)!r}))\n"
            )
        return (
            "from talaria_coordinator.s3_blobs import S3Blobs\n"
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
