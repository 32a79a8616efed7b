"""Help is told at once: what a command needs is imported where it runs."""

import json
import subprocess
import sys

import pytest

import talaria

HEAVY = ("torch", "onnxruntime", "onnx", "sqlalchemy", "matplotlib")
ASKED = """
import json, sys
from talaria.cli.main import main
sys.argv = ["talaria", *sys.argv[1:]]
try:
    main()
except SystemExit:
    pass
print(json.dumps(sorted(sys.modules)))
"""


@pytest.mark.parametrize(
    "words", [(), ("simulate",), ("export",), ("coordinator",), ("edge",), ("plan",)], ids=" ".join
)
def test_help_imports_nothing_heavy(words):
    told = subprocess.run(
        [sys.executable, "-c", ASKED, *words, "--help"], capture_output=True, text=True, timeout=120, check=True
    ).stdout.splitlines()
    assert "Usage: " in told[0]
    assert not set(HEAVY) & set(json.loads(told[-1]))


def test_the_command_runs_as_a_module():
    told = subprocess.run([sys.executable, "-m", "talaria", "--version"], capture_output=True, text=True, check=True)
    assert told.stdout.startswith("talaria ")


def test_one_benchmark_imports_no_other():
    told = subprocess.run(
        [sys.executable, "-c", ASKED, "bench", "chaos", "--help"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout.splitlines()
    assert "chaos" in told[0]
    assert "talaria_bench.people" not in json.loads(told[-1])


def test_the_version_is_told():
    told = subprocess.run(
        [sys.executable, "-c", ASKED, "--version"], capture_output=True, text=True, timeout=120, check=True
    ).stdout.splitlines()
    assert told[0] == f"talaria {talaria.__version__}"
