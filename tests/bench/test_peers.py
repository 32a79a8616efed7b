"""The table of peers: what its command line refuses before anything is installed."""

import json
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
        (["--out", "found.svg"], "the plot beside them as .svg; name a .json file"),  # it was written over the figures
        (["--out", "."], "name a .json file"),
    ],
)
def test_what_does_not_fit_is_refused_at_once(words: list[str], why: str, tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, str(RUN), *words], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert ran.returncode == 2
    assert why in " ".join(ran.stderr.split())


def test_what_comes_before_the_first_round_is_counted_for_everybody(tmp_path: Path) -> None:
    given = {"rounds": 2, "turns": 1, "clients": 2, "data": "smartwatch", "out": "found.json", "only": ""}
    words = [f"--{name}={value}" for name, value in given.items()]
    subprocess.run([sys.executable, str(RUN), *words], check=True, capture_output=True, cwd=tmp_path)
    turns = json.loads((tmp_path / "found.json").read_text())["turns"]
    assert set(turns) == {"loop", "talaria"}
    for (turn,) in turns.values():
        first, second = (one["cpu_s"] for one in turn["rounds"])
        assert first > second, "each process imports torch in its first round"
