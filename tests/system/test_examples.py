"""The examples run as they are printed, and every benchmark begins."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
BENCHMARKS = sorted((Path(__file__).parents[2] / "benchmarks").glob("*.py"))


def test_alone() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "alone.py")], capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "% right" in done.stdout


@pytest.mark.parametrize("script", BENCHMARKS, ids=lambda script: script.stem)
def test_a_benchmark_finds_what_it_imports(script: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(script), "--help"], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
