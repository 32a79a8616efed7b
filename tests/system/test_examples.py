"""The examples run as they are printed, and every benchmark begins."""

import json
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


HELP = """
import contextlib, io, json, os, runpy, sys, traceback
import torch

for script in sys.argv[1:]:
    sys.stdout.flush()
    if os.fork():
        os.wait()
        continue
    sys.argv, said, status = [script, "--help"], io.StringIO(), 1
    sys.path[0] = os.path.dirname(script)
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            runpy.run_path(script, run_name="__main__")
            status = 0
        except SystemExit as end:
            status = end.code or 0
        except BaseException:
            traceback.print_exc()
    print(json.dumps([script, status, said.getvalue()]), flush=True)
    os._exit(0)
"""
"""Asks each script for its help, in a process of its own that need not import torch again."""


@pytest.fixture(scope="module")
def told() -> dict[str, tuple[int, str]]:
    command = [sys.executable, "-c", HELP, *map(str, BENCHMARKS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=True)
    return {script: (status, said) for script, status, said in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("script", BENCHMARKS, ids=lambda script: script.stem)
def test_a_benchmark_finds_what_it_imports(script: Path, told: dict[str, tuple[int, str]]) -> None:
    status, said = told[str(script)]
    assert status == 0, said[-2000:]
