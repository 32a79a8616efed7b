"""The docs say what the code says."""

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_pages_of_the_algorithms_are_current() -> None:
    spec = importlib.util.spec_from_file_location("algorithm_docs", ROOT / "scripts" / "algorithm_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, text in module.pages().items():
        page = module.DOCS / name
        assert page.exists(), f"{name} is missing; run python scripts/algorithm_docs.py"
        assert page.read_text() == text, f"{name} is stale; run python scripts/algorithm_docs.py"


def test_every_command_of_the_readme_exists() -> None:
    from importlib.metadata import entry_points

    known = {entry.name for entry in entry_points(group="talaria.commands")}
    text = (ROOT / "README.md").read_text()
    named = set(re.findall(r"^talaria ([a-z]+)", text, re.MULTILINE))
    assert named, "the README shows commands"
    assert named <= known, f"the README names {sorted(named - known)}, which do not exist"
