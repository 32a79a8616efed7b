"""Reads the summary of a run into what the report tells, and says which key is missing or odd.

A summary is plain JSON. Needed::

    users       {name: {"accuracy": {method: 0..1, ...}, ...}}, or their number, with that dict under per_user
    accuracy    {method: mean over members}            methods: local, fedavg, fedavg_ft, personal
    rounds, seed, broker, versions                      int, int, text, {name: version}

Each user may have ``role`` ("member", the default, or "newcomer"), ``device`` (its hardware class) and the figures of
:data:`RATIOS` against dense FedAvg, ``onnx_max_abs_diff`` and ``bundle_bytes``; the summary may have the same figures
over all users, and::

    title, subtitle      text
    newcomers            {"accuracy": {zero_shot, scratch, fedavg_ft, personal}}: means
    curve                [{"round": 1, "accuracy": {method: mean}}, ...]
    overlap              {"names": [class, ...], "matrix": [[0..1, ...], ...]}: kept channels in common
    notes                [text, ...]: what a reader should know, each a paragraph
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from talaria.errors import DataError
from talaria.training.evaluation import summarize

MEMBER_METHODS = ("local", "fedavg", "fedavg_ft", "personal")
NEWCOMER_METHODS = ("scratch", "zero_shot", "fedavg_ft", "personal")
RATIOS = ("params_ratio", "bundle_ratio", "latency_ratio", "upload_ratio", "download_ratio")

TITLES = {
    "local": "Alone",
    "fedavg": "FedAvg",
    "fedavg_ft": "FedAvg, fine-tuned",
    "personal": "Personal",
    "scratch": "Alone, from scratch",
    "zero_shot": "Fleet model as it is",
    "params_ratio": "Parameters",
    "bundle_ratio": "Bundle size",
    "latency_ratio": "Latency",
    "upload_ratio": "Upload",
    "download_ratio": "Download",
}
"""How people read the keys."""


@dataclass(frozen=True)
class User:
    """One person's figures; ``ratios`` are against dense FedAvg and hold only what was measured."""

    name: str
    newcomer: bool
    device: str
    accuracy: Mapping[str, float]
    ratios: Mapping[str, float]
    parity: float | None
    bundle_bytes: int | None


@dataclass(frozen=True)
class Overlap:
    """``matrix[i][j]``: the share of channels that classes ``i`` and ``j`` keep in common, of those either keeps."""

    names: tuple[str, ...]
    matrix: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Story:
    """What the report tells. ``score`` is what people call ``accuracy`` and the like: of another task than
    classification these hold its score, over test samples, at most 1; ``worst_tenth`` as in the evaluation."""

    title: str
    subtitle: str
    score: str
    members: tuple[User, ...]
    newcomers: tuple[User, ...]
    accuracy: Mapping[str, float]
    worst_tenth: Mapping[str, float]
    newcomer_accuracy: Mapping[str, float]
    newcomer_worst: Mapping[str, float]
    ratios: Mapping[str, float]
    parity: float | None
    rounds: int
    seed: int
    broker: str
    versions: Mapping[str, str]
    curve: Mapping[str, tuple[tuple[int, float], ...]]
    overlap: Overlap | None
    notes: tuple[str, ...]


def read(summary: Mapping[str, Any]) -> Story:
    """The story of a summary. :class:`DataError` names the key, its value and what is needed."""
    users = tuple(_user(name, _dict(u, f"users.{name}")) for name, u in sorted(_users(summary).items()))
    members = tuple(u for u in users if not u.newcomer)
    newcomers = tuple(u for u in users if u.newcomer)
    if not members:
        raise DataError("summary: users holds no member; give at least one")
    given = _dict(summary.get("newcomers") or {}, "newcomers")
    arrived = _numbers(given.get("accuracy", {}), "newcomers.accuracy")
    return Story(
        title=str(summary.get("title", "Talaria")),
        subtitle=str(summary.get("subtitle", "")),
        score=str(summary.get("score", "accuracy")),
        members=members,
        newcomers=newcomers,
        accuracy=_numbers(_needed(summary, "accuracy"), "accuracy"),
        worst_tenth=_over(members, MEMBER_METHODS, tenth=True),
        newcomer_accuracy=_over(newcomers, NEWCOMER_METHODS) | arrived,
        newcomer_worst=_over(newcomers, NEWCOMER_METHODS, tenth=True),
        ratios=_present(summary, RATIOS, "summary"),
        parity=_present(summary, ("onnx_max_abs_diff",), "summary").get("onnx_max_abs_diff"),
        rounds=int(_number(_needed(summary, "rounds"), "rounds")),
        seed=int(_number(_needed(summary, "seed"), "seed")),
        broker=str(_needed(summary, "broker")),
        versions={str(k): str(v) for k, v in _dict(_needed(summary, "versions"), "versions").items()},
        curve=_curve(summary.get("curve") or []),
        overlap=_overlap(summary.get("overlap")),
        notes=tuple(str(note) for note in summary.get("notes") or ()),
    )


