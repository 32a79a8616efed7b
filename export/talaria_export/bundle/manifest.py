"""The manifest of a bundle: what each field is, and a reader that refuses everything else.

==========  =======================================================================================================
format      ``"talaria-bundle"``
version     1; a reader refuses any other
created     time of writing, ISO 8601, or null
card        the model card: algorithm, round, fleet, counts, metrics, plan ... (free, plain data)
input       ``{"name": "input", "shape": [6, 100], "dtype": "float32"}``, without the batch dimension; also, where the
            graph begins with them, ``"normalized": {"mean": [..], "std": [..]}`` (the bundle takes raw numbers) and
            ``"windows": {"size": 100, "stride": 50}`` (it takes one recording (time, channels) of any length), and
            ``"parts": [{"name": "imu", "shape": [6, 100]}, ...]`` where named inputs stand side by side in the one
output      ``{"name": "logits", "labels": ["walk", ...]}``, and ``"task"`` where it is not ``"classification"``: then
            the outputs are what :mod:`talaria.tasks` says, and the labels name them
variants    one row per variant tried: name, file (null where it was left out), bytes, passed, why, and its figures
default     the variant that a predictor runs
gate        the thresholds that a variant had to keep
parity      how to repeat the comparison with torch: the inputs (stored or drawn from a seed; where they say
            ``"normalized": true``, as the model takes them, which the bundle then has raw), the outputs, tolerance
programs    the same model for other runtimes: name, file, bytes, runtime with its version, max_abs_diff; may be absent
reference   the dense model that latency is compared with, as a member without weights, or null
device      what the figures were measured on
files       size and SHA-256 of every other member
==========  =======================================================================================================
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

from talaria import inputs, tasks
from talaria.errors import BundleError, ConfigError, DataError
from talaria.foreign import shown
from talaria_export.bundle.preprocess import ELEMENTS, Preprocessing

FORMAT = "talaria-bundle"
VERSION = 1
VARIANTS = ("fp32", "fp16", "int8", "int8-linear")
"""Every variant: plain; half precision in the file only; static int8; int8 weights of the linear layers."""
LONGEST = 1000
"""Characters of a text in a manifest, such as a label."""


def check_names(wanted: Sequence[str]) -> None:
    """Raises :class:`~talaria.errors.ConfigError` on a name that is no variant."""
    if isinstance(wanted, str) or not isinstance(wanted, Sequence):
        raise ConfigError(f"variants={shown(wanted)} must be a list of names; choose from {', '.join(VARIANTS)}")
    unknown = [name for name in wanted if name not in VARIANTS]
    if unknown:
        raise ConfigError(f"variants: {unknown} are unknown; choose from {', '.join(VARIANTS)}")


def parse_manifest(text: bytes) -> dict[str, Any]:
    """The manifest as plain data; a :class:`~talaria.errors.BundleError` names the field that is wrong."""
    try:
        found = json.loads(text.decode(), object_pairs_hook=_once, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as problem:
        raise BundleError(f"manifest.json: cannot be read ({str(problem)[:120]}); fetch the bundle again") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise BundleError(f"manifest.json: format is not {FORMAT!r}; this is not a bundle")
    if not _count(found.get("version"), VERSION, VERSION):
        raise BundleError(
            f"manifest.json: version {found.get('version')!r} is not the {VERSION} that this talaria reads; "
            "upgrade talaria or export the model again"
        )
    if not _programs(found.get("programs", [])):
        raise _wrong("programs", found["programs"])
    for name, check in _FIELDS.items():
        if name not in found or not check(found[name]):
            raise _wrong(name, found.get(name))
    _check_references(found)
    _check_sizes(found)
    return found


def _check_sizes(found: dict[str, Any]) -> None:
    """What a reader would allocate for the inputs, before it does."""
    try:
        steps = Preprocessing.from_json(found["input"])
    except ConfigError as problem:
        raise BundleError(f"manifest.json: input: {problem}") from None
    windows = found["input"].get("windows", {"size": steps.shape[-1]})
    if windows["size"] != steps.shape[-1]:
        raise _wrong("input", found["input"])
    if math.prod(steps.inputs(found["parity"]["inputs"].get("count", 1))) > ELEMENTS:
        raise BundleError(f"manifest.json: its inputs have more than {ELEMENTS} numbers; export with fewer probes")


def _check_references(found: dict[str, Any]) -> None:
    files, rows = found["files"], found["variants"]
    names = [row["name"] for row in rows]
    inside = {row["name"]: row["file"] for row in rows if row["file"] is not None}
    if len(names) != len(set(names)) or found["default"] not in inside:
        raise _wrong("default", found["default"])
    for row in rows:
        if "optimized" in row and row["optimized"]["file"] not in files:
            raise _wrong("variants", row["optimized"]["file"])
        if row["file"] is not None and (not row["file"].endswith(".onnx") or row["file"] not in files):
            raise _wrong("variants", row["file"])
    for member in (found["parity"]["outputs"], found["parity"]["inputs"].get("file")):
        if member is not None and member not in files:
            raise _wrong("parity", member)
    for program in found.get("programs", []):
        if program["file"] not in files:
            raise _wrong("programs", program["file"])
    if found["reference"] is not None and found["reference"]["file"] not in files:
        raise _wrong("reference", found["reference"])


def _wrong(name: str, value: object) -> BundleError:
    return BundleError(f"manifest.json: {name}={str(value)[:80]!r} is missing or wrong; export the model again")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a name occurs twice")
    return out


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def _count(value: object, low: int = 0, high: int = 1 << 31) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _number(value: object) -> bool:
    """Within float64: JSON also has whole numbers of any length, and 1e999."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _has(value: object, **checks: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(name in value and check(value[name]) for name, check in checks.items())


