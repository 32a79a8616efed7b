"""The examples run as they are printed."""

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_alone() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "alone.py")], capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "% right" in done.stdout
