"""Bundles of other tasks than classification: what they say, what they refuse, and the gate."""

import json
import re

import numpy as np
import pytest
import torch
from torch import nn

from talaria import tasks
from talaria.errors import BundleError, ConfigError
from talaria.types import Samples
from talaria_edge.deployment.gate import decide
from talaria_export import Predictor, make_bundle, verify_bundle
from talaria_export.build.selection import judge
from talaria_export.bundle.bundle import open_bundle
from talaria_export.bundle.manifest import parse_manifest
from talaria_export.convert.onnx import convert
from talaria_export.convert.quantize import Gate, Made
from talaria_export.runtime.likeness import likeness

X = np.random.default_rng(0).normal(size=(12, 2, 9)).astype(np.float32)


class Steps(nn.Module):
    """Two classes for each of nine steps."""

    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRU(2, 6, batch_first=True), nn.Linear(6, 2)

    def forward(self, x):
        return self.head(self.rnn(x.transpose(1, 2))[0])


def made(path, task, model, y, labels):
    torch.manual_seed(0)
    make_bundle(
        path, model.eval(), example=X[:1], samples=(X, y), labels=labels, task=task, variants=("fp32",), seconds=0
    )
    return Predictor(path)


@pytest.mark.parametrize("task", ["regression:kind=squared", "multilabel", "per_step"])
def test_a_bundle_says_what_its_task_has_to_say(tmp_path, task):
    path = tmp_path / "me.talaria"
    if task == "per_step":
        y, labels = (X[:, 0] > 0).astype(int), ["low", "high"]
        said = made(path, task, Steps(), y, labels)(X)
        assert len(said.steps) == 12
        assert set(said.steps[0]) <= set(labels)
        assert len(said.steps[0]) == 9
    else:
        y = X[:, :, 0] if task.startswith("regression") else (X[:, :, 0] > 0).astype(int)
        said = made(path, task, nn.Sequential(nn.Flatten(), nn.Linear(18, 2)), y, ["a", "b"])(X)
        answers = said.values if task.startswith("regression") else said.said
        assert len(answers) == 12
    with pytest.raises(ConfigError, match=f"labels: this bundle's task is '{task}'; use"):
        _ = said.labels
    assert re.match(r"Prediction\((values|said|steps)=\[.*\], \.\.\. of 12, bundle='[0-9a-f]{12}'\)", repr(said))
    report = verify_bundle(path, samples=(X, y), seconds=0)
    assert report.figures["score"] == tasks.of(task).figures[0]
    assert report.ok, report
    assert {"accuracy"} < set(report.figures)


@pytest.mark.parametrize("task", ["regression:kind=squared", "multilabel", "per_step"])
def test_a_bundle_that_cuts_recordings_is_verified_window_by_window(tmp_path, task):
    """Only those of a class were: the windows of others were given as one recording, which no model takes."""
    path, steps = tmp_path / "me.talaria", task == "per_step"
    model = Steps() if steps else nn.Sequential(nn.Flatten(), nn.Linear(18, 2))
    y = X[:, :, 0] if task.startswith("regression") else (X[:, 0] > 0).astype(int)[:, : 9 if steps else 2]
    options = {"labels": ["a", "b"], "task": task, "variants": ("fp32", "fp16"), "precision": "fp16", "seconds": 0}
    found = []
    for more, x in (({}, X), ({"normalize": (1.0, 2.0), "stride": 4}, X * 2 + 1)):
        make_bundle(path, model.eval(), example=X[:1], samples=(X, y), **options, **more)
        found.append(verify_bundle(path, samples=Samples.of(x, y, task=task), seconds=0).figures)
    assert np.isclose(found[0]["accuracy"], found[1]["accuracy"], atol=1e-3)


def test_how_classes_were_weighed_stays_out_of_a_bundle(tmp_path):
    path, y = tmp_path / "me.talaria", (X[:, 0, 0] > 0).astype(int)
    said = made(path, "classification:balance=true", nn.Sequential(nn.Flatten(), nn.Linear(18, 2)), y, ["a", "b"])(X)
    assert set(said.labels) <= {"a", "b"}
    assert "task" not in open_bundle(path).manifest["output"]


class Wide(nn.Module):
    """Two convolutions, and outputs for the sample or for each step."""

    def __init__(self, outputs, each):
        super().__init__()
        self.one, self.two = nn.Conv1d(2, 24, 3, padding=1), nn.Conv1d(24, 24, 3, padding=1)
        self.head, self.each = nn.Linear(24, outputs), each

    def forward(self, x):
        seen = torch.relu(self.two(torch.relu(self.one(x))))
        return self.head(seen.transpose(1, 2) if self.each else seen.mean(-1))


def answered(task, x=X):
    """A network of the task, and what it says of ``x``, as held-out targets."""
    torch.manual_seed(0)
    model = Wide(3, task == "per_step").eval()
    with torch.no_grad():
        if task == "regression":  # as a fleet folds it: units of its own, far from 0
            model.head.weight.mul_(400)
            model.head.bias.add_(torch.tensor([5000.0, -20.0, 3.0]))
        out = model(torch.from_numpy(x)).numpy()
    return model, out if task == "regression" else np.asarray(tasks.of(task).decided(out), np.int64)


