"""Every algorithm x model x {dense, pruned} x {no adapter, residual, low-rank}: does its personal model export, and
does the file agree with torch?

    python benchmarks/export_matrix.py [--algorithms hermes,apfl] [--models imu_cnn,resnet18] [--json]
    python benchmarks/export_matrix.py --out matrix.jsonl --minutes 10     # again and again, until it says "done"
    python benchmarks/export_matrix.py --out matrix.jsonl --summary

Each combination trains for one step and serves its personal model. Within one model, width and adapter, several
algorithms serve the same modules with other weights. Such a structure is exported once; each later one has to prove
that it is the same: its own weights, loaded into the module that was exported, must give its own answers bit by bit.
Combinations that an algorithm refuses are listed with its words. Exits with 1 if any file differs from torch by more
than 1e-4 (or 1e-5 of the largest logit), names another class, or is larger than 1.03 of the raw parameters.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import torch
from torch.nn import Module

from talaria.algorithms import ALGORITHMS
from talaria.errors import TalariaError
from talaria.federated import rounds
from talaria.federated.run import Member, Run
from talaria.model import pruning, zoo
from talaria.model.spec import AdapterSpec, ModelSpec
from talaria.planning.plan import Plan
from talaria.types import Recipe, Samples
from talaria_export.convert.onnx import export_onnx, prepared
from talaria_export.runtime.session import Session

SHAPES = {
    "imu_cnn": (6, 100),
    "fmnist_cnn": (1, 28, 28),
    "resnet18": (3, 32, 32),
    "mobilenet_v3_small": (3, 32, 32),
    "efficientnet_lite0": (3, 32, 32),
}
ADAPTERS = {"none": None, "residual": AdapterSpec("residual", rank=4), "lowrank": AdapterSpec("lowrank", rank=4)}
CLASSES = 4
HALVED = {"threshold": 0.0, "step": 0.5, "cap": 0.5}
"""For an algorithm that prunes by itself: half of the channels, at once."""
GENTLE: tuple[dict[str, float], float] = {"inner_lr": 0.001}, 0.001
"""Second derivatives of a random deep network are so large that ten times these rates wreck it: torch itself then gives
other logits in float64."""
ABSOLUTE, RELATIVE, SIZE = 1e-4, 1e-5, 1.03


@dataclass(frozen=True)
class Outcome:
    """What one combination gave: figures where it was exported, else ``same_as``, ``refused`` or ``failed``."""

    algorithm: str
    model: str
    pruned: bool
    adapter: str
    difference: float | None = None
    """Largest absolute difference of a logit to torch."""
    relative: float | None = None
    """The same, as a share of the largest logit."""
    same_top1: bool | None = None
    parameters: int | None = None
    """Of the model as served, adapters merged."""
    size_ratio: float | None = None
    """Bytes of the file by bytes of these parameters."""
    same_as: str = ""
    """The algorithm whose exported module gives this one's answers bit by bit, once it holds its weights."""
    refused: str = ""
    """Why the algorithm does not take this model, in its own words."""
    failed: str = ""

    @property
    def ok(self) -> bool:
        if self.failed:
            return False
        if self.difference is None or self.relative is None or self.size_ratio is None:
            return True
        within = self.difference <= ABSOLUTE and self.relative <= RELATIVE
        return within and bool(self.same_top1) and self.size_ratio <= SIZE

    @property
    def words(self) -> str:
        if self.refused or self.failed:
            return self.failed or f"refused: {self.refused}"
        if self.same_as:
            return f"same graph as {self.same_as}"
        figures = f"difference {self.difference:.1e}, relative {self.relative:.1e}"
        return f"{figures}, size {self.size_ratio:.4f} of {self.parameters} parameters"


Seen = dict[str, tuple[str, Module]]
"""Structure -> the algorithm that was exported with it, and its module; for one model, width and adapter."""


def cells(models: Sequence[str], adapters: Sequence[str]) -> Iterator[tuple[str, str, bool]]:
    """Models, adapters and widths, the quick models first."""
    yield from product(models, adapters, (False, True))


def outcome(algorithm: str, model: str, pruned: bool, adapter: str, seen: Seen) -> Outcome:
    """One combination; ``seen`` remembers the structures that were exported."""
    key = {"algorithm": algorithm, "model": model, "pruned": pruned, "adapter": adapter}
    try:
        personal, x = personal_model(algorithm, model, pruned, adapter)
    except TalariaError as refusal:
        return Outcome(**key, refused=str(refusal))
    with torch.no_grad():
        expected = personal(x)
    structure = _structure(personal)
    if structure in seen:
        earlier, module = seen[structure]
        module.load_state_dict(personal.state_dict())
        with torch.no_grad():
            if torch.equal(module(x), expected):
                return Outcome(**key, same_as=earlier)
    try:
        data = export_onnx(personal, x[:2])
        answer = torch.from_numpy(Session(data)(x.numpy()))
    except TalariaError as problem:
        return Outcome(**key, failed=str(problem))
    seen.setdefault(structure, (algorithm, personal))
    difference = float((answer - expected).abs().max())
    served, _ = prepared(personal, x[:2])
    parameters = sum(p.numel() for p in served.parameters())
    return Outcome(
        **key,
        difference=difference,
        relative=difference / float(expected.abs().max()),
        same_top1=torch.equal(answer.argmax(1), expected.argmax(1)),
        parameters=parameters,
        size_ratio=len(data) / (4 * parameters),
    )


