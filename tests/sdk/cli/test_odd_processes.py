"""Commands in processes that lack what one usually has: a folder to be in, a home, room for temporary files."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
ODD = {
    "no home": "import os, pwd; os.environ.pop('HOME', None); pwd.getpwuid = {}.__getitem__",
    "removed": "import os; os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')",
    "full": "import tempfile, errno; tempfile.tempdir = '.'\n"
    "def full(): raise OSError(errno.ENOSPC, 'No space left')\ntempfile.TemporaryFile = full",
    "read-only": "import tempfile; tempfile._candidate_tempdir_list = lambda: ['/dev/null']",
}
TOLD = {
    "removed": "the folder that this is run in was removed; change to one that is there (cd)",
    "full": "a file in . (TMPDIR), or the output: No space left; free some, and try again",
    "read-only": "No usable temporary directory found in ['/dev/null']; free space in one of them, or set TMPDIR to a",
}


def run(odd, folder, *more):
    words = ("simulate", "-d", "mypkg.sets:rings", "--model", "mlp", "--rounds", "1", *more)
    code = f"{ODD[odd]}\nfrom talaria.cli.main import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *words], cwd=folder, capture_output=True, text=True, timeout=250, check=False,
        env={name: value for name, value in os.environ.items() if name != "HOME"} | {"PYTHONPATH": str(TESTS)},
    )  # fmt: skip


@pytest.mark.parametrize("odd", TOLD)
def test_a_process_that_lacks_it_is_told_the_mend(odd, tmp_path):
    ran = run(odd, tmp_path, "--workers", "2")
    assert ran.returncode == 1
    assert f"talaria: {TOLD[odd]}" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_user_id_without_account_and_home_simulates(tmp_path):
    ran = run("no home", tmp_path)
    assert ran.returncode == 0, ran.stderr
