"""ONNX Runtime's builds tell their maker what they run, under a lasting name of the machine; not under Talaria."""

import os
import subprocess
import sys

import numpy as np
import pytest

PREDICTS = "import sys; from talaria_export import Predictor; Predictor(sys.argv[1])"
COMMAND = "from talaria.cli.main import main; main()"


@pytest.mark.parametrize("how", ["an app", "the command"])
def test_a_prediction_leaves_no_name_of_the_machine_and_no_words_to_send(how, bundle, imu, tmp_path):
    home, windows = tmp_path / "home", tmp_path / "x.npy"
    home.mkdir()
    np.save(windows, imu.x.numpy())
    words = [PREDICTS, str(bundle)] if how == "an app" else [COMMAND, "predict", str(bundle), str(windows)]
    usual = {
        name: value for name, value in os.environ.items() if name not in ("ORT_DISABLE_TELEMETRY", "XDG_CACHE_HOME")
    }
    done = subprocess.run(
        [sys.executable, "-c", *words],
        env={**usual, "HOME": str(home), "TMPDIR": str(home)},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(path.relative_to(home) for path in home.rglob("*")) == []


@pytest.mark.parametrize(("said", "holds"), [(None, "1"), ("0", "0")])
def test_who_wants_it_says_so(said, holds):
    usual = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    done = subprocess.run(
        [sys.executable, "-c", "import os, talaria; print(os.environ['ORT_DISABLE_TELEMETRY'])"],
        env=usual if said is None else {**usual, "ORT_DISABLE_TELEMETRY": said},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.stdout.strip() == holds, done.stderr
