"""A command whose packages are not installed says which extra brings them, in one line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

WITHOUT = "import sys; sys.modules[sys.argv.pop(1)] = None; from talaria.cli.main import main; main()"
"""Runs the command as where the package that is named first is not installed."""


@pytest.mark.parametrize(
    ("package", "words", "extra"),
    [
        ("sqlalchemy", ("coordinator", "serve", "fleet.toml"), "coordinator"),
        ("onnxruntime", ("verify", "me.talaria"), "export"),
        ("seglearn", ("simulate", "-a", "fedavg", "-d", "smartwatch"), "sim"),
    ],
)
def test_what_lacks_a_package_names_its_extra(package: str, words: tuple[str, ...], extra: str, tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT, package, *words],
        cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False, env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip
    assert ran.returncode == 1
    assert ran.stderr.startswith("talaria: ")
    assert package in ran.stderr
    assert ran.stderr.endswith(f"pip install 'talaria[{extra}]'\n")
    assert ran.stderr.count("\n") == 1
