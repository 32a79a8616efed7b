"""The demo as a newcomer runs it, shortened: real data, a real broker, real processes, twenty bundles."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from talaria_export.runtime.verify import verify_bundle

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo") / "demo"
    command = [sys.executable, str(ROOT / "examples" / "demo.py"), "--out", str(out), "--rounds", "1", "--tune", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=880, check=False)
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
    return out


def test_the_summary_holds_what_is_promised(told: Path) -> None:
    summary = json.loads((told / "summary.json").read_text())
    assert len(summary["users"]) == 20
    for user in summary["users"].values():
        assert {"local", "fedavg", "fedavg_ft", "personal"} <= user["accuracy"].keys()
        assert 0 < user["params_ratio"] <= 1
        assert user["latency_ratio"] > 0
        assert user["onnx_max_abs_diff"] <= 1e-4
    members = [u for u in summary["users"].values() if u["role"] == "member"]
    assert len(members) == 16
    assert all(0 < u["upload_ratio"] < 1 for u in members)
    # One round has to bear the kit, which comes once: of the two dense models that FedAvg takes down, and of itself.
    assert all(0 < u["download_ratio"] < 2 for u in members)
    assert {"zero_shot", "scratch", "personal"} <= summary["newcomers"]["accuracy"].keys()
    assert {"local", "fedavg", "fedavg_ft", "personal"} <= summary["accuracy"].keys()
    for key in (
        "upload_ratio",
        "download_ratio",
        "params_ratio",
        "latency_ratio",
        "onnx_max_abs_diff",
        "rounds",
        "broker",
        "seed",
    ):
        assert summary[key] is not None
    assert 0 < summary["agents_peak_mb"] < 2000
    assert summary["versions"].keys() >= {"python", "torch", "onnxruntime"}


def test_every_wearer_has_a_bundle_that_proves_itself(told: Path) -> None:
    bundles = sorted((told / "bundles").glob("*.talaria"))
    assert len(bundles) == 20
    for bundle in bundles[::6]:
        report = verify_bundle(bundle)
        assert report.ok, report.failed


def test_the_report_needs_no_network(told: Path) -> None:
    page = (told / "report.html").read_text()
    assert "s10-right" in page
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in page
    assert "<script" not in page


def test_a_second_run_puts_the_first_aside(tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        from demo import _fresh
    finally:
        sys.path.remove(str(ROOT / "examples"))
    out = tmp_path / "demo"
    _fresh(out)
    (out / "summary.json").write_text("{}")
    _fresh(out)
    assert not (out / "summary.json").exists()
    assert [p.read_text() for p in tmp_path.glob("demo-*/summary.json")] == ["{}"]


def test_a_place_that_is_none_is_said_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    command = [sys.executable, str(ROOT / "examples" / "demo.py"), "--out", str(tmp_path / "file" / "demo")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("demo: ")
    assert "Not a directory" in done.stderr
