"""The versions that an installation gets can be had on every Python that is promised."""

import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[1]


def test_all_versions_are_for_the_oldest_python_that_is_promised() -> None:
    """One that is not sends pip through versions of everything without end: Debian 12 has Python 3.11.2."""
    promised = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    oldest = f"{promised.removeprefix('>=')}.0"
    looked_at = 0
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        wanted = Requirement(line)
        try:
            found = distribution(wanted.name)
        except PackageNotFoundError:
            continue
        if found.version not in wanted.specifier:
            continue
        looked_at += 1
        asks = found.metadata.get("Requires-Python")
        assert not asks or oldest in SpecifierSet(asks), f"{line} needs Python {asks}: name a version for {oldest}"
    assert looked_at > 100
