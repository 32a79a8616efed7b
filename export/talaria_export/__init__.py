"""From a personal model to one verified file, and from that file to predictions.

The names below load on first use: :class:`Predictor` and the reading of bundles need numpy and onnxruntime only,
while :func:`export_onnx` and :func:`make_bundle` bring in torch and onnx.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from talaria import lazy

if TYPE_CHECKING:
    from talaria_export.build.build import make_bundle
    from talaria_export.bundle.archive import Limits
    from talaria_export.bundle.bundle import Bundle, open_bundle
    from talaria_export.bundle.report import Check, Report
    from talaria_export.convert.onnx import export_onnx
    from talaria_export.runtime.predictor import Prediction, Predictor
    from talaria_export.runtime.verify import verify_bundle

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

__getattr__, __dir__ = lazy.attach(
    __name__,
    {
        "Bundle": "talaria_export.bundle.bundle",
        "Check": "talaria_export.bundle.report",
        "Limits": "talaria_export.bundle.archive",
        "Prediction": "talaria_export.runtime.predictor",
        "Predictor": "talaria_export.runtime.predictor",
        "Report": "talaria_export.bundle.report",
        "export_onnx": "talaria_export.convert.onnx",
        "make_bundle": "talaria_export.build.build",
        "open_bundle": "talaria_export.bundle.bundle",
        "verify_bundle": "talaria_export.runtime.verify",
    },
)
