"""The benchmarks that are files of their own, as far as their figures are arithmetic."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from talaria.data import load
from talaria.simulation.experiment import prepare
from talaria.types import Recipe

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def script(name: str) -> ModuleType:
    """A file of ``benchmarks`` as a module."""
    spec = importlib.util.spec_from_file_location(Path(name).name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_a_model_is_held_beside_one_so_many_rounds_older() -> None:
    """Where the second half began before the age, newer models were told as older ones."""
    files = [bytes([n]) for n in range(11)]  # before the first of ten rounds, and after each
    found = {age: [(b[0], a[0]) for b, a in script("model_changes").pairs(files, age)] for age in (1, 8, 20)}
    assert found == {1: [(n - 1, n) for n in range(5, 11)], 8: [(0, 8), (1, 9), (2, 10)], 20: []}


@pytest.mark.parametrize("data", ["smartwatch", "vowels"])
def test_peers_and_talaria_are_given_the_same_recipe(data: str) -> None:
    """The smartwatch's own weight decay was Talaria's alone."""
    run = prepare("fedavg", load(data), rounds=2, recipe=script("peers/work").RECIPE).run
    assert run.recipe == Recipe(epochs=1, batch=10, lr=0.01, momentum=0.0)


def test_a_gateway_that_is_not_measured_leaves_no_program_behind(tmp_path: Path) -> None:
    """Where one failed the others went on for ever."""
    programs = script("gateway").Programs(tmp_path)

    def measured() -> None:
        with programs:
            programs.start("coordinator", "serve", "nosuch.toml")
            sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
            programs.running.append(subprocess.Popen(sleeper, stdout=subprocess.PIPE, text=True))
            programs.end()

    with pytest.raises(SystemExit, match="ended with status 1"):
        measured()
    assert [one.returncode for one in programs.running] == [1, -15]