MANY = np.random.default_rng(1).normal(size=(90, 2, 9)).astype(np.float32)


@pytest.mark.parametrize("task", ["regression", "multilabel", "per_step"])
def test_small_variants_are_judged_by_their_own_task(tmp_path, task):
    model, y = answered(task, MANY)
    path = tmp_path / "me.talaria"
    given = {"example": MANY[:1], "samples": (MANY, y), "task": task, "seconds": 0}
    gate = Gate(agreement=0.9, accuracy_drop=0.1, distance=0.2)  # without VNNI instructions weights have 7 bits
    report = make_bundle(path, model, calibration=MANY[:40], gate=gate, **given)
    rows = {row["name"]: row for row in report.figures["variants"]}
    assert list(rows) == ["fp32", "fp16", "int8", "int8-linear"]
    assert all(row["passed"] for row in rows.values()), rows
    measured = "distance" if task == "regression" else "agreement"
    assert all(measured in row and row["accuracy"] > 0.9 for row in rows.values())
    assert rows["fp32"][measured] == (0.0 if task == "regression" else 1.0)
    assert report.figures["default"] != "fp32"  # without a measured time the smallest that passed
    assert Predictor(path)(MANY).logits.shape == Predictor(path, variant="fp32")(MANY).logits.shape
    checked = verify_bundle(path, samples=(MANY, y), seconds=0)
    assert checked.ok, checked
    assert measured in {check.name for check in checked.checks}
    small = make_bundle(path, model, precision="fp16", variants=("fp32", "fp16"), **given)
    assert (small.figures["default"], open_bundle(path).variants) == ("fp16", ("fp16",))


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("regression", r"lies .* of the spread apart from fp32 on 90 inputs, at most 1e-07 is asked for"),
        ("multilabel", "agrees with fp32 on .* of 270 inputs"),
        ("per_step", "agrees with fp32 on .* of 800 inputs"),
    ],
)
def test_a_variant_that_costs_more_than_is_allowed_is_refused(tmp_path, task, said):
    model, y = answered(task, MANY)
    if task == "per_step":
        y[:, 8], y[0, :] = -1, -1  # padding is not judged
        y[-1, 7] = y[-1, 6] = -1
    with torch.no_grad():  # what is rounded away decides: all hangs by a hair
        out = model(torch.from_numpy(MANY))
        model.head.bias.sub_(0 if task == "regression" else out.reshape(-1, 3).mean(0))
    gate = Gate(agreement=1.0, accuracy_drop=1.0, distance=1e-7)
    report = make_bundle(
        tmp_path / "me.talaria", model, example=MANY[:1], samples=(MANY, y), calibration=MANY[:9], task=task, gate=gate,
        variants=("fp32", "int8"), seconds=0,
    )  # fmt: skip
    row = report.figures["variants"][1]
    assert not row["passed"]
    assert re.search(said.replace("800", str(int((y != -1).sum()))), row["why"]), row["why"]
    assert report.figures["default"] == "fp32"


def test_numbers_that_cost_too_much_of_the_score_are_refused():
    model, y = answered("regression", MANY)
    exact = convert(model, torch.from_numpy(MANY[:2]))
    with torch.no_grad():
        model.head.weight[1].mul_(1.2)
    far = Made("fp16", convert(model, torch.from_numpy(MANY[:2])).SerializeToString())
    plain, probes = Made("fp32", exact.SerializeToString()), MANY[:4]
    gate = Gate(distance=1.0, accuracy_drop=0.001)
    row = judge(far, plain, (MANY, y), gate, probes, y[:4], "regression")
    assert (row["passed"], row["distance"] > 0.1) == (False, True)
    assert re.search(r"loses 0\.\d+ of fp32's R² of 1\.0000; accuracy_drop=0\.001", row["why"]), row["why"]
    lonely = likeness("regression", y[:1] + 1, y[:1])
    assert 0 < lonely.distance < 1  # one input has no spread: its own size then
    assert likeness("regression", y * np.nan, y).why_not(0.99, 0.05)


def test_a_task_that_nobody_knows_is_refused_by_the_manifest(tmp_path):
    model = nn.Sequential(nn.Flatten(), nn.Linear(18, 2))
    made(tmp_path / "me.talaria", "multilabel", model, np.zeros((12, 2), int), None)
    manifest = dict(open_bundle(tmp_path / "me.talaria").manifest)
    assert parse_manifest(json.dumps(manifest).encode())["output"]["task"] == "multilabel"
    manifest["output"] = {**manifest["output"], "task": "guess"}
    with pytest.raises(BundleError, match=r"manifest\.json: output=.*is missing or wrong"):
        parse_manifest(json.dumps(manifest).encode())


def test_the_gate_compares_scores_below_zero():
    assert decide(-0.2, -0.5, 9, lowest=-1e6).deploy
    assert not decide(-0.5, -0.2, 9, lowest=-1e6).deploy
    assert not decide(-1e6, None, 9, lowest=-1e6).deploy
    assert not decide(-0.2, None, 9).deploy
