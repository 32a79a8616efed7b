"""Every fault of tests/mutants/mutants.toml is an edit of the sources as they are."""

import importlib.util
import sys
import tomllib
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "mutants.py"
_spec = importlib.util.spec_from_file_location("talaria_mutants", SCRIPT)
mutants = importlib.util.module_from_spec(_spec)
sys.modules["talaria_mutants"] = mutants
_spec.loader.exec_module(mutants)
LISTED = [
    mutants.Mutant(**{**row, "tests": tuple(row["tests"])}) for row in tomllib.loads(mutants.LIST.read_text())["mutant"]
]


@pytest.mark.parametrize("mutant", LISTED, ids=lambda mutant: mutant.name)
def test_a_fault_can_be_set(mutant):
    assert mutant.flaw() == ""
    text = (mutants.ROOT / mutant.file).read_text().replace(mutant.old, mutant.new)
    compile(text, mutant.file, "exec")