def personal_model(algorithm: str, model: str, pruned: bool, adapter: str) -> tuple[Module, torch.Tensor]:
    """The model that a device serves after one step of training, and 32 inputs for it."""
    spec = ModelSpec(model, SHAPES[model], CLASSES, adapters=ADAPTERS[adapter])
    x = torch.randn(32, *SHAPES[model], generator=torch.Generator().manual_seed(1))
    own = Samples.of(x[:24], torch.arange(24) % CLASSES)  # three batches: Per-FedAvg would halve them, and diverge here
    plan = Plan(widths=pruning.widths(zoo.layout(spec).full(), 0.5)) if pruned else None
    device = Member("anna", own, own, plan)
    hparams, rate = HALVED if pruned and ALGORITHMS[algorithm].card.prunes else {}, 0.01
    if algorithm == "perfedavg":
        hparams, rate = GENTLE
    run = Run(spec=spec, algorithm=algorithm, hparams=hparams, recipe=Recipe(steps=1, batch=8, lr=rate), rounds=1)
    shared, server = rounds.start(run)
    update, private = rounds.participate(run, device, shared, None, 1)
    shared, _ = rounds.close(run, shared, server, [update])
    return _distorted(rounds.personalize(run, device, shared, private)), x


def _distorted(model: Module) -> Module:
    """Fresh adapters change nothing and fresh statistics are plain: a tenth of noise makes every tensor count."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for value in model.parameters():
            scale = 0.1 * float(value.square().mean().sqrt()) or 0.05
            value.add_(scale * torch.randn(value.shape, generator=generator))
        for value in model.buffers():
            if value.is_floating_point():
                noise = 0.1 * torch.randn(value.shape, generator=generator)
                value.copy_(torch.where(value > 0, value * noise.exp(), value + noise))  # variances stay above 0
    return model


def _structure(model: Module) -> str:
    shapes = {key: (tuple(value.shape), str(value.dtype)) for key, value in model.state_dict().items()}
    kinds = [f"{type(module).__module__}.{type(module).__qualname__}" for module in model.modules()]
    return f"{model!r} {kinds} {shapes}"


def read(path: Path) -> list[Outcome]:
    """The outcomes of earlier runs; a line that was cut off by a kill is left out."""
    found = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            found.append(Outcome(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return found


def summary(found: Iterable[Outcome]) -> str:
    """One line per model, and one per refusal."""
    rows = list(found)
    columns = ("combinations", "own files", "same graph", "refused", "failed", "absolute", "relative", "size")
    lines = ["".join(f"{title:>20}" if not at else f"{title:>14}" for at, title in enumerate(("model", *columns)))]
    for model in (*SHAPES, "all"):
        mine = [row for row in rows if model in (row.model, "all")]
        files = [row for row in mine if row.difference is not None]
        counts = [len(mine), len(files), *(sum(bool(getattr(row, name)) for row in mine) for name in _WORDY)]
        worst = [max((getattr(row, name) or 0.0 for row in files), default=0.0) for name in _WORST]
        cells = [*map(str, counts), f"{worst[0]:.1e}", f"{worst[1]:.1e}", f"{worst[2]:.4f}"]
        lines.append(f"{model:>20}" + "".join(f"{cell:>14}" for cell in cells))
    reasons = Counter((row.algorithm, row.adapter, row.refused) for row in rows if row.refused)
    lines += [
        f"refused {count}: {name} with adapter {adapter}: {why}" for (name, adapter, why), count in reasons.items()
    ]
    lines += [
        f"NOT OK: {row.algorithm} {row.model} {row.adapter} {row.pruned}: {row.words}" for row in rows if not row.ok
    ]
    return "\n".join(lines)


_WORDY = ("same_as", "refused", "failed")
_WORST = ("difference", "relative", "size_ratio")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS))
    parser.add_argument("--models", default=",".join(SHAPES))
    parser.add_argument("--adapters", default=",".join(ADAPTERS))
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--out", type=Path, help="file to add results to; what it holds is not run again")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing after so long")
    parser.add_argument("--summary", action="store_true", help="only sum up what --out holds")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = read(options.out) if options.out else []
    done = {(row.algorithm, row.model, row.pruned, row.adapter) for row in found}
    end = time.monotonic() + 60 * options.minutes
    if not options.summary:
        for model, adapter, pruned in cells(options.models.split(","), options.adapters.split(",")):
            seen: Seen = {}
            for algorithm in options.algorithms.split(","):
                if (algorithm, model, pruned, adapter) in done:
                    continue
                if time.monotonic() > end:
                    print("more is left; run again", flush=True)
                    sys.exit(not all(row.ok for row in found))
                row = outcome(algorithm, model, pruned, adapter, seen)
                found.append(row)
                line = json.dumps(asdict(row))
                if options.out:
                    with options.out.open("a") as file:
                        file.write(line + "\n")
                width = "pruned" if pruned else "dense"
                print(
                    line if options.json else f"{algorithm:12} {model:20} {adapter:9} {width:7} {row.words}", flush=True
                )
    print("done" if options.json else f"{summary(found)}\ndone", flush=True)
    sys.exit(not all(row.ok for row in found))


if __name__ == "__main__":
    main()
