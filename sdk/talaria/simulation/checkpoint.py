"""A simulation on disk: a folder that holds what was asked for and, as of a late round, everything it has learned.

    experiment.json     the run, its data by name, plans and server rule; written once
    state.safetensors   global model, server state and every private state, replaced after a round
    result.json         what came out, once the run is whole

A run that was killed goes on from ``state.safetensors`` and comes to the same bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from talaria import durable
from talaria.data.federated import Federated
from talaria.errors import StateError, so_that_it_can_be_written
from talaria.foreign import parsed, shown
from talaria.simulation.run import Learned
from talaria.simulation.simulator import Fleet, RoundFacts
from talaria.tensors import Tensors, prefixed, under

FORMAT = 3
READ = (2, FORMAT)
"""Formats of runs that go on here. Of format 2 the history stands among the facts, in the file's head."""
EXPERIMENT, STATE, RESULT = "experiment.json", "state.safetensors", "result.json"


def fingerprint(data: Federated) -> str:
    """sha256 over all samples of all clients, hex: the same data, the same text."""
    digest = hashlib.sha256(json.dumps([data.labels, data.input_shape]).encode())
    for name, client in data.everyone.items():
        digest.update(f"|{name}|{name in data.newcomers}|".encode())
        for samples in (client.train, client.val, client.test):
            digest.update(str(tuple(samples.x.shape)).encode())
            digest.update(np.ascontiguousarray(samples.x).data)
            digest.update(np.ascontiguousarray(samples.y).data)
        if (rest := client.unlabelled) is not None and len(rest):
            digest.update(f"|unlabelled|{rest.shape}".encode())
            digest.update(np.ascontiguousarray(rest).data)
    return digest.hexdigest()


def begin(folder: Path, experiment: Mapping[str, Any]) -> None:
    """Write into ``folder`` which run it holds. Raises :class:`StateError` where it holds one already, or cannot be
    written."""
    with _writable(folder):
        if (folder / EXPERIMENT).exists():
            raise StateError(f"{folder}: holds a run already; go on with it by --resume, or name a new one")
        durable.write(folder / EXPERIMENT, json.dumps({"format": FORMAT, **experiment}, indent=1).encode(), mode=0o644)


