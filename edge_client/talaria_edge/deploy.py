"""The personal model becomes a file that runs without torch."""

from __future__ import annotations

import logging
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch.nn import Module

from talaria import rounds
from talaria.local import predict
from talaria.model import zoo
from talaria.model.zoo import ModelSpec
from talaria.rounds import Run
from talaria.types import Samples
from talaria_edge.config import DeviceConfig
from talaria_edge.data import DeviceData

logger = logging.getLogger(__name__)


def deploy(config: DeviceConfig, model: Module, data: DeviceData, run: Run) -> dict[str, Any]:
    """Write the bundle of ``model`` and say what was measured; nothing where none is asked for or export is missing.

    The bundle's variants are judged on validation data. Where the device has test samples, the file as written is
    measured on them: ``test.accuracy``, and ``test.max_abs_diff`` to torch.
    """
    path = config.bundle
    if path is None:
        return {}
    if find_spec("onnx") is None or find_spec("onnxruntime") is None:
        logger.warning("no bundle is written: run `pip install 'talaria[export]'` for that")
        return {"bundle": None}
    from talaria_export import make_bundle
    from talaria_export.variants import VARIANTS

    path.parent.mkdir(parents=True, exist_ok=True)
    held = data.val if len(data.val) else data.train
    report = make_bundle(
        path,
        model,
        example=data.train.x[:1],
        samples=held,
        calibration=data.train.x,
        labels=config.labels or None,
        variants=config.variants or VARIANTS,
        dense=dense_file(run.spec),
        meta={
            "device": config.device,
            "algorithm": run.algorithm,
            "rounds": run.rounds,
            "seed": run.seed,
            "model": run.spec.to_json(),
            "samples": {"train": len(data.train), "validation": len(data.val)},
        },
    )
    found: dict[str, Any] = {"bundle": str(path), "report": report.to_json()}
    if data.test is not None and len(data.test):
        found["test"] = _measured(path, model, data.test)
    return found


@lru_cache(maxsize=4)
def dense_file(spec: ModelSpec) -> bytes:
    """The unpruned model as torch exports it: what latency is compared with."""
    from talaria_export.onnx import export_onnx

    return export_onnx(rounds.template(spec), zoo.example(spec), plain=True)


def _measured(path: Path, model: Module, test: Samples) -> dict[str, float]:
    from talaria_export.bundle import open_bundle
    from talaria_export.session import Session

    outputs = Session(open_bundle(path).model())(test.x.numpy())
    exact = Session(open_bundle(path).model("fp32"))(test.x.numpy())
    right = outputs.argmax(1) == test.y.numpy()
    difference = float(abs(exact - predict(model, test.x).numpy()).max())
    return {"accuracy": float(right.mean()), "max_abs_diff": difference}
