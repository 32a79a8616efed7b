"""The exceptions that ONNX Runtime raises, and their text on one line. Needs no torch; onnxruntime when asked."""

from __future__ import annotations

from functools import cache

LONGEST = 200
"""Characters of an error's text that are quoted."""


@cache
def refusals() -> tuple[type[Exception], ...]:
    """The exception types to catch where a session is made or run: ONNX Runtime's have no base class of their own.

    Raises:
        ImportError: where onnxruntime is not installed.
    """
    from onnxruntime.capi import onnxruntime_pybind11_state

    own = (kind for kind in vars(onnxruntime_pybind11_state).values() if isinstance(kind, type))
    return (RuntimeError, ValueError, *(kind for kind in own if issubclass(kind, Exception)))


def short(problem: Exception) -> str:
    """The text of ``problem`` on one line, cut to :data:`LONGEST` characters."""
    return " ".join(str(problem).split())[:LONGEST]