@contextmanager
def _writable(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        mend = so_that_it_can_be_written(error)
        raise StateError(f"{folder}: cannot be written ({error.strerror}); {mend}, or name another folder") from error


@contextmanager
def begun(folder: Path | None, experiment: Mapping[str, Any]) -> Iterator[None]:
    """A new run, kept in ``folder`` if there is one (:func:`begin`). One that fails before a round is kept gives the
    folder's name free again: what is mended then is another run."""
    if folder is None:
        yield
        return
    with _writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with alone(folder):
        begin(folder, experiment)
        try:
            yield
        except Exception:
            if not (folder / STATE).exists():
                (folder / EXPERIMENT).unlink(missing_ok=True)
            raise


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Nobody else learns into ``folder`` meanwhile: two would replace each other's files. Raises :class:`StateError`
    where somebody does; a run that is whole is measured again by as many as like."""
    held = ExitStack()
    try:
        held.enter_context(durable.held(folder))
    except BlockingIOError:
        if not (folder / RESULT).is_file():
            raise StateError(f"{folder}: is being learned now; wait until that has ended, or name another") from None
    with held:
        yield


def experiment(folder: Path) -> dict[str, Any]:
    """What :func:`begin` wrote. Raises :class:`StateError` where there is no such run, or one of another format."""
    found = _json(folder / EXPERIMENT)
    _require_format(folder, found.get("format"))
    return found


def rounds(folder: Path) -> int | None:
    """How many rounds the run in ``folder`` has in all; None where its file does not say. Raises as
    :func:`experiment`."""
    run = experiment(folder).get("run")
    found = run.get("rounds") if isinstance(run, dict) else None
    return found if type(found) is int else None


def write(folder: Path, learned: Learned, marks: Mapping[int, float], fleet: Fleet | None = None) -> None:
    """Keep what was ``learned``, and ``marks``, the mean accuracy after the rounds where it was measured; of a run that
    goes on, also who of its ``fleet`` trains from which version."""
    names = sorted(learned.private)
    models, under_way = ({}, []) if fleet is None else (fleet.models, fleet.under_way)
    tensors = {**prefixed(learned.shared, "shared/"), **prefixed(learned.server, "server/")}
    for number, name in enumerate(names):
        tensors |= prefixed(learned.private[name], f"private/{number}/")
    for version, shared in models.items():
        tensors |= prefixed(shared, f"models/{version}/")
    told = json.dumps([vars(one) for one in learned.history])  # of any length, and a head has at most 100 MB
    tensors["history"] = np.frombuffer(told.encode(), np.uint8)
    facts = {
        "format": FORMAT,
        "run": learned.run.identity,
        "private": names,
        "sent": learned.bytes_up,
        "under_way": under_way,
        "models": sorted(models),
        "order": list(tensors),  # the format has one of its own, and noise is drawn tensor by tensor
        "marks": sorted(marks.items()),
    }
    whole = {name: np.asarray(value, order="C") for name, value in tensors.items()}  # save takes bytes as they lie
    facts["sha256"] = _checksum(facts, whole)
    _keep(folder / STATE, save(whole, {"talaria": json.dumps(facts)}))


def restore(folder: Path, fleet: Fleet) -> dict[int, float]:
    """Put into ``fleet``, which has learned nothing yet, what :func:`write` kept; gives the marks.

    Nothing where no round was whole yet. Raises :class:`StateError` for a file that is damaged or of another run.
    """
    path = folder / STATE
    if not path.exists():
        return {}
    try:
        with safe_open(str(path), framework="numpy") as file:
            facts = parsed((file.metadata() or {}).get("talaria", "null"))
            digest = facts.pop("sha256", None)
            names = facts["order"] if "order" in facts else file.keys()  # an older version wrote none
            tensors = {name: file.get_tensor(name) for name in names}
        if digest not in (None, _checksum(facts, tensors)):  # nor this
            raise ValueError("its sha256 is another")
        _require_format(path, facts["format"])
        fleet.shared, fleet.server = under(tensors, "shared/"), under(tensors, "server/")
        private, models = (_apart(under(tensors, prefix)) for prefix in ("private/", "models/"))
        fleet.private = {name: private.get(str(i), {}) for i, name in enumerate(facts["private"])}
        fleet.models = {version: models.get(str(version), {}) for version in facts["models"]}
        others = set(fleet.private).union(facts["sent"]) != set(fleet.members)
        another = facts.get("run", fleet.run.identity) != fleet.run.identity  # nor this
        fleet.sent = dict(facts["sent"])
        fleet.under_way = [(clock, name, base_version) for clock, name, base_version in facts["under_way"]]
        told = facts["history"] if "history" in facts else parsed(tensors["history"].tobytes())
        fleet.history = [_facts(one) for one in told]
        fleet.version = len(fleet.history)
        marks = {int(number): float(mark) for number, mark in facts["marks"]}
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise StateError(f"{path}: damaged ({error}); remove it to begin this run anew") from error
    if others:
        raise StateError(f"{path}: is of other clients than the data; give the data that the run began with")
    if another:
        raise StateError(f"{path}: is of another run than {EXPERIMENT} beside it; bring back the one of this run")
    return marks


def _require_format(path: Path, found: object) -> None:
    if type(found) is not int or found not in READ:
        raise StateError(
            f"{path}: a run of format {shown(found)}, and this version reads {READ[0]} and {FORMAT}; go on with it in "
            "the version that wrote it, or begin anew in another folder"
        )


def finish(folder: Path, document: Mapping[str, Any]) -> None:
    """Write what came out, unless it stands there: a whole run that is measured again may lie where nobody writes."""
    path, data = folder / RESULT, json.dumps(document, indent=1).encode()
    if not path.is_file() or path.read_bytes() != data:
        _keep(path, data)


def _keep(path: Path, data: bytes) -> None:
    try:
        durable.write(path, data, mode=0o644)
    except OSError as error:
        again = "resume" if (path.parent / STATE).exists() else "begin anew"  # what begun() leaves
        mend = so_that_it_can_be_written(error)
        raise StateError(f"{path.parent}: cannot be written ({error.strerror}); {mend}, then {again}") from error


def _apart(tensors: Tensors) -> dict[str, Tensors]:
    """By the number before the first slash of their names; in one pass, as there may be thousands of clients."""
    found: dict[str, Tensors] = {}
    for name, value in tensors.items():
        number, _, own = name.partition("/")
        found.setdefault(number, {})[own] = value
    return found


def _checksum(facts: Mapping[str, Any], tensors: Tensors) -> str:
    digest = hashlib.sha256(json.dumps(facts).encode())
    for value in tensors.values():
        digest.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _facts(one: Mapping[str, Any]) -> RoundFacts:
    pairs = {name: tuple((client, base_version) for client, base_version in one[name]) for name in ("counted", "late")}
    return RoundFacts(**{**one, "clients": tuple(one["clients"]), **pairs})


def _json(path: Path) -> dict[str, Any]:
    try:
        found = parsed(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise StateError(f"{path.parent}: holds no saved run; name the folder that --save (save=) was given") from None
    except (OSError, ValueError, RecursionError) as error:
        raise StateError(f"{path}: cannot be read ({error}); restore it, or begin anew") from error
    if not isinstance(found, dict):
        raise StateError(f"{path}: holds no table; restore it, or begin anew")
    return found
