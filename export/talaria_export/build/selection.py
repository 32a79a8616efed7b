"""The choice of the variant that is served: each is compared with fp32 and timed in the same run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from talaria import shares, tasks
from talaria.errors import BundleError, DataError
from talaria.tensors import Array
from talaria_export.convert.quantize import Gate, Made
from talaria_export.runtime.likeness import likeness
from talaria_export.runtime.session import Session
from talaria_export.runtime.timing import interleaved

ROUNDING = 1e-9
"""Of a score, which is a quotient of sums."""


def judge(
    one: Made,
    fp32: Made,
    judged: tuple[Array, Array | None],
    gate: Gate,
    probes: Array,
    expected: Array,
    task: str = tasks.CLASSIFICATION,
) -> dict[str, Any]:
    """A row of the manifest's table, without the latency."""
    row: dict[str, Any] = {"name": one.name, "file": None, "bytes": None, "passed": False, "why": one.why}
    row["settings"] = one.settings or {}
    if one.data is None:
        return row
    x, y = judged
    try:
        session, plain = Session(one.data), Session(fp32.data or b"")
        answers, exact, given = session(x), plain(x), session(probes)
    except (BundleError, DataError) as problem:
        return row | {"why": str(problem)}
    if not (np.isfinite(answers).all() and np.isfinite(given).all()):  # as where a divisor is rounded to 0
        return row | {"why": "gives NaN or infinity"}
    row["max_abs_diff"] = float(np.abs(given - expected).max())
    row["bytes"] = len(one.data)
    alike = likeness(task, answers, exact, y)
    row |= {"agreement": alike.agreement} if alike.distance is None else {"distance": alike.distance}
    lost = "" if y is None else _lost(row, answers, exact, y, gate, task)
    row["why"] = alike.why_not(gate.agreement, gate.distance) or lost
    return row | {"passed": not row["why"]}


def _lost(row: dict[str, Any], answers: Array, exact: Array, y: Array, gate: Gate, task: str) -> str:
    """Adds the score to the row; says what is lost of it where that is too much."""
    if task == tasks.CLASSIFICATION:
        right, before = (int((one.argmax(1) == y).sum()) for one in (answers, exact))
        row["accuracy"] = right / len(y)
        if before <= right or shares.at_most(before - right, len(y), gate.accuracy_drop):
            return ""
        return f"loses {before - right} of {len(y)} samples that fp32 labels right; accuracy_drop={gate.accuracy_drop}"
    goal = tasks.of(task)
    row["accuracy"], before_score = (goal.measured(one, y)[0] for one in (answers, exact))
    if before_score - row["accuracy"] <= gate.accuracy_drop + ROUNDING:
        return ""
    return (
        f"loses {before_score - row['accuracy']:.4f} of fp32's {tasks.score_word(task)} of {before_score:.4f}; "
        f"accuracy_drop={gate.accuracy_drop}"
    )


def time(made: Sequence[Made], rows: list[dict[str, Any]], dense: bytes | None, x: Array, seconds: float) -> None:
    """Adds the latency for one input to each row; ``latency_ratio`` is to dense where given, else to fp32."""
    sessions = {"dense": Session(dense)} if dense is not None else {}
    sessions |= {one.name: Session(one.data) for one, row in zip(made, rows, strict=True) if row["bytes"] and one.data}
    found = interleaved({name: partial(session, x) for name, session in sessions.items()}, seconds=seconds)
    for row in rows:
        if row["name"] in found:
            row |= {"latency_ms": found[row["name"]].ms, "latency_ratio": found[row["name"]].ratio}


def choose(rows: Sequence[Mapping[str, Any]], gate: Gate) -> str:
    """The fastest variant that passed; among those as good as equally fast, the smallest; fp32 wins a full tie."""
    passed = [row for row in rows if row["passed"]]
    fastest = min(row.get("latency_ms", 0.0) for row in passed)
    near = [row for row in passed if row.get("latency_ms", 0.0) <= fastest * (1 + gate.latency_gain)]
    return str(min(near, key=lambda row: row["bytes"])["name"])
