"""The personal model becomes a file that runs without torch."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch.nn import Module

from talaria.rounds import Run
from talaria_edge.data import DeviceData

logger = logging.getLogger(__name__)


def deploy(path: Path, model: Module, data: DeviceData, run: Run, device: str) -> dict[str, Any]:
    """Write the bundle of ``model`` to ``path`` and say what was measured; nothing where export is not installed."""
    if find_spec("onnx") is None or find_spec("onnxruntime") is None:
        logger.warning("no bundle is written: run `pip install 'talaria[export]'` for that")
        return {"bundle": None}
    from talaria_export import make_bundle

    path.parent.mkdir(parents=True, exist_ok=True)
    held = data.val if len(data.val) else data.train
    report = make_bundle(
        path,
        model,
        example=data.train.x[:1],
        samples=held,
        calibration=data.train.x,
        meta={"device": device, "algorithm": run.algorithm, "rounds": run.rounds, "seed": run.seed},
    )
    return {"bundle": str(path), "report": report.to_json()}
