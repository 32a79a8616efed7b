"""Never worse: a new personal model is deployed only where it does better on the user's own held-out samples.

    deployed.json            which bundles are in force and before it, of which models; replaced by rename only
    deployed.lock            held while that changes, so that an operator may roll back beside a running agent
    bundles/<digest>.talaria the bundle in force and the one before it
    waiting.json             a bundle that did better and waits for somebody to install it, where that is asked for;
    waiting.talaria          its bytes
    <bundle>                 what predictors open: always one whole bundle, replaced by rename only

A cut at any point leaves the old bundle or the new one in force; :func:`settle` makes ``<bundle>`` agree again.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from talaria import durable
from talaria.errors import ConfigError, StateError
from talaria_edge.storage import tensor_files

LEDGER = "deployed.json"
WAITING = "waiting.json"
LARGEST = 1 << 30
"""Most bytes of a file that is taken for a bundle."""
MEND = "move it away to begin anew; the bundle in force keeps working"
_NAME = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Decision:
    """Whether to deploy the candidate, and why."""

    deploy: bool
    reason: str
    worse: bool | None = False
    """Whether it does worse than what runs; None where there are no samples to tell by."""

    def __bool__(self) -> bool:
        return self.deploy


@dataclass(frozen=True)
class Deployed:
    """The bundle in force and the one before it, by the first 32 hex digits of their sha256.

    ``model`` names the weights in force and ``refused`` those that were last rolled back, in the same way; None where
    they are not known.
    """

    current: str | None = None
    previous: str | None = None
    model: str | None = None
    refused: str | None = None


def decide(
    candidate: float, deployed: float | None, samples: int, margin: float = 0.0, lowest: float = 0.0
) -> Decision:
    """Compare accuracies, in [0, 1] (scores of another task: from ``lowest`` to 1), measured on the same ``samples``
    held-out samples of this user.

    The candidate wins only by more than ``margin``: a tie keeps what runs. Without held-out samples nothing that runs
    is replaced. ``deployed=None`` means that nothing runs yet.
    """
    if not 0 <= margin < 1 or samples < 0:
        raise ConfigError(f"gate: margin={margin} must be in [0, 1) and samples={samples} at least 0")
    if not math.isfinite(candidate) or not lowest <= candidate <= 1:
        return Decision(False, f"the new model's accuracy is {candidate}, not a share", worse=True)
    if candidate == lowest < 0:
        return Decision(False, "the new model gives numbers that are not finite", worse=True)
    if deployed is None:
        return Decision(True, "nothing is deployed yet")
    if samples == 0:
        return Decision(False, "no held-out samples to compare on; the deployed model stays", worse=None)
    if not math.isfinite(deployed):
        return Decision(True, f"the deployed model's accuracy is {deployed}, the new one's {candidate:.4f}")
    told = f"{candidate:.4f} against {deployed:.4f} on {samples} held-out samples"
    if candidate > deployed + margin:
        return Decision(True, f"better: {told}")
    return Decision(False, f"not better: {told}; the deployed model stays", worse=candidate < deployed)


def after_deploy(state: Deployed, digest: str, model: str | None = None) -> Deployed:
    """The state with ``digest`` in force; deploying what is in force changes nothing."""
    return state if digest == state.current else Deployed(digest, state.current, model, state.refused)


def after_rollback(state: Deployed) -> Deployed:
    """The state with the previous bundle in force again, and none before it."""
    if state.previous is None:
        raise StateError("gate: there is no earlier bundle to go back to; export a model again")
    return Deployed(state.previous, None, None, state.model)


def read(folder: Path) -> Deployed:
    """What is deployed; nothing on a new device. Raises :class:`~talaria.errors.StateError` on damage."""
    path = folder / LEDGER
    if not path.exists():
        return Deployed()
    try:
        found: Any = json.loads(tensor_files.read(path, MEND)[:4096])
        state = Deployed(found["current"], found["previous"], found.get("model"), found.get("refused"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StateError(f"state: {path} is damaged ({error}); {MEND}") from None
    for name in vars(state).values():
        if name is not None and not (isinstance(name, str) and _NAME.fullmatch(name)):
            raise StateError(f"state: {path} names {str(name)[:40]!r}, which is no bundle; {MEND}")
    return state


def deploy(folder: Path, data: bytes, bundle: Path, model: str | None = None) -> Deployed:
    """Put the bundle ``data`` of the weights ``model`` in force, and at ``bundle`` for predictors. The one before it
    stays for a rollback, and what waited to be installed is gone: it was better than what ran until now."""
    with _alone(folder):
        _forget_waiting(folder)  # before, so that after a cut nothing waits that is older than what runs
        return _deploy(folder, data, bundle, model)


def _deploy(folder: Path, data: bytes, bundle: Path, model: str | None) -> Deployed:
    digest = hashlib.sha256(data).hexdigest()[:32]
    state = after_deploy(read(folder), digest, model)
    path = _path(folder, digest)
    tensor_files.make_folder(path.parent)
    tensor_files.write(path, data)
    _commit(folder, state)
    _settle(folder, bundle)
    return state


def adopt(folder: Path, bundle: Path) -> Deployed:
    """What is deployed, where a file at ``bundle`` that nobody entered here counts as in force."""
    state = read(folder)
    if state.current is None and bundle.is_file() and bundle.stat().st_size <= LARGEST:
        return deploy(folder, tensor_files.read(bundle, MEND), bundle)
    return state


def in_force(folder: Path) -> bytes | None:
    """The bundle in force, checked, or None. Raises :class:`~talaria.errors.StateError` where it is damaged."""
    state = read(folder)
    return None if state.current is None else _intact(folder, state.current)


@dataclass(frozen=True)
class Waiting:
    """A bundle that waits to be installed: the first 32 hex digits of its sha256, the name of its weights, and why it
    was found better."""

    digest: str
    model: str
    reason: str


def hold(folder: Path, data: bytes, model: str, reason: str) -> Waiting:
    """Keep the bundle ``data`` of the weights ``model`` until :func:`install`; an earlier one that waits is gone."""
    found = Waiting(hashlib.sha256(data).hexdigest()[:32], model, reason)
    with _alone(folder):
        tensor_files.write(folder / "waiting.talaria", data)
        tensor_files.write(folder / WAITING, json.dumps(vars(found)).encode())
    return found


def waiting(folder: Path) -> Waiting | None:
    """What waits to be installed; None where nothing does, or it cannot be read."""
    try:
        with (folder / WAITING).open("rb") as file:
            found = json.loads(file.read(4096))
        made = Waiting(found["digest"], found["model"], str(found["reason"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    good = all(isinstance(name, str) and _NAME.fullmatch(name) for name in (made.digest, made.model))
    return made if good else None


def waiting_bundle(folder: Path, model: str) -> bytes | None:
    """The bundle that waits, where it is of the weights ``model`` and whole: made again it would be another one."""
    found = waiting(folder)
    try:
        return _whole(folder, found) if found is not None and found.model == model else None
    except StateError:
        return None


def install(folder: Path, bundle: Path) -> Deployed:
    """Put what waits in force. Raises :class:`~talaria.errors.StateError` where nothing does, or it is damaged;
    nothing changes then."""
    _require_waiting(folder)
    with _alone(folder):
        found = _require_waiting(folder)
        state = _deploy(folder, _whole(folder, found), bundle, found.model)
        _forget_waiting(folder)
    return state


def _require_waiting(folder: Path) -> Waiting:
    found = waiting(folder)
    if found is None:
        raise StateError("gate: no bundle waits to be installed; the one in force is the newest")
    return found


def _whole(folder: Path, found: Waiting) -> bytes:
    mend = "it is made again when the agent is started, or has another model"
    data = tensor_files.read(folder / "waiting.talaria", mend)
    if hashlib.sha256(data).hexdigest()[:32] != found.digest:
        raise StateError(f"state: {folder / 'waiting.talaria'} is not what was kept; {mend}")
    return data


def _forget_waiting(folder: Path) -> None:
    for name in (WAITING, "waiting.talaria"):
        with suppress(OSError):
            (folder / name).unlink()


def rollback(folder: Path, bundle: Path) -> Deployed:
    """Put the previous bundle in force again. Raises :class:`~talaria.errors.StateError` where there is none, or
    where it is damaged; nothing changes then."""
    after_rollback(read(folder))
    with _alone(folder):
        state = after_rollback(read(folder))
        _intact(folder, state.current)
        _commit(folder, state)
        _settle(folder, bundle)
    return state


def settle(folder: Path, bundle: Path) -> None:
    """Make ``bundle`` the one in force, and remove those that are neither in force nor before it, nor whole."""
    with _alone(folder):
        _settle(folder, bundle)


def _settle(folder: Path, bundle: Path) -> None:
    state = read(folder)
    if state.current is not None:
        data, there = _intact(folder, state.current), None
        with suppress(OSError):  # what cannot be read is replaced, or the disk says why not
            there = durable.read(bundle)
        if there != data:
            tensor_files.make_folder(bundle.parent)
            tensor_files.write(bundle, data)
    kept = {f"{digest}.talaria" for digest in (state.current, state.previous)}
    for path in [*(folder / "bundles").glob("*.talaria"), *(folder / "bundles").glob(".*.talaria.part")]:
        if path.name not in kept:
            with suppress(OSError):
                path.unlink()


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    try:
        lock = durable.lock(folder / "deployed.lock")
    except OSError as error:
        raise StateError(f"state: cannot use {folder}: {error.strerror}; give a folder to write to") from None
    with lock:
        yield


def _intact(folder: Path, digest: str | None) -> bytes:
    path = _path(folder, digest or "")
    data = tensor_files.read(path, MEND)
    if hashlib.sha256(data).hexdigest()[:32] != digest:
        raise StateError(f"state: {path} is not what was deployed; {MEND}")
    return data


def _commit(folder: Path, state: Deployed) -> None:
    tensor_files.write(folder / LEDGER, json.dumps(vars(state), sort_keys=True).encode())


def _path(folder: Path, digest: str) -> Path:
    return folder / "bundles" / f"{digest}.talaria"
