"""The same bundle in ONNX Runtime for Node, and in a browser page without a server.

These tests fetch what they need themselves: onnxruntime-node and onnxruntime-web with npm, into a cache folder.
"""

import importlib.util
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from javascript import Chromium, found, packages, shown, when
from tolerance import roundings

from talaria import tasks
from talaria_export import Predictor, make_bundle, open_bundle

HERE = Path(__file__).parent
BROWSER = HERE.parents[1] / "examples" / "browser"


@pytest.fixture(scope="module")
def many(imu, tmp_path_factory) -> Path:
    """A bundle with static int8. Its samples are those that the model is surest of: a processor without VNNI quantizes
    to 7 bits, and a label that hangs by a hair may then change."""
    path = tmp_path_factory.mktemp("many") / "many.talaria"
    with torch.no_grad():
        best = imu.model(imu.x).topk(2, dim=1).values
    sure = (best[:, 0] - best[:, 1]).argsort(descending=True)[:32].sort().values
    samples = (imu.x[sure], imu.y[sure])
    make_bundle(path, imu.model, example=imu.x, samples=samples, labels=list("abcdefg"), variants=("int8",), seconds=0)
    return path


@pytest.mark.timeout(600)
def test_node_runs_every_variant_unchanged(bundle, many, imu):
    node = found("node", "nodejs")
    entry = packages(HERE / "node") / "onnxruntime-node" / "dist" / "index.js"
    windows = np.ascontiguousarray(imu.x.numpy(), "<f4")
    for path, variants in ((bundle, {"fp32", "fp16"}), (many, {"fp32", "int8"})):
        command = [node, str(HERE / "node" / "predict.mjs"), str(entry), str(path)]
        done = subprocess.run(command, input=windows.tobytes(), capture_output=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr.decode()
        answer = json.loads(done.stdout)
        assert set(answer["logits"]) == variants
        assert answer["labels"] == list("abcdefg")
        for variant, logits in answer["logits"].items():
            here = Predictor(path, variant=variant)(windows).logits
            there = np.array(logits).reshape(here.shape)
            if variant == "int8":  # the two builds may sum products in another order
                assert (there.argmax(1) == here.argmax(1)).mean() >= 0.95
            else:
                assert roundings(there, here) <= 1000


class Each(torch.nn.Module):
    """Two classes for each of ten steps."""

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(6, 2)

    def forward(self, x):
        return self.head(x.transpose(1, 2))


@pytest.mark.parametrize("task", ["regression", "multilabel", "per_step"])
def test_node_runs_small_variants_of_another_task(tmp_path, task):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(60, 8), torch.nn.Linear(8, 2))
    model = (Each() if task == "per_step" else model).eval()
    x = np.random.default_rng(0).normal(size=(20, 6, 10)).astype("<f4")
    y = model(torch.from_numpy(x)).detach().numpy()
    y = y if task == "regression" else tasks.of(task).decided(y).astype(np.int64)
    path = tmp_path / "numbers.talaria"
    make_bundle(path, model, example=x[:1], samples=(x, y), task=task, variants=("fp32", "fp16"), seconds=0)
    node, entry = found("node", "nodejs"), packages(HERE / "node") / "onnxruntime-node" / "dist" / "index.js"
    command = [node, str(HERE / "node" / "predict.mjs"), str(entry), str(path)]
    done = subprocess.run(command, input=x.tobytes(), capture_output=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    answer = json.loads(done.stdout)
    assert (answer["task"], set(answer["logits"])) == (task, set(open_bundle(path).variants))
    for variant, numbers in answer["logits"].items():
        here = Predictor(path, variant=variant)(x).logits
        assert roundings(np.array(numbers).reshape(here.shape), here) <= 1000


def recording(length: int) -> np.ndarray:
    """Raw numbers (time, 6) for the bundle that cuts and normalizes."""
    return (np.random.default_rng(3).normal(size=(length, 6)) * range(1, 7) + range(6)).astype("<f4")


def test_node_cuts_a_raw_recording(raw):
    node, path = found("node", "nodejs"), raw[0]
    entry = packages(HERE / "node") / "onnxruntime-node" / "dist" / "index.js"
    given = recording(430)
    command = [node, str(HERE / "node" / "predict.mjs"), str(entry), str(path)]
    done = subprocess.run(command, input=given.tobytes(), capture_output=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    here = Predictor(path, variant="fp32")(given).logits
    assert here.shape == (7, 7)
    assert roundings(np.reshape(json.loads(done.stdout)["logits"]["fp32"], here.shape), here) <= 1000
    done = subprocess.run(command, input=given[:99].tobytes(), capture_output=True, check=False, timeout=120)
    assert done.returncode != 0
    assert "at least 100 steps" in done.stderr.decode()


def test_node_refuses_a_damaged_bundle(bundle, tmp_path):
    node = found("node", "nodejs")
    data = bytearray(bundle.read_bytes())
    data[len(data) // 2] ^= 1
    bad = tmp_path / "bad.talaria"
    bad.write_bytes(data)
    reader = (BROWSER / "bundle.mjs").as_uri()
    content = f"new Uint8Array(fs.readFileSync({json.dumps(str(bad))}))"
    script = f"import({json.dumps(reader)}).then(m => m.readBundle({content}))"
    done = subprocess.run([node, "-e", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode != 0
    assert "than its manifest names" in done.stderr


def test_node_refuses_numbers_that_are_none_and_windows_of_no_size(raw):
    script = """
    import { inputs, readBundle } from READER;
    import fs from "node:fs";
    const bundle = await readBundle(new Uint8Array(fs.readFileSync(BUNDLE)));
    const said = (call) => call.then(() => "nothing", (problem) => problem.message);
    const given = (last) => Float32Array.from({ length: 600 }, (_, i) => (i === 599 ? last : i));
    const altered = (stride) => {
      const text = fs.readFileSync(BUNDLE).toString("latin1").replace('"stride": 50', `"stride": ${stride}`);
      return said(readBundle(Uint8Array.from(Buffer.from(text, "latin1"))));
    };
    const all = [inputs(bundle, given(1)).count];
    for (const last of [NaN, Infinity]) all.push(await said((async () => inputs(bundle, given(last)))()));
    console.log(JSON.stringify([...all, await altered("-7")]));
    """
    script = script.replace("READER", json.dumps((BROWSER / "bundle.mjs").as_uri()))
    script = script.replace("BUNDLE", json.dumps(str(raw[0])))
    command = [found("node", "nodejs"), "--input-type=module", "-e", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    none = "the bundle takes numbers, and not NaN or infinity; drop or repair that input"
    assert json.loads(done.stdout) == [1, none, none, "the bundle takes windows of no size (6,100,-7)"]


@pytest.mark.timeout(600)
def test_page_draws_long_windows_and_fits_a_telephone(chromium, tmp_path):
    model = torch.nn.Sequential(torch.nn.AdaptiveAvgPool1d(1), torch.nn.Flatten(), torch.nn.Linear(1, 2)).eval()
    x = np.random.default_rng(0).normal(size=(2, 1, 200_000)).astype("<f4")
    path, page = tmp_path / "long.talaria", tmp_path / "page.html"
    make_bundle(path, model, example=x[:1], labels=["a" * 9, "b"], variants=(), seconds=0)
    page.write_text(builder().page(path, x, packages(BROWSER) / "onnxruntime-web" / "dist"))
    session, evaluate = shown(chromium, page)
    answer = json.loads(evaluate(when("document.getElementById('results')?.textContent")))
    assert answer.get("labels") == list(Predictor(path)(x).labels)
    chromium.ask("Emulation.setDeviceMetricsOverride", session, width=360, height=640, deviceScaleFactor=1, mobile=True)
    assert evaluate("document.documentElement.scrollWidth") == 360


@pytest.fixture
def chromium(tmp_path: Path) -> Iterator[Chromium]:
    browser = Chromium(tmp_path / "profile")
    yield browser
    browser.close()


def builder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("talaria_browser_example", BROWSER / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.timeout(600)
def test_page_cuts_a_raw_recording_by_itself(chromium, raw, tmp_path):
    given, path = recording(430), raw[0]
    page = tmp_path / "page.html"
    page.write_text(builder().page(path, given, packages(BROWSER) / "onnxruntime-web" / "dist"))
    _, evaluate = shown(chromium, page)
    answer = json.loads(evaluate(when("document.getElementById('results')?.textContent")))
    expected = Predictor(path)(given)
    assert len(answer["labels"]) == 7
    if open_bundle(path).manifest["default"] in ("fp32", "fp16"):
        assert roundings(np.reshape(answer["logits"], expected.logits.shape), expected.logits) <= 1000
    else:  # the two builds may sum 8-bit products in another order
        assert sum(map(str.__eq__, answer["labels"], expected.labels)) >= 6
    rows = evaluate("[...document.querySelectorAll('#rows tr')].map(row => row.cells[0].textContent)")
    assert rows == [str(begin) for begin in range(0, 301, 50)]


@pytest.mark.timeout(600)
def test_page_classifies_windows_in_the_browser_from_the_disk(chromium, bundle, many, imu, tmp_path):
    windows = imu.x[:12].numpy()
    page = tmp_path / "page.html"
    page.write_text(builder().page(bundle, windows, packages(BROWSER) / "onnxruntime-web" / "dist"))
    session, evaluate = shown(chromium, page)
    answer = json.loads(evaluate(when("document.getElementById('results')?.textContent")))
    expected = Predictor(bundle)(windows)
    assert answer["labels"] == list(expected.labels)
    assert roundings(np.reshape(answer["logits"], expected.logits.shape), expected.logits) <= 1000
    assert evaluate("document.querySelectorAll('#rows tr').length") == 12

    bad = tmp_path / "bad.talaria"
    data = bytearray(bundle.read_bytes())
    data[len(data) // 2] ^= 1
    bad.write_bytes(data)
    document = chromium.ask("DOM.getDocument", session)["root"]["nodeId"]
    field = chromium.ask("DOM.querySelector", session, nodeId=document, selector="#file")["nodeId"]
    for path, words in ((bad, "than its manifest names"), (many, "variant int8")):
        chromium.ask("DOM.setFileInputFiles", session, files=[str(path)], nodeId=field)
        status = "document.getElementById('status').textContent"
        assert words in evaluate(when(f"{status}.includes({json.dumps(words)}) && {status}"))


def test_windows_that_do_not_fit_the_bundle_are_refused(bundle, tmp_path):
    with pytest.raises(SystemExit, match="does not fit"):
        builder().page(bundle, np.zeros((2, 3, 4), np.float32), tmp_path)


def test_files_that_are_none_are_refused_by_name(bundle, monkeypatch, tmp_path):
    """What cannot be a recording or a bundle, and a page that has no place."""
    (text := tmp_path / "recorded.npy").write_text("hello")
    np.save(windows := tmp_path / "windows.npy", np.zeros((2, 6, 100), np.float32))
    lost = tmp_path / "none" / "page.html"
    for given, said in (
        ([text, text], f"{text} is damaged"),
        ([text, windows], f"{text}: bundle: this file is not a bundle"),
        ([tmp_path / "none.talaria", windows], "No such file"),
        ([text, windows, "-o", lost], ""),
        ([bundle, windows, "-o", tmp_path], f"--out {tmp_path}: cannot be written (Is a directory); name a file"),
    ):
        monkeypatch.setattr("sys.argv", ["build.py", *map(str, given), "--cache", str(packages(BROWSER).parent)])
        with pytest.raises(SystemExit, match=re.escape(said) if said else "2"):
            builder().main()
