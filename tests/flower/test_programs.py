"""Every program of the Flower page runs as it stands there, in a process and a folder of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from readme import programs

from talaria.planning.plan import Plan

PAGE = {name: text for name, text in programs().items() if name.startswith("flower.md")}


@pytest.mark.parametrize("name", sorted(PAGE))
def test_a_program_of_the_page_runs(name: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(Plan().to_json()))
    own = {**os.environ, "HOME": str(tmp_path)}
    command = [sys.executable, "-c", PAGE[name]]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200, env=own)
    assert ran.returncode == 0, ran.stderr[-3000:]


def test_the_page_has_programs() -> None:
    assert len(PAGE) >= 4
