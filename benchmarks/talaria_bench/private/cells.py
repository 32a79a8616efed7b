"""One simulated run of a study, kept in a folder: whoever asks again does not run it again."""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from talaria.errors import ConfigError, TalariaError

BEYOND = ("NaN or infinity", "left the range", "is taken")
"""What runs say whose weights are no numbers any more."""


@dataclass(frozen=True)
class Study:
    """A data set, and how it is learned: what :func:`talaria.simulate` is given."""

    data: str
    rounds: int
    data_options: Mapping[str, Any] = field(default_factory=dict)
    model: str | None = None
    """None: the data set's own."""
    recipe: Mapping[str, Any] | None = None
    """None: the data set's own; else some of its fields."""
    partition: bool = False
    """Whether the clients are those of the file that ``--partition`` names."""

    def at(self, partition: Path | None) -> Study:
        """This study with its partition. Raises :class:`ConfigError` where it needs one and none is given."""
        if not self.partition:
            return self
        if partition is None:
            raise ConfigError(f"{self.data}: partition=None; give --partition FILE.npz, or leave this study out")
        return replace(self, data_options={**self.data_options, "partition": str(partition)}, partition=False)


def cell(study: Study, algorithm: str, seed: int, privacy: Mapping[str, Any] | None, out: Path) -> dict[str, Any]:
    """Members' mean accuracy on test and on validation samples, and what the run's noise was. ``out`` keeps it under
    the digest of all that is asked for, the partition's content too."""
    asked = {
        "study": asdict(study),
        "algorithm": algorithm,
        "seed": seed,
        "privacy": None if privacy is None else dict(privacy),
    }
    if (file := study.data_options.get("partition")) is not None:  # another one may have its name by now
        asked["partition"] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()[:16]
    path = out / f"{study.data}-{algorithm}-{seed}-{digest}.json"
    if not path.exists():
        out.mkdir(parents=True, exist_ok=True)
        path.write_text(
            json.dumps({"asked": asked, "found": _found(study, algorithm, seed, privacy)}, indent=1, default=str)
        )
    found: dict[str, Any] = json.loads(path.read_text())["found"]
    return found


def _found(study: Study, algorithm: str, seed: int, privacy: Mapping[str, Any] | None) -> dict[str, Any]:
    """``diverged``: the noise drove the model beyond float32; its accuracy is then that of chance, and says so."""
    import torch

    import talaria
    from talaria.training.evaluation import evaluate

    torch.set_num_threads(1)
    began = time.process_time()
    try:
        result = talaria.simulate(
            algorithm,
            study.data,
            study.model,
            rounds=study.rounds,
            seed=seed,
            data_options=study.data_options,
            recipe=study.recipe,
            privacy=privacy,
        )
    except TalariaError as error:
        if privacy is None or not any(said in str(error) for said in BEYOND):
            raise
        chance = 1 / len(talaria.data.load(study.data, **study.data_options).labels)
        return {"diverged": True, "accuracy": chance, "worst": chance, "validation": chance} | {
            "cpu_s": round(time.process_time() - began, 1)
        }
    validation = [
        evaluate(result.model(name), client.val).accuracy
        for name, client in result.data.clients.items()
        if len(client.val)
    ]
    figures = result.as_dict()["privacy"] or {}
    return {
        "diverged": False,
        "accuracy": result.accuracy.mean,
        "worst": result.accuracy.worst,
        "validation": statistics.fmean(validation),
        "devices": len(result.clients),
        "values": sum(v.size for v in result.learned.shared.values() if v.dtype.kind == "f"),
        "noise": figures.get("noise"),
        "epsilon": figures.get("epsilon"),
        "cpu_s": round(time.process_time() - began, 1),
    }
