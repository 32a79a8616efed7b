"""What was simulated as a folder that learns it for real: ``talaria simulate ... --write-fleet DIR``.

    fleet.toml       the coordinator's settings, every value of the run spelled out
    NAME.toml        one device's settings, for each client
    names.json       by device, the client that it is, where some are called otherwise
    data/NAME.npz    that client's samples, as the simulation trained on them
    plans/NAME.json  its plan, where it has one
    newcomers/       the same for those who come when the rounds are over

The rounds count everybody whom a round asks (quorum 1, no deadline), as the simulation does; that, and the seeds, make
the bytes the same.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import socket
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from talaria import algorithms, tasks, valid
from talaria.config import write_toml
from talaria.data import Client, Federated
from talaria.errors import ConfigError, DataError, so_that_it_can_be_written
from talaria.federated import rounds, run_model
from talaria.federated.fedbuff_run import Buffering
from talaria.federated.run import Engine, Run
from talaria.foreign import shown
from talaria.model import zoo
from talaria.planning.plan import Plan
from talaria.privacy.rule import Privacy
from talaria.types import Samples
from talaria.wire.topics import DEVICE_NAME, DEVICE_RULE, FLEET_NAME

FLEET, NAMES, STATE = "fleet.toml", "names.json", "state"


@dataclass(frozen=True, kw_only=True)
class Written:
    """A simulation to write down: its run, data and plans, and how the server folds."""

    run: Run
    data: Federated
    plans: Mapping[str, Plan]
    aggregator: str | None = None
    over: float = 0.0
    buffering: Buffering | None = None
    engine: Engine = "torch"
    privacy: Privacy | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    """By device, the client that it is, of those that are called otherwise."""

    @property
    def _name(self) -> str:
        """The fleet is called as its algorithm, where that can be a fleet's name."""
        said = algorithms.load(self.run.algorithm, self.run.hparams).card.name
        return next((name for name in (self.run.algorithm, said) if re.fullmatch(FLEET_NAME, name)), "fleet")

    def files(self, port: int) -> dict[str, bytes]:
        """Every file but the samples, by its path in the folder."""
        url = f"mqtt://127.0.0.1:{port}"
        out = {FLEET: write_toml(self._coordinator(port)).encode("utf-8", "replace")}
        if self.names:
            out[NAMES] = json.dumps(dict(self.names), indent=1, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
        for home, clients in (("", self.data.clients), ("newcomers/", self.data.newcomers)):
            for name in clients:
                up = "../" if home else ""
                text = write_toml(self._device(name, url, up)) + _LATER
                out[f"{home}{name}.toml"] = text.encode("utf-8", "replace")
                if name in self.plans:
                    out[f"plans/{name}.json"] = json.dumps(self.plans[name].to_json(), indent=1).encode()
        return out

    def _coordinator(self, port: int) -> dict[str, dict[str, Any]]:
        run, spec = self.run, self.run.spec.to_json()
        adapters, options = spec.pop("adapters"), spec.pop("options", None)
        how: dict[str, Any] = {"deadline_s": 0, "quorum": 1.0, "over": self.over, "aggregator": self.aggregator}
        if self.buffering is not None:
            own = {name: value for name, value in asdict(self.buffering).items() if name != "normalise"}
            how = {"mode": "asynchronous", "deadline_s": 600, **own, "aggregator": self.aggregator}
        return {
            "fleet": {
                "name": self._name,
                "state": f"{STATE}/coordinator",
                "members": list(self.data.clients),
                "stay": bool(self.data.newcomers),
            },
            "broker": {"url": "auto", "host": "127.0.0.1", "port": port},
            "rounds": how,
            **({} if self.privacy is None else {"privacy": _set(self.privacy)}),
            "run": {name: getattr(run, name) for name in _RUN} | ({} if _plain(run) else {"task": run.task}),
            "run.spec": spec,
            **({} if adapters is None else {"run.spec.adapters": adapters}),
            **({} if options is None else {"run.spec.options": options}),
            "run.recipe": run.recipe.to_json(),
            "run.hparams": _every_option(run),
        }

    def _device(self, name: str, url: str, up: str) -> dict[str, dict[str, Any]]:
        plan = f"{up}plans/{name}.json" if name in self.plans else None
        state = f"{up}{STATE}/devices/{name}"
        engine = {} if self.engine == "torch" else {"engine": self.engine}
        allow = {"code": {"allow": self._packages}} if self._packages else {}
        return {
            "device": {"id": name, "state": state, "labels": list(self.data.labels), "plan": plan, **engine},
            "fleet": {"name": self._name, "broker": url},
            "data": {"source": "npz", "path": f"{up}data/{name}.npz", "client": name},
            **allow,
        }

    @property
    def _packages(self) -> list[str]:
        """Packages beside Talaria whose code the devices need."""
        found = algorithms.GROUP.package(self.run.algorithm), zoo.GROUP.package(self.run.spec.name)
        return sorted({package for package in found if package is not None})


_RUN = ("algorithm", "rounds", "seed", "buffers", "fraction", "codec", "download")
_LATER = """
# Under [device], bundle = "NAME.talaria" also exports this device's model; [guard] says when it may train.
"""


def write_fleet(folder: Path, written: Written) -> None:
    """Make ``folder`` with all that coordinator and devices need, or nothing of it.

    Raises :class:`ConfigError` where the folder holds something already, a client cannot be a device, or the run cannot
    begin, and :class:`DataError` where its agent would refuse its samples.
    """
    rounds.require_travels(written.run)
    run_model.first_shared(written.run)  # which refuses a run that no fleet could begin
    if written.privacy is not None and written.privacy.secure:
        raise ConfigError(
            "--write-fleet: devices of secure rounds know each other by keys, which the folder has none of; leave "
            "--secure out, or make the fleet by `talaria fleet init` and set [privacy] secure = true in its fleet.toml"
        )
    everyone, classes = written.data.everyone, tasks.of(written.run.task).name == tasks.CLASSIFICATION
    named = classes and _mistakable(written.data.labels)
    for name, client in everyone.items():
        _require(name, client, written.names.get(name, name), classes=classes)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--write-fleet {folder}: is there already and not empty; give the name of a new folder")
    beside = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        for path, text in written.files(_free_port()).items():
            (beside / path).parent.mkdir(exist_ok=True)
            (beside / path).write_bytes(text)
        (beside / "data").mkdir()
        for name, client in everyone.items():
            _save(beside / "data" / f"{name}.npz", client, written.data.labels if named else ())
        os.replace(beside, folder)
    except OSError as error:
        mend = so_that_it_can_be_written(error)
        raise ConfigError(f"--write-fleet {folder}: cannot be written ({error.strerror or error}); {mend}") from None
    finally:
        if beside is not None:
            shutil.rmtree(beside, ignore_errors=True)


def _set(privacy: Privacy) -> dict[str, Any]:
    """What of it is set."""
    usual = asdict(Privacy())
    return {name: value for name, value in asdict(privacy).items() if value != usual[name]}


def _every_option(run: Run) -> dict[str, Any]:
    """The algorithm's options as the run has them, those left at their default too."""
    every = algorithms.options(algorithms.kind_of(run.algorithm))
    return {name: value for name, value in {**every, **run.hparams}.items() if valid.plain(value)}


def _plain(run: Run) -> bool:
    """Whether it learns classes, which nobody needs to be told."""
    return run.task == tasks.CLASSIFICATION


def _require(name: str, client: Client, owner: str, *, classes: bool) -> None:
    if not re.fullmatch(DEVICE_NAME, name) or f"{name}.toml" == FLEET:
        raise ConfigError(
            f"--write-fleet: client {shown(name)} cannot be a device's id; name clients by {DEVICE_RULE}, but not fleet"
        )
    seen = np.unique(client.train.y)
    if classes and len(seen) < 2:
        raise DataError(
            f"--write-fleet: {owner} trains on class {int(seen[0])} alone, which its agent refuses; give it two at "
            "least"
        )


def _mistakable(labels: Sequence[str]) -> bool:
    """Whether a class's number may be another class's name, as where the classes are called 1, 2 and 3."""
    return any(str(at) in labels and name != str(at) for at, name in enumerate(labels))


def _save(path: Path, client: Client, names: Sequence[str] = ()) -> None:
    """The client's samples, with the ``names`` of classes instead of their numbers where there are any."""
    parts = [client.train, client.val, client.test]
    if (rest := client.unlabelled) is not None and len(rest):
        y = client.train.y
        parts.append(Samples(rest, np.full((len(rest), *y.shape[1:]), -1, y.dtype)))
    y = np.concatenate([part.y for part in parts])
    np.savez(
        path,
        x=np.concatenate([part.x for part in parts]),
        y=np.array([*names, ""])[y] if names else y,  # -1, of windows without a label, is the last
        split=np.repeat(np.arange(len(parts)), [len(part) for part in parts]),
    )


def _free_port() -> int:
    """A port that nobody listens on now, below those that outgoing connections take; both sides must name the same."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with socket.socket() as found, suppress(OSError):
            found.bind(("127.0.0.1", port))
            return port
    raise ConfigError("--write-fleet: no free port was found on 127.0.0.1; end what listens on 20000..31999")
