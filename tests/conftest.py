"""For all tests: no verdict depends on how fast this machine is just now, and servers are real ones."""

import sys
from pathlib import Path

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))  # for servers.py, which several folders use

from servers import serving_postgres, serving_s3

settings.register_profile("talaria", deadline=None)
settings.register_profile("minutes", deadline=None, max_examples=4000)
settings.load_profile("talaria")


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
