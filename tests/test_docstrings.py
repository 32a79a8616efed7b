"""Every ``>>>`` example in the packages runs, and shows what it says."""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ("sdk", "coordinator", "edge_client", "export", "gateway", "benchmarks")
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def modules() -> list[str]:
    """The dotted names of the modules that hold an example. Sources are read, not imported: that is quick, and needs
    none of the extras that a module without examples may ask for."""
    found = []
    for source in SOURCES:
        for file in sorted((ROOT / source).rglob("*.py")):
            if ">>> " in file.read_text(encoding="utf-8"):
                parts = file.relative_to(ROOT / source).with_suffix("").parts
                found.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return found


def test_the_packages_show_examples() -> None:
    assert modules(), f"no docstring under {', '.join(SOURCES)} holds an example any more"


@pytest.mark.parametrize("name", modules())
def test_the_examples_of_a_module_run(name: str) -> None:
    module = importlib.import_module(name)
    examples = [test for test in doctest.DocTestFinder(exclude_empty=True).find(module, name) if test.examples]
    assert examples, f"{name} holds '>>> ' outside of any docstring that doctest finds"
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    said: list[str] = []
    for example in examples:
        runner.run(example, out=said.append)
    assert not runner.failures, "".join(said)
