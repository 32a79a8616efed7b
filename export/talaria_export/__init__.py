"""From a personal model to one verified file, and from that file to predictions.

The names below load on first use: :class:`Predictor` and the reading of bundles need numpy and onnxruntime only,
while :func:`export_onnx` and :func:`make_bundle` bring in torch and onnx.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from talaria_export.build.build import make_bundle
    from talaria_export.bundle.archive import Limits
    from talaria_export.bundle.bundle import Bundle, open_bundle
    from talaria_export.bundle.report import Check, Report
    from talaria_export.convert.onnx import export_onnx
    from talaria_export.runtime.predictor import Prediction, Predictor
    from talaria_export.runtime.verify import verify_bundle

_HOME = {
    "Bundle": "bundle.bundle",
    "Check": "bundle.report",
    "Limits": "bundle.archive",
    "Prediction": "runtime.predictor",
    "Predictor": "runtime.predictor",
    "Report": "bundle.report",
    "export_onnx": "convert.onnx",
    "make_bundle": "build.build",
    "open_bundle": "bundle.bundle",
    "verify_bundle": "runtime.verify",
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