def _text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= LONGEST


def _maybe(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or check(value)


def _shape(value: object) -> bool:
    return isinstance(value, list) and 1 <= len(value) <= 7 and all(_count(size, 1, 1 << 24) for size in value)


def _labels(value: object) -> bool:
    return isinstance(value, list) and 1 <= len(value) <= 100_000 and all(_text(label) for label in value)


def _task(value: object) -> bool:
    try:
        return _text(value) and bool(tasks.of(str(value)))
    except ConfigError:
        return False


def _input(value: object) -> bool:
    return (
        isinstance(value, dict)
        and _has(value, name=_text, shape=_shape, dtype=lambda d: d == "float32")
        and ("normalized" not in value or _has(value["normalized"], mean=_numbers, std=_numbers))
        and ("parts" not in value or _parts(value["parts"], value["shape"]))
        and ("windows" not in value or _has(value["windows"], size=_step, stride=_step))
    )


def _parts(value: object, shape: list[int]) -> bool:
    if not isinstance(value, list) or not all(_has(part, name=_text, shape=_shape) for part in value):
        return False
    try:
        parts = inputs.parts_of({part["name"]: part["shape"] for part in value})
    except DataError:
        return False
    return list(parts) == [part["name"] for part in value] and [inputs.size_of(parts)] == shape


def _numbers(value: object) -> bool:
    if not isinstance(value, list) or not 1 <= len(value) <= 1 << 16:
        return False
    return all(_number(number) and -3e38 < number < 3e38 for number in value)  # within float32


def _step(value: object) -> bool:
    return _count(value, 1, 1 << 24)


def _rows(value: object) -> bool:
    return isinstance(value, list) and 1 <= len(value) <= 32 and all(_row(row) for row in value)


def _row(row: object) -> bool:
    return (
        isinstance(row, dict)
        and _has(row, name=_text, file=_maybe(_text), passed=lambda p: isinstance(p, bool))
        and _number(row.get("max_abs_diff", 0))
        and ("optimized" not in row or _has(row["optimized"], file=_text, cpu=_text, onnxruntime=_text))
    )


def _programs(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= 8
        and all(_has(row, name=_text, file=_text, runtime=_text, max_abs_diff=_number) for row in value)
    )


def _sources(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    drawn = _has(value, seed=_count, count=lambda c: _count(c, 1, 4096), shift=_number, scale=_number)
    return (drawn and isinstance(value.get("normalized", True), bool)) or _has(value, file=_text)


def _digests(value: object) -> bool:
    return isinstance(value, dict) and all(
        _has(entry, bytes=_count, sha256=lambda digest: isinstance(digest, str) and len(digest) == 64)
        for entry in value.values()
    )


_FIELDS: dict[str, Callable[[Any], bool]] = {
    "created": _maybe(_text),
    "card": lambda card: isinstance(card, dict),
    "input": _input,
    "output": lambda out: _has(out, name=_text, labels=_labels) and _task(out.get("task", "classification")),
    "variants": _rows,
    "default": _text,
    "gate": lambda gate: _has(gate, agreement=_number, accuracy_drop=_number) and _number(gate.get("distance", 0)),
    "parity": lambda parity: _has(parity, inputs=_sources, outputs=_text, tolerance=_number),
    "reference": _maybe(lambda reference: _has(reference, file=_text)),
    "device": lambda device: isinstance(device, dict),
    "files": _digests,
}
