"""What ``pip install talaria`` brings where the wheel is at hand, in a fresh environment, from another folder."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from readme import ROOT, program

SOURCES = ("sdk", "coordinator", "edge_client", "export", "gateway")


def done(*command, folder):
    ran = subprocess.run(
        [*map(str, command)], cwd=folder, capture_output=True, text=True, timeout=800, check=False, env=ENVIRONMENT
    )
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-3000:]
    return ran.stdout


ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": str(Path.home()), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy of the sources, so that nothing of an earlier build comes along."""
    folder = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    done(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "dist", folder=folder)
    (built,) = (folder / "dist").glob("talaria-*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """An environment that holds the wheel, and sees the packages that it needs but no editable talaria."""
    folder = tmp_path_factory.mktemp("fresh")
    done(sys.executable, "-m", "venv", "--without-pip", "venv", folder=folder)
    own = folder / "venv" / "bin" / "python"
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    # Folders on the path are looked in, but their own .pth files, which an editable install needs, are not read.
    seen = [path for path in sys.path if path.endswith("site-packages")]
    (site / "needed.pth").write_text("\n".join(seen) + "\n")
    done(sys.executable, "-m", "pip", "--python", own, "install", "-q", "--no-deps", "--no-index", wheel, folder=folder)
    found = done(own, "-c", "import talaria; print(talaria.__file__)", folder=folder)
    assert Path(found.strip()).is_relative_to(site)
    return own


def test_the_wheel_holds_the_programs_and_no_harness(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {"talaria", "talaria_coordinator", "talaria_edge", "talaria_export", "talaria_gateway"}
    harness = {name for name in names if "bench" in name or "fuzz" in name}
    assert harness == {
        "talaria/cli/bench.py",
        "talaria/planning/microbenchmarks.py",
    }  # a command's door, and the planner's
    assert {f"{top}/py.typed" for top in tops} <= set(names)
    for page in ("index.html", "app.js", "style.css"):
        assert f"talaria_coordinator/web/dashboard/{page}" in names
    assert [name for name in names if name.startswith("talaria_coordinator/storage/migrations/versions/v0001")]


def test_pip_prefers_it_to_the_other_project_that_has_its_name_on_pypi(wheel, tmp_path):
    shutil.copy(wheel, tmp_path)
    with zipfile.ZipFile(tmp_path / "talaria-0.2.0-py3-none-any.whl", "w") as theirs:
        about = {"METADATA": "Metadata-Version: 2.1\nName: talaria\nVersion: 0.2.0\n", "RECORD": ""}
        about["WHEEL"] = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        for name, text in about.items():
            theirs.writestr(f"talaria-0.2.0.dist-info/{name}", text)
    found = ("--no-index", "--no-deps", "--find-links", tmp_path, "--target", "site", "talaria[coordinator]")
    done(sys.executable, "-m", "pip", "install", "-q", *found, folder=tmp_path)
    assert (tmp_path / "site" / "talaria" / "federated").is_dir()


@pytest.mark.timeout(900)
def test_the_program_of_the_readme_runs_from_another_folder(python, tmp_path):
    (tmp_path / "mine.py").write_text(program("README", "talaria.resume("))
    said = done(python, "mine.py", folder=tmp_path)
    assert said.splitlines()[-1] == "True"
    assert "<html" in (tmp_path / "fedper.html").read_text()


def test_the_base_install_has_no_torch_and_its_absence_names_the_extra(wheel, python, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (one for one in archive.namelist() if one.endswith("dist-info/METADATA"))
        told = archive.read(name).decode()
    base = [line for line in told.splitlines() if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert not [line for line in base if "torch" in line]
    assert [line for line in base if "onnxruntime" in line]
    absent = "import sys; sys.modules['torch'] = None; from talaria.cli.main import main; main()"
    words = ("programs", "build", "--model", "mlp", "--shape", "4", "--classes", "3")
    ran = subprocess.run(
        [str(python), "-c", absent, *words],
        cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False, env=ENVIRONMENT,
    )  # fmt: skip
    assert ran.returncode == 1
    assert ran.stderr.endswith("pip install 'talaria[torch]'\n")


@pytest.mark.timeout(600)
def test_a_package_of_ones_own_runs_from_the_command_line(python, tmp_path):
    shutil.copytree(ROOT / "tests" / "mypkg", tmp_path / "mypkg")
    y = np.tile([0, 1, 2], 30)
    x = np.random.default_rng(0).standard_normal((90, 4)) + y[:, None]
    np.savez(tmp_path / "data.npz", x=x, y=y, client=np.repeat(["anna", "bela", "carl"], 30))
    own = ("-a", "mypkg.mine:FedHalf", "-d", "npz:data.npz", "--aggregator", "mypkg.mine:First")
    done(python.with_name("talaria"), "simulate", *own, "--report", "out.html", folder=tmp_path)
    page = (tmp_path / "out.html").read_text()
    assert "mypkg.mine:FedHalf" in page
    assert "bela" in page
