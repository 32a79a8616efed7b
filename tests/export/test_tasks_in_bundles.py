"""Bundles of other tasks than classification: what they say, what they refuse, and the gate."""

import json

import numpy as np
import pytest
import torch
from torch import nn

from talaria.errors import BundleError, ConfigError
from talaria_edge.deployment.gate import decide
from talaria_export import Predictor, make_bundle, verify_bundle
from talaria_export.bundle.bundle import open_bundle
from talaria_export.bundle.manifest import parse_manifest

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
    with pytest.raises(ConfigError, match=f"index: this bundle's task is '{task}'; use"):
        _ = said.labels
    report = verify_bundle(path, samples=(X, y), seconds=0)
    assert report.ok, report
    assert {"accuracy"} < set(report.figures)


def test_variants_that_only_classes_can_judge_are_refused(tmp_path):
    model = nn.Sequential(nn.Flatten(), nn.Linear(18, 2))
    with pytest.raises(ConfigError, match=r"judged by classes.*give variants=\('fp32',\)"):
        make_bundle(tmp_path / "me.talaria", model, example=X[:1], task="regression", seconds=0)
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
