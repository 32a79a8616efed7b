"""Real servers for tests: PostgreSQL as Debian packages it, S3 over HTTP, and a Mosquitto that takes small packets.

PostgreSQL runs as an unprivileged user on a free port with its data in a temporary folder. S3 is moto's server: an
emulation that keeps objects in memory but speaks the real protocol over real sockets to the real client; no S3 server
that keeps its objects on disk is packaged by Debian 12 or PyPI. A missing server fails the tests.
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
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.error import URLError

import pytest

from talaria_coordinator.broker import find_mosquitto

PASSWORD = "of the tests"
BUCKET = "fleet-blobs"
KEYS = {"AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "of the tests", "AWS_DEFAULT_REGION": "us-east-1"}


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@contextmanager
def still(*pids):
    """These processes do nothing while the block runs: their sockets stay open, and the kernel answers for them."""
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in reversed(pids):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


class Postgres:
    """One PostgreSQL server."""

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
            [self.bin / program, *args], cwd=self.folder, capture_output=True, text=True, timeout=280, check=False,
            **self.user,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{program}: {done.stderr}{done.stdout}; PostgreSQL is needed: scripts/needs postgresql")

    def start(self):
        options = f"-h 127.0.0.1 -p {self.port} -k {self.folder} -c shared_buffers=16MB -c max_connections=40"
        # No power is cut here: what is killed leaves its files to the kernel, and to flush all of them after a crash
        # takes a busy disk minutes.
        self._run("pg_ctl", "start", "-D", "data", "-w", "-t", "240", "-l", "log", "-o", f"{options} -c fsync=off")

    def crash(self):
        """As if the server were killed: nothing in its memory is written."""
        self._run("pg_ctl", "stop", "-D", "data", "-m", "immediate")

    def stop(self):
        self._run("pg_ctl", "stop", "-D", "data", "-m", "fast")

    def silent(self):
        """The whole server stands still while the block runs."""
        parent = (self.folder / "data" / "postmaster.pid").read_text().split()[0]
        return still(int(parent), *map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split()))

    def url(self, name):
        from sqlalchemy import URL

        return URL.create("postgresql+psycopg", "talaria", PASSWORD, "127.0.0.1", self.port, name)

    def sql(self, text, name="postgres"):
        import psycopg

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


@contextmanager
def serving_postgres():
    folder = Path(tempfile.mkdtemp(prefix="talaria-postgres-"))
    folder.chmod(0o755)
    try:
        server = Postgres(folder)
        yield server
        server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class S3Server:
    """moto's S3 server in a process of its own."""

    bucket = BUCKET

    def __init__(self):
        self.port = free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self):
        self.process, end = self._begun(), time.monotonic() + 60
        while time.monotonic() < end:
            try:
                urllib.request.urlopen(f"{self.endpoint}/moto-api/", timeout=5).close()
                break
            except (URLError, OSError):
                if self.process.poll() is not None:  # a connection of somebody else's has its port just now
                    self.process = self._begun()
                time.sleep(0.1)
        else:
            raise RuntimeError("moto's server does not answer")
        self.client.create_bucket(Bucket=BUCKET)

    def _begun(self):
        words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def stop(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(20)

    def silent(self):
        """The server stands still while the block runs."""
        return still(self.process.pid)

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


def serving_small_packets(folder, size):
    """The URL of a Mosquitto that takes packets of ``size`` bytes."""
    return serving_mosquitto(folder, f"max_packet_size {size}")


@contextmanager
def serving_mosquitto(folder, lines="", port=0):
    """The URL of a Mosquitto for everybody, with these lines in its settings."""
    port = port or free_port()
    config = folder / f"mosquitto-{port}.conf"
    config.write_text(f"listener {port} 127.0.0.1\nuser root\nallow_anonymous true\n{lines}\n")
    process = subprocess.Popen([find_mosquitto(), "-c", config], stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 20
        while time.monotonic() < end:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
            except OSError:
                time.sleep(0.02)
            else:
                break
        yield f"mqtt://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()
