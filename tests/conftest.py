"""For all tests: no verdict depends on how fast this machine is just now, servers are real, and none is skipped."""

import gc
import os
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))  # for servers.py and its like, which several folders use
os.environ.setdefault("OMP_NUM_THREADS", "1")  # as `make test` has it: threads wait for each other on a busy machine

from servers import serving_postgres, serving_s3
from tiers import LONG, QUICK_LAWS, SLOW, THOROUGH, WAITS, is_thorough

gc.disable()  # until all is collected: importing makes no garbage
settings.register_profile("talaria", deadline=None)
settings.register_profile("minutes", deadline=None, max_examples=4000)
settings.load_profile("talaria")

BROKER = {"mosquitto", "make_mosquitto", "fleet", "broker", "keyed"}
"""Fixtures that start a broker."""
LEFT = "ignore:Exception ignored in. <(ssl.SSLSocket|socket.socket):pytest.PytestUnraisableExceptionWarning"
"""paho leaves the sockets by which it wakes its thread, and that of a failed handshake, to the garbage collector."""
BROWSER = {"page", "odd"}


def pytest_collection_modifyitems(items):
    seen = Counter()
    for item in items:
        names, path = set(item.fixturenames), _path(item)
        if names & BROKER:
            item.add_marker("broker")
            item.add_marker(pytest.mark.filterwarnings(LEFT))
        if "postgres" in names or "postgres" in item.name:
            item.add_marker("postgres")
        if names & BROWSER:
            item.add_marker("browser")
        algorithm = item.callspec.params.get("name") if hasattr(item, "callspec") else None
        if item.nodeid.startswith(SLOW) or (
            path == "tests/laws/test_algorithm_laws.py" and algorithm not in QUICK_LAWS
        ):
            item.add_marker("slow")
        if is_thorough(item.nodeid, getattr(item, "callspec", None), seen):
            item.add_marker("thorough")
    items[:] = _mixed(items)


def pytest_collection_finish():
    """What was imported and collected is never garbage: it is not looked through again and again. Nor is what a test
    makes as often as Python would: that took a twelfth of the suite."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    gc.enable()


def pytest_ignore_collect(collection_path, config):
    """What ``make quick`` or ``make test`` leaves out is not even imported there: that costs each of its processes
    seconds."""
    path = collection_path.relative_to(config.rootpath).as_posix()
    if path.startswith("tests/flower") and find_spec("flwr") is None:
        return True  # flwr asks for older packages than constraints.txt has: `make flower` has a venv for these
    asked = config.option.markexpr
    left_out = (SLOW if "not slow" in asked else ()) + (THOROUGH if "not thorough" in asked else ())
    return True if path.startswith(left_out) else None


def _path(item):
    return item.nodeid.partition("::")[0]


def _mixed(items):
    """Whole files, the longest first, those that wait and those that compute by turns: so few wait at the same time."""
    files = {}
    for item in items:
        files.setdefault(_path(item), []).append(item)
    order = sorted(files, key=lambda f: LONG.index(f) if f in LONG else len(LONG))
    waiting = [f for f in order if f.startswith(WAITS)]
    busy = [f for f in order if not f.startswith(WAITS)]
    mixed = [f for pair in zip(waiting, busy, strict=False) for f in pair]
    return [item for f in dict.fromkeys([*mixed, *order]) for item in files[f]]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A broker, a browser or a database that is missing fails its tests: what is skipped is not noticed."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        report.outcome, report.longrepr = "failed", f"{item.nodeid} would be skipped: {report.longrepr}"
    return report


@pytest.fixture(scope="session")
def postgres():
    """A PostgreSQL server, one for each test process."""
    with serving_postgres() as server:
        yield server


@pytest.fixture(scope="session")
def s3():
    """An S3 server, one for each test process, and keys for it in the environment."""
    with serving_s3() as server:
        yield server
