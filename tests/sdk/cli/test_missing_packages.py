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
        ("onnx", ("export", "--run", "saved", "--client", "anna"), "export"),
        ("torch", ("plan", "-b", "latency_ratio=0.5"), "export"),
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


def test_a_benchmark_of_an_install_without_benchmarks_says_where_they_are(tmp_path: Path) -> None:
    none = "import importlib.metadata as m; known = m.entry_points; m.entry_points = lambda **one: ("
    none += "m.EntryPoints() if one.get('group') == 'talaria.benches' else known(**one)); "
    ran = subprocess.run(
        [sys.executable, "-c", none + "from talaria.cli.main import main; main()", "bench", "chaos", "--faults", "2"],
        cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert ran.returncode == 1
    assert ran.stderr.startswith("talaria: no benchmark is installed")
    assert "pip install -e benchmarks" in ran.stderr
