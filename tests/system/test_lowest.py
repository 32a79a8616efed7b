"""The lowest versions that pyproject.toml declares, in an environment over this one, whose torch is kept."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from readme import ROOT

THEIRS = ("torch", "torch-pruning")
"""What the environment below has: pip knows no build of torch from another."""
EXTRAS = ("torch", "export", "coordinator", "postgres", "privacy", "fast")
AGREE = "tests/system/test_every_algorithm.py::test_simulation_and_fleet_agree"
TRIED = (
    "tests/sdk/test_public_names.py", "tests/sdk/training/test_loop.py", "tests/sdk/wire/test_feedback.py",
    f"{AGREE}[fedrep-classification-imu_cnn]", f"{AGREE}[hermes-classification-mypkg.nets:Attentive]",
    "tests/system/test_every_algorithm.py::test_devices_deploy_what_is_better_by_their_task_and_keep_what_is_as_good",
)  # fmt: skip


def needed() -> list[str]:
    """What the base install asks for, and the extras of a coordinator and of who traces models."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [*project["dependencies"], *(line for one in EXTRAS for line in project["optional-dependencies"][one])]
    return [line for line in declared if not line.startswith(("talaria", *THEIRS))]


def done(*command: object) -> str:
    ran = subprocess.run(
        [*map(str, command)],
        cwd=ROOT, capture_output=True, text=True, timeout=800, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-4000:]
    return ran.stdout


@pytest.mark.timeout(1600)
def test_a_fleet_learns_with_the_lowest_versions(tmp_path: Path) -> None:
    done(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    own = tmp_path / "venv" / "bin" / "python"
    (tmp_path / "lowest.txt").write_text(done(sys.executable, "scripts/lowest.py"))
    pip = (sys.executable, "-m", "pip", "--python", own, "install", "-q", "--no-compile")
    done(*pip, "-c", tmp_path / "lowest.txt", *needed())
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    below = [path for path in sys.path if path.endswith("site-packages")]
    (site / "zz_over.pth").write_text(f"import site; list(map(site.addsitedir, {below}))\n")  # after its own
    assert done(own, "-c", "import numpy; print(numpy.__version__)").startswith("1.26")
    done(own, "-m", "pytest", "-q", "-x", "-p", "no:schemathesis", "-p", "no:cacheprovider", *TRIED)
