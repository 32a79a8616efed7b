"""What ``import talaria`` offers, and what it does not do."""

import subprocess
import sys
from importlib.metadata import version

import pytest

import talaria


@pytest.mark.parametrize("name", talaria.__all__)
def test_every_public_name_is_there(name: str) -> None:
    found = getattr(talaria, name)
    assert name == "__version__" or found.__name__.rpartition(".")[2] == name


def test_the_version_is_that_of_the_distribution() -> None:
    assert talaria.__version__ == version("talaria")


def test_dir_shows_the_public_names_alone() -> None:
    assert dir(talaria) == sorted(talaria.__all__)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="nosuchname"):
        _ = talaria.nosuchname


def test_importing_loads_no_torch() -> None:
    code = "import sys, talaria; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
