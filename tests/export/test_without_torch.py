"""The predictor in a virtual environment that holds numpy and onnxruntime, and neither torch nor onnx."""

import importlib.metadata
import json
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import numpy as np
import pytest

import talaria
import talaria_export
from talaria_export import Predictor

LIMIT_MB = 150
SCRIPT = """
import json, sys
import numpy as np
from talaria_export import Predictor, verify_bundle
bundle, x, out = sys.argv[1:]
prediction = Predictor(bundle)(np.load(x))
report = verify_bundle(bundle, seconds=0.01)
loaded = sorted({name.partition(".")[0] for name in sys.modules})
np.save(out, prediction.logits)
print(json.dumps({"labels": prediction.labels, "ok": report.ok, "loaded": loaded}))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with the predictor's needs, in the versions that the tests run on, and our two packages."""
    home = tmp_path_factory.mktemp("bare")
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    needs = [f"{name}=={importlib.metadata.version(name)}" for name in ("numpy", "onnxruntime")]
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-compile", "-q", *needs]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    if done.returncode != 0:
        pytest.fail(f"this test installs {needs} from the package registry, which failed:\n{done.stderr[-2000:]}")
    library = next((home / "lib").glob("python3.*/site-packages"))
    for package in (talaria, talaria_export):
        folder = Path(package.__file__).parent
        shutil.copytree(folder, library / folder.name, ignore=shutil.ignore_patterns("__pycache__"))
    return python


def test_bundle_runs_and_verifies_without_torch(python, bundle, imu, tmp_path):
    x, out = tmp_path / "x.npy", tmp_path / "out.npy"
    np.save(x, imu.x.numpy())
    command = [str(python), "-c", SCRIPT, str(bundle), str(x), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["ok"]
    assert not {"torch", "onnx", "onnxscript", "typer", "cryptography"} & set(answer["loaded"])
    assert np.array_equal(np.load(out), Predictor(bundle)(imu.x).logits)


def test_needs_are_small(python):
    library = next((python.parents[1] / "lib").glob("python3.*/site-packages"))
    total = sum(
        file.stat().st_size for file in library.rglob("*") if file.is_file() and "__pycache__" not in file.parts
    )
    assert total <= LIMIT_MB * 1e6, f"{total / 1e6:.0f} MB"


def test_importing_the_package_or_its_commands_loads_nothing_heavy():
    heavy = ["torch", "onnx", "onnxruntime", "numpy"]
    script = f"import sys, talaria_export, talaria_export.cli; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
