"""Every algorithm x model x {dense, pruned} x {no adapter, residual, low-rank}: does its personal model export, and
does the file agree with torch?

    python benchmarks/export_matrix.py [--algorithms hermes,apfl] [--models imu_cnn,resnet18] [--json]

Each combination trains for one step and serves its personal model. Models of equal structure give equal graphs, so a
structure is exported once, and each later one takes part with its name only. Combinations that an algorithm refuses
are listed with its words. Exits with 1 if any file differs from torch by more than 1e-4.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product

import torch
from torch.nn import Module

from talaria import rounds
from talaria.algorithms import ALGORITHMS
from talaria.errors import TalariaError
from talaria.model import pruning, zoo
from talaria.model.adapters import AdapterSpec
from talaria.model.spec import ModelSpec
from talaria.rounds import Member, Run
from talaria.types import Plan, Recipe, Samples
from talaria_export import export_onnx
from talaria_export.session import Session

SHAPES = {
    "imu_cnn": (6, 100),
    "fmnist_cnn": (1, 28, 28),
    "resnet18": (3, 32, 32),
    "mobilenet_v3_small": (3, 32, 32),
    "efficientnet_lite0": (3, 32, 32),
}
ADAPTERS = {"none": None, "residual": AdapterSpec("residual", rank=4), "lowrank": AdapterSpec("lowrank", rank=4)}
CLASSES = 4
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Outcome:
    """``difference`` to torch where it was exported, ``same_as`` an earlier one of equal structure, or ``refused``."""

    algorithm: str
    model: str
    pruned: bool
    adapter: str
    difference: float | None = None
    """Largest absolute difference, relative to the largest logit where that is above 1."""
    same_top1: bool | None = None
    same_as: str = ""
    refused: str = ""

    @property
    def ok(self) -> bool:
        return self.difference is None or (self.difference <= TOLERANCE and bool(self.same_top1))


def outcomes(algorithms: Sequence[str], models: Sequence[str], adapters: Sequence[str]) -> Iterator[Outcome]:
    """All combinations, in order."""
    seen: dict[str, str] = {}
    for model, adapter, pruned, algorithm in product(models, adapters, (False, True), algorithms):
        yield outcome(algorithm, model, pruned, adapter, seen)


def outcome(algorithm: str, model: str, pruned: bool, adapter: str, seen: dict[str, str]) -> Outcome:
    """One combination; ``seen`` remembers the structures that were exported."""
    key = {"algorithm": algorithm, "model": model, "pruned": pruned, "adapter": adapter}
    try:
        personal, x = personal_model(algorithm, model, pruned, adapter)
        structure = _structure(personal)
        if structure in seen:
            return Outcome(**key, same_as=seen[structure])
        data = export_onnx(personal, x[:2])
    except TalariaError as refusal:
        return Outcome(**key, refused=str(refusal))
    seen[structure] = f"{algorithm} {model} {adapter} {'pruned' if pruned else 'dense'}"
    with torch.no_grad():
        expected = personal(x)
    answer = torch.from_numpy(Session(data)(x.numpy()))
    same = torch.equal(answer.argmax(1), expected.argmax(1))
    scale = max(1.0, float(expected.abs().max()))
    return Outcome(**key, difference=float((answer - expected).abs().max()) / scale, same_top1=same)


def personal_model(algorithm: str, model: str, pruned: bool, adapter: str) -> tuple[Module, torch.Tensor]:
    """The model that a device serves after one step of training, and inputs for it."""
    spec = ModelSpec(model, SHAPES[model], CLASSES, adapters=ADAPTERS[adapter])
    x = torch.randn(8, *SHAPES[model], generator=torch.Generator().manual_seed(1))
    own = Samples(x, torch.arange(8) % CLASSES)
    plan = Plan(widths=pruning.widths(zoo.layout(spec).full(), 0.5)) if pruned else None
    device = Member("anna", own, own, plan)
    run = Run(spec=spec, algorithm=algorithm, recipe=Recipe(steps=1, batch=8, lr=0.01), rounds=1)
    shared, server = rounds.start(run)
    update, private = rounds.participate(run, device, shared, None, 1)
    shared, _ = rounds.close(run, shared, server, [update])
    return _distorted(rounds.personalize(run, device, shared, private)), x


def _distorted(model: Module) -> Module:
    """Fresh adapters change nothing and fresh statistics are plain: noise makes every tensor count."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for value in [*model.parameters(), *model.buffers()]:
            if value.is_floating_point():
                value.add_(0.03 * torch.randn(value.shape, generator=generator).abs())
    return model


def _structure(model: Module) -> str:
    shapes = {key: (tuple(value.shape), str(value.dtype)) for key, value in model.state_dict().items()}
    return f"{model!r} {shapes}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS))
    parser.add_argument("--models", default=",".join(SHAPES))
    parser.add_argument("--adapters", default=",".join(ADAPTERS))
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    options = parser.parse_args()
    torch.set_num_threads(1)
    ok = True
    for found in outcomes(*(text.split(",") for text in (options.algorithms, options.models, options.adapters))):
        ok &= found.ok
        if options.json:
            print(json.dumps(asdict(found)), flush=True)
            continue
        words = found.refused or (found.same_as and f"same graph as {found.same_as}") or f"{found.difference:.1e}"
        width = "pruned" if found.pruned else "dense"
        print(f"{found.algorithm:12} {found.model:20} {found.adapter:9} {width:7} {words}", flush=True)
    sys.exit(not ok)


if __name__ == "__main__":
    main()
