"""The choice of the variant that is served: each is compared with fp32 and timed in the same run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from talaria import shares
from talaria.errors import BundleError
from talaria_export.bundle.preprocess import Array
from talaria_export.convert.quantize import Gate, Made
from talaria_export.runtime.session import Session
from talaria_export.runtime.timing import interleaved


def judge(
    one: Made, fp32: Made, judged: tuple[Array, Array | None], gate: Gate, probes: Array, expected: Array
) -> dict[str, Any]:
    """A row of the manifest's table, without the latency."""
    row: dict[str, Any] = {"name": one.name, "file": None, "bytes": None, "passed": False, "why": one.why}
    row["settings"] = one.settings or {}
    if one.data is None:
        return row
    x, y = judged
    try:
        session, plain = Session(one.data), Session(fp32.data or b"")
        answers, plain_answers = session(x).argmax(1), plain(x).argmax(1)
        row["max_abs_diff"] = float(np.abs(session(probes) - expected).max())
    except BundleError as problem:
        return row | {"why": str(problem)}
    row["bytes"] = len(one.data)
    count, agree = len(answers), int((answers == plain_answers).sum())
    row["agreement"] = agree / count
    lost = 0
    if y is not None:
        right = int((answers == y).sum())
        row["accuracy"] = right / count
        lost = int((plain_answers == y).sum()) - right
    if not shares.at_least(agree, count, gate.agreement):
        row["why"] = f"agrees with fp32 on {agree} of {count} inputs, a share of {gate.agreement} is asked for"
    elif lost > 0 and not shares.at_most(lost, count, gate.accuracy_drop):
        row["why"] = f"loses {lost} of {count} samples that fp32 labels right; accuracy_drop={gate.accuracy_drop}"
    else:
        row["passed"] = True
    return row


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
