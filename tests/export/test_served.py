"""A bundle of what a device without torch serves holds the numbers that torch's export holds."""

from dataclasses import replace

import numpy as np
import pytest

from talaria.errors import ModelError
from talaria.federated import kit as kits
from talaria.federated import rounds, run_model
from talaria.federated.make_kit import kit_of
from talaria.federated.run import Member, Run
from talaria.model.spec import AdapterSpec, ModelSpec
from talaria.model.weights import Served
from talaria.planning.plan import Plan
from talaria.training.loop import predict
from talaria.types import Recipe, Samples
from talaria_export.build.build import make_bundle
from talaria_export.bundle.bundle import open_bundle
from talaria_export.convert.served import convert
from talaria_export.runtime.session import Session, session_of
from talaria_export.runtime.verify import verify_bundle

SPEC = ModelSpec("imu_cnn", (6, 32), 3)
CASES = {
    "pruned": ("fedrep", SPEC, {"head_epochs": 2, "final_epochs": 1}),
    "subnetwork": ("hermes", SPEC, {"threshold": 0.0, "tune_epochs": 1}),
    "Gaussian head": ("pfedgm", SPEC, {"features": 8, "tune_epochs": 1}),
    "constant gate": ("thorki", SPEC, {"gate": "constant", "join_epochs": 1}),
    "gate per sample": ("thorki", SPEC, {"gate": "sample", "gate_steps": 20}),
    "adapters": ("fedper", replace(SPEC, adapters=AdapterSpec("lowrank", rank=2)), {}),
    "images": ("fedper", ModelSpec("fmnist_cnn", (1, 28, 28), 3), {}),
    "steps": ("fedper", ModelSpec("mypkg.nets:Steps", (3, 16), 3), {}),
    "numbers": ("ditto", replace(SPEC, classes=2), {}),
}


def member(spec, task="classification"):
    rng = np.random.default_rng(0)
    y = np.arange(30) % 3
    x = (rng.standard_normal((30, *spec.input_shape)) + y.reshape(-1, *[1] * len(spec.input_shape))).astype(np.float32)
    y = np.repeat(y[:, None], spec.input_shape[-1], 1) if task == "per_step" else y
    y = (
        np.stack([y * 40.0 + 900, y * 0.5], 1) if task == "regression" else y
    )  # far from 0, each with a spread of its own
    samples = Samples.of(x, y, task)
    return Member("anna", samples, samples, engine="onnx")


@pytest.mark.parametrize("case", CASES)
def test_its_bundle_is_whole_and_answers_as_torch_does(case, tmp_path):
    name, spec, hparams = CASES[case]
    task = {"steps": "per_step", "numbers": "regression"}.get(case, "classification")
    run = Run(spec=spec, algorithm=name, hparams=hparams, rounds=1, recipe=Recipe(epochs=1, batch=8), task=task)
    one = member(spec, task)
    if case == "pruned":
        sizes = run_model.layout_of(spec).sizes
        one = replace(one, plan=Plan(widths={group: size // 2 for group, size in sizes.items()}))
    shared = run_model.first_shared(run)
    try:
        module = served_by(run, one, shared)
        run_model.equip(run, kits.decode(kits.encode(kit_of(run))))
        served = served_by(run, one, shared)
        dense = convert(run_model.unpruned(run), plain=True).SerializeToString()
    finally:
        run_model._kits.clear()
        run_model._adopted.clear()
        run_model.update_schema.cache_clear()
    assert isinstance(served, Served)
    path = tmp_path / "me.talaria"
    variants = ("fp32", "fp16") if case == "pruned" else ("fp32",)
    report = make_bundle(
        path, served, example=one.train.x[:1], samples=one.val, dense=dense, variants=variants, seconds=0, task=task
    )  # fmt: skip
    assert report.ok
    assert "the device's own graph" in report.checks[0].detail
    assert verify_bundle(path).ok
    answers = session_of(open_bundle(path), "fp32")(one.val.x)
    scale = max(1.0, float(np.abs(answers).max()))
    assert np.abs(answers - predict(module, one.val.x)).max() <= 1e-4 * scale
    assert Session(dense)(one.val.x).shape == answers.shape


def served_by(run, one, shared):
    _, private = rounds.participate(run, one, shared, None, 1)
    return rounds.personalize(run, one, shared, private)


def test_what_is_no_one_graph_is_refused():
    with pytest.raises(ModelError, match="where torch is"):
        convert(Served({}, lambda x: x))