def mean_ratio(users: Iterable[User], ratio: str) -> float | None:
    """The mean of those who have this one; None where nobody has."""
    values = [user.ratios[ratio] for user in users if ratio in user.ratios]
    return sum(values) / len(values) if values else None


def _users(summary: Mapping[str, Any]) -> Mapping[str, Any]:
    users = _needed(summary, "users")
    return _dict(_needed(summary, "per_user"), "per_user") if isinstance(users, int) else _dict(users, "users")


def _user(name: str, given: Mapping[str, Any]) -> User:
    where = f"users.{name}"
    role = given.get("role", "member")
    if role not in ("member", "newcomer"):
        raise DataError(f"summary: {where}.role={role!r} is unknown; use 'member' or 'newcomer'")
    size = given.get("bundle_bytes")
    return User(
        name=name,
        newcomer=role == "newcomer",
        device=str(given.get("device", "")),
        accuracy=_numbers(_needed(given, "accuracy", where), f"{where}.accuracy"),
        ratios=_present(given, RATIOS, where),
        parity=_present(given, ("onnx_max_abs_diff",), where).get("onnx_max_abs_diff"),
        bundle_bytes=None if size is None else int(_number(size, f"{where}.bundle_bytes")),
    )


def _over(users: tuple[User, ...], methods: tuple[str, ...], tenth: bool = False) -> dict[str, float]:
    out = {}
    for method in methods:
        values = [u.accuracy[method] for u in users if method in u.accuracy]
        if values:
            summary = summarize(values)
            out[method] = summary.worst_tenth if tenth else summary.mean
    return out


def _curve(rows: object) -> dict[str, tuple[tuple[int, float], ...]]:
    if not isinstance(rows, list):
        raise DataError(f"summary: curve={rows!r} must be a list of {{'round', 'accuracy'}}")
    out: dict[str, list[tuple[int, float]]] = {}
    for i, row in enumerate(rows):
        given = _dict(row, f"curve[{i}]")
        at = int(_number(_needed(given, "round", f"curve[{i}]"), f"curve[{i}].round"))
        for method, value in _numbers(_needed(given, "accuracy", f"curve[{i}]"), f"curve[{i}].accuracy").items():
            out.setdefault(method, []).append((at, value))
    return {method: tuple(sorted(points)) for method, points in out.items()}


def _overlap(given: object) -> Overlap | None:
    if given is None:
        return None
    data = _dict(given, "overlap")
    names = tuple(str(n) for n in _needed(data, "names", "overlap"))
    matrix = tuple(
        tuple(_number(v, f"overlap.matrix[{i}]") for v in row)
        for i, row in enumerate(_needed(data, "matrix", "overlap"))
    )
    if [len(row) for row in matrix] != [len(names)] * len(names):
        raise DataError(f"summary: overlap.matrix must be {len(names)} x {len(names)}, one row and column per name")
    return Overlap(names, matrix)


def _needed(given: Mapping[str, Any], key: str, where: str = "") -> Any:
    if key not in given:
        raise DataError(f"summary: {where + '.' if where else ''}{key} is missing; write it with the others")
    return given[key]


def _dict(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise DataError(f"summary: {where}={value!r} must be an object with named entries")
    return value


def _present(given: Mapping[str, Any], keys: tuple[str, ...], where: str) -> dict[str, float]:
    return {key: _number(given[key], f"{where}.{key}") for key in keys if given.get(key) is not None}


def _numbers(given: object, where: str) -> dict[str, float]:
    return {str(k): _number(v, f"{where}.{k}") for k, v in _dict(given, where).items() if v is not None}


def _number(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(f"summary: {where}={value!r} must be a finite number")
    return float(value)
