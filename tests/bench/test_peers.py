"""The table of peers: what its command line refuses before anything is installed."""

import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parents[2] / "benchmarks" / "peers" / "run.py"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--only", "plato"], "--pfllib and --plato say where these are"),
        (["--only", "", "--pfllib", "."], "has no system/flcore/servers/serveravg.py; give a checkout"),
        (["--only", "", "--plato", "."], "has no plato/servers/fedavg.py; give a checkout"),
        (["--only", "flower", "--clients", "4"], "leave flower out of --only"),
        (["--rounds", "1"], "take 2 at least"),
    ],
)
def test_what_does_not_fit_is_refused_at_once(words: list[str], why: str, tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, str(RUN), *words], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert ran.returncode == 2
    assert why in " ".join(ran.stderr.split())
