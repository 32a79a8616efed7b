"""From a personal model to one verified file, and from that file to predictions.

The names below load on first use: :class:`Predictor` and the reading of bundles need numpy and onnxruntime only,
while :func:`export_onnx` and :func:`make_bundle` bring in torch and onnx.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from talaria_export.archive import Limits
    from talaria_export.build import make_bundle
    from talaria_export.bundle import Bundle, open_bundle
    from talaria_export.onnx import export_onnx
    from talaria_export.predictor import Prediction, Predictor
    from talaria_export.report import Check, Report
    from talaria_export.verify import verify_bundle

_HOME = {
    "Bundle": "bundle",
    "Check": "report",
    "Limits": "archive",
    "Prediction": "predictor",
    "Predictor": "predictor",
    "Report": "report",
    "export_onnx": "onnx",
    "make_bundle": "build",
    "open_bundle": "bundle",
    "verify_bundle": "verify",
}

__all__ = [
    "Bundle",
    "Check",
    "Limits",
    "Prediction",
    "Predictor",
    "Report",
    "export_onnx",
    "make_bundle",
    "open_bundle",
    "verify_bundle",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
