"""Every benchmark begins; the examples run in tests of their own."""

from pathlib import Path

import forked
import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
BENCHMARKS = [*sorted(FOLDER.glob("*.py")), FOLDER / "peers" / "run.py"]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, int]]:
    folder = tmp_path_factory.mktemp("help")
    return forked.run({script.stem: (folder, script, "--help") for script in BENCHMARKS}, folder)


@pytest.mark.parametrize("script", BENCHMARKS, ids=lambda script: script.stem)
def test_a_benchmark_finds_what_it_imports(script: Path, told: dict[str, tuple[str, int]]) -> None:
    said, status = told[script.stem]
    assert status == 0, said[-2000:]
