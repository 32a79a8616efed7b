"""What ``import talaria`` and its programs offer, and what they do not do."""

import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import talaria
import talaria_coordinator
import talaria_edge
import talaria_export

PACKAGES = (talaria, talaria_coordinator, talaria_edge, talaria_export)


@pytest.mark.parametrize(
    ("package", "name"), [(package, name) for package in PACKAGES for name in package.__all__], ids=str
)
def test_every_public_name_is_there_and_documented(package: ModuleType, name: str) -> None:
    found = getattr(package, name)
    assert name == "__version__" or found.__name__.rpartition(".")[2] == name
    assert found.__doc__


def test_the_version_is_that_of_the_distribution() -> None:
    assert talaria.__version__ == version("talaria")


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_dir_shows_the_public_names_alone(package: ModuleType) -> None:
    assert dir(package) == sorted(package.__all__)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_an_unknown_name_is_refused(package: ModuleType) -> None:
    with pytest.raises(AttributeError, match="nosuchname"):
        _ = package.nosuchname


@pytest.mark.parametrize(
    "make",
    [
        lambda x: talaria.Samples.of(x, [0, 1]),
        lambda x: talaria_export.Prediction(x, ("rest", "walk"), "0"),
    ],
)
def test_what_holds_arrays_is_equal_to_itself_alone(make: Callable[[Any], Any]) -> None:
    """numpy has no one answer of whether two arrays are equal."""
    one, other = make(np.zeros((2, 2), np.float32)), make(np.zeros((2, 2), np.float32))
    assert one == one  # noqa: PLR0124 - also where numpy is asked
    assert one != other
    assert {one: 1}[one] == 1


def test_importing_loads_no_torch() -> None:
    names = ", ".join(package.__name__ for package in PACKAGES)
    code = f"import sys, {names}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
