"""How much accuracy does a latency budget cost on photographs? CIFAR-100, 20 devices, EfficientNet-Lite0 from ImageNet.

    python benchmarks/cifar100_at_budget.py cifar100.npz --out runs/cifar100_at_budget [--ratios 1.0 0.5 0.75 0.6]

The npz holds train_x, test_x uint8 (N, 32, 32, 3) and train_y, test_y. A stratified part of the training images is the
coordinator's; the rest is cut to 20 clients by Dirichlet(0.1), label by label, 100 images each; test images follow the
clients' label mixes, 100 each. With --splits it is cut so several times, each for a fleet of its own. Images are
resized to 64 pixels; the coordinator looks at its own in several views, moved and mirrored.

Stem and stages 1 to 3 stay as published in every network, so their features are computed once for each view; on this
input most of the weights, and so of the time, lie above. The coordinator tunes the rest on its own images. For each
budget the planner chooses widths for this machine, the channels go, and the small network learns on, on the same
images, from the labels and from the tuned network. Its dense twin does exactly the same without losing channels. Then
the fleet: low-rank adapters are averaged over the clients, heads stay private, and each device tunes both on its own.
Accuracy is the mean over clients on their own test images. Latency is that of the deployed graph (adapters merge away)
at the plan's widths, whole networks side by side.

Every epoch is kept in ``--out``; the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
from safetensors import numpy as tensorfile
from torch import Tensor
from torch.nn import Linear, Module
from torch.nn import functional as F

import budget_curve
from cifar100_clients import CLASSES, CLIENTS, OWN, PIXELS, TESTS, inputs, read, view
from talaria.errors import ConfigError, DataError
from talaria.model import adapters, pruning, split, zoo
from talaria.model.sensitivity import worth
from talaria.model.spec import AdapterSpec, ModelSpec
from talaria.model.split import under
from talaria.model.state import array_of, load, state_of, tensor_of
from talaria.planning import latency_model
from talaria.planning import measured as planning
from talaria.planning.budget import Budget
from talaria.planning.layer_stats import anatomy
from talaria.planning.onnx_runtime import Resizer, exporter
from talaria.planning.plan import Plan
from talaria.planning.planner import plan
from talaria.planning.profile import cached
from talaria.tensors import Array, Tensors
from talaria.training import frozen_features, loop
from talaria.training.batching import cut
from talaria.training.interface import Task
from talaria.types import Recipe, Samples, Update
from talaria.wire import codec

SPEC = ModelSpec("efficientnet_lite0", (3, PIXELS, PIXELS), CLASSES, pretrained=True)
WHERE = ("features.stage6.*.layers.project", "features.stage7.*.layers.project")
FROZEN = ("features.stem", *(f"features.stage{n}" for n in range(1, 4)))
RATIOS = (1.0, 0.5, 0.75, 0.6)
RATE, BATCH = 0.03, 50
SCORED = 16
"""Batches that channels are scored on."""
STAYS = 1e12
"""The worth of a channel in the frozen stages: they go last, which is never."""
READ = "features.top.conv"
"""What heads read. Half of it stays: its worth to the coordinator's head says little of what private ones need."""


@dataclass(frozen=True)
class Data:
    """What the frozen stages make of the images: the coordinator's, (views, images, ...), and all clients' own and test
    images, one client after another and one split after another."""

    views: Tensor
    labels: Tensor
    own: Samples
    test: Samples


@dataclass(frozen=True)
class Settings:
    """What must be the same for kept results to be used again."""

    public: int
    views: int
    tune: int
    recover: int
    splits: int
    rounds: int
    alone: int
    seed: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="cifar100.npz")
    parser.add_argument("--out", type=Path, default=Path("runs/cifar100_at_budget"))
    parser.add_argument("--ratios", type=float, nargs="+", default=list(RATIOS))
    parser.add_argument("--heads", type=int, nargs="+", default=[0], help="ranks of the private head; 0: a plain one")
    parser.add_argument("--public", type=int, default=2_000, help="images of the coordinator")
    parser.add_argument("--views", type=int, default=8, help="moved and mirrored copies of each that are looked at")
    parser.add_argument("--tune", type=int, default=3, help="epochs before channels go")
    parser.add_argument("--recover", type=int, default=3, help="epochs after")
    parser.add_argument("--splits", type=int, default=1, help="fleets, each with clients of its own")
    parser.add_argument("--rounds", type=int, default=5, help="of one epoch per client")
    parser.add_argument("--alone", type=int, default=15, help="epochs of each client afterwards")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    settings = Settings(**{one.name: getattr(asked, one.name) for one in fields(Settings)})
    _same(asked.out, settings)
    data = features(asked.out, asked.data, settings)
    tuned = _tuned(asked.out, data, settings)
    for ratio in asked.ratios:
        row(asked.out, data, settings, tuned, ratio, asked.heads)
    latencies(asked.out)
    plain = [one for one in rows(asked.out) if not one["head"]]
    (asked.out / "rows.json").write_text(json.dumps(rows(asked.out), indent=1))
    if any(one["budget"] == 1 for one in plain):
        budget_curve.draw({"CIFAR-100": plain}, asked.out / budget_curve.NAME)
    for one in rows(asked.out):
        print(
            f"{one['name']:16} latency {one.get('latency', math.nan):.3f}  accuracy {one['accuracy']:.4f}  "
            f"worst {one['worst']:.3f}  parameters {one['parameters']:.3f}  trained {one['trained']:.2%}  "
            f"upload {one['upload']:,} bytes"
        )


def features(out: Path, path: Path, settings: Settings) -> Data:
    """The data as the frozen stages leave it."""

    def made() -> Tensors:
        images = read(path, settings.public, settings.splits, settings.seed)
        run = frozen_features.torch_runner(halves(zoo.build(SPEC)).lower)

        def through(pixels: Tensor) -> Array:
            return np.concatenate([run(array_of(inputs(part))) for part in torch.split(pixels, 64)])

        public, labels = images["public"]
        found = {f"{name}.x": through(images[name][0]) for name in ("own", "test")}
        found |= {f"{name}.y": array_of(images[name][1]) for name in ("own", "test")}
        seen = (through(view(public, number, settings.seed)) for number in range(settings.views))
        return found | {"views": np.stack(list(seen)), "labels": array_of(labels)}

    kept = _kept(out / "features.safetensors", made)
    own, test = (Samples(kept[f"{name}.x"], kept[f"{name}.y"]) for name in ("own", "test"))
    return Data(tensor_of(kept["views"]), tensor_of(kept["labels"]), own, test)


def halves(model: Module) -> frozen_features.Halves:
    """The network cut above its frozen stages; the upper half keeps the names of its weights."""
    found = frozen_features.halve(model, [key for key in state_of(model) if not _below(key)])
    if isinstance(found, str):
        raise ConfigError(found)
    return found


def _below(name: str) -> bool:
    """Whether a tensor or a channel group belongs to the frozen stages."""
    return any(under(name, stage) for stage in FROZEN)


def learn(model: Module, data: Data, epochs: int, seed: int, taught: Tensor | None, path: Path) -> None:
    """SGD on ``model`` above its frozen stages, with the coordinator's images, each in a view drawn anew.

    ``taught`` are a teacher's logits (views, images, classes). Each epoch is kept beside ``path``.
    """
    upper = loop.in_fast_layout(halves(model).upper.train())
    named = {k: p for k, p in upper.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(named.values(), lr=RATE, momentum=0.9, weight_decay=1e-4, nesterov=True)
    count = len(data.labels)
    steps = epochs * math.ceil(count / BATCH)

    def epoch(number: int) -> Tensors:
        draws = torch.Generator().manual_seed(1000 * seed + number)
        torch.manual_seed(1000 * seed + number)  # of dropout
        order = [tensor_of(part) for part in cut(array_of(torch.randperm(count, generator=draws)), BATCH)]
        for done, index in enumerate(order, number * len(order)):
            for group in optimizer.param_groups:
                group["lr"] = RATE * min(1.0, (done + 1) / 30) * (0.51 + 0.49 * math.cos(math.pi * done / steps))
            seen = torch.randint(len(data.views), (len(index),), generator=draws)
            logits = upper(data.views[seen, index])
            loss = F.cross_entropy(logits, data.labels[index], label_smoothing=0.1)
            if taught is not None:
                goal = F.softmax(taught[seen, index] / 2, 1)
                loss = 0.3 * loss + 0.7 * 4 * F.cross_entropy(logits / 2, goal)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        speeds = {f"speed:{k}": array_of(optimizer.state[p]["momentum_buffer"]) for k, p in named.items()}
        return {**state_of(upper), **speeds}

    for number in range(epochs):
        kept = _kept(path.with_name(f"{path.name}.{number + 1}.safetensors"), partial(epoch, number))
        load(upper, {k: v for k, v in kept.items() if not k.startswith("speed:")})
        for k, p in named.items():
            optimizer.state[p]["momentum_buffer"] = torch.tensor(kept[f"speed:{k}"])
    state = state_of(upper)
    load(model, {**state_of(model), **state}).eval()


def row(out: Path, data: Data, settings: Settings, tuned: Module, ratio: float, heads: list[int]) -> None:
    """One budget: plan, prune, recover, then the fleet, once for each kind of head."""
    name = f"{ratio:.2f}"
    layout = zoo.layout(SPEC)

    def scored() -> Tensors:
        batches = [tensor_of(part) for part in cut(np.arange(len(data.labels)), BATCH)[:SCORED]]
        found = worth(halves(tuned).upper, layout, ((data.views[0, i], data.labels[i]) for i in batches))
        kept = {g: np.full(n, STAYS) for g, n in layout.sizes.items() if _below(g)}
        seen = found[READ]
        seen[np.argsort(-seen, kind="stable")[: len(seen) // 2]] = STAYS
        return {**found, **kept}

    scores = _kept(out / "worth.safetensors", scored)
    page = out / f"plan-{name}.json"
    if not page.exists():
        made = Plan() if ratio == 1 else _planned(out, ratio, scores)
        page.write_text(json.dumps(made.to_json(), indent=1))
    made = Plan.from_json(json.loads(page.read_text()))
    if any(_below(group) for group in made.widths):
        raise ConfigError(f"latency_ratio={ratio} cannot be kept without pruning the frozen stages; ask for more")
    mask = pruning.choose(scores, layout.full(), widths=made.widths, block=1)
    small = pruning.compact(tuned, mask)

    taught = tensor_of(_kept(out / "taught.safetensors", lambda: _taught(tuned, data))["logits"])
    learn(small, data, settings.recover, settings.seed + 1, taught, out / f"model-{name}")
    for rank in heads:
        full = f"{name}-head{rank}" if rank else name
        page = out / f"row-{full}.json"
        if not page.exists():
            fleets = [fleet(small, data, settings, rank, at) for at in range(settings.splits)]
            told = {"name": full, "budget": ratio, "head": rank, "widths": dict(made.widths), **fleets[0]}
            told |= {k: fmean(one[k] for one in fleets) for k in ("accuracy", "before")}
            told |= {"worst": min(one["worst"] for one in fleets), "clients": [one["clients"] for one in fleets]}
            page.write_text(json.dumps(told, indent=1))
            print(f"{full}: {told['accuracy']:.4f} of {[round(one['accuracy'], 4) for one in fleets]}", flush=True)


def _planned(out: Path, ratio: float, scores: Tensors) -> Plan:
    """The largest of a few plans around ``ratio`` that keeps it as measured here: the fit's margin is not needed."""
    device = cached()
    measured = planning.costed(SPEC, device)
    asked = [ratio * (0.9 + 0.05 * i) for i in range(9)]
    plans = {f"{a:.4f}": plan(SPEC, Budget(latency_ratio=a), device, measured, worth=scores) for a in asked if a < 1}
    took = _ratios(out, {name: made.widths for name, made in plans.items()})
    keeping = [plans[name] for name in plans if took[name] <= ratio]
    if not keeping:
        raise ConfigError(f"no plan kept latency_ratio={ratio} as measured: {took}; run again on a calmer machine")
    return max(keeping, key=lambda made: made.predicted["latency_ratio"])


def _ratios(out: Path, widths: Mapping[str, Mapping[str, int]]) -> dict[str, float]:
    """Latency at each of ``widths`` to that of the dense network: the median of five measurements, each with all of
    them loaded anew side by side, because where they lie in memory moves them by some percent."""
    page, bare = out / "dense.onnx", zoo.plain(SPEC)
    if not page.exists():
        page.write_bytes(exporter()(latency_model.lively(zoo.build(bare)), zoo.example(bare, 2)))
    resizer = Resizer(page.read_bytes(), anatomy(bare))
    full = zoo.layout(SPEC).sizes
    files = {"dense": resizer.at(full)} | {name: resizer.at({**full, **own}) for name, own in widths.items()}
    measured = [latency_model.side_by_side(files, zoo.example(SPEC), 60) for _ in range(5)]
    times = [latency_model.milliseconds(took) for took, _ in measured]
    return {name: median(took[name] / took["dense"] for took in times) for name in widths}


def fleet(backbone: Module, data: Data, settings: Settings, rank: int, at: int) -> dict[str, Any]:
    """Adapters averaged over the clients of split ``at``, heads private, both tuned on each device."""
    plain = _with_head(backbone, rank)
    model = adapters.insert(plain, AdapterSpec("lowrank", 8, where=WHERE), skip=("head",), seed=settings.seed)
    parts = split.split_model(model, "head")
    only, shared_keys = parts.of("adapters", "head"), parts.travels("adapters")
    start = state_of(model)
    recipe = Recipe(epochs=1, batch=25, lr=0.02, momentum=0.9, weight_decay=1e-4)
    upper = halves(model).upper
    every = Task(
        model=upper,
        split=split.split_model(upper, "head"),
        train=data.own.take(np.arange(CLIENTS * OWN) + at * CLIENTS * OWN),
        val=data.test.take(
            np.arange(CLIENTS * TESTS) + at * CLIENTS * TESTS
        ),  # kept beside the training images; looked at for the row alone
        recipe=recipe,
        classes=SPEC.classes,
        seed=settings.seed,
    )
    kept = frozen_features.cached(every, state_of(upper), only)
    if kept.task is None:
        raise ConfigError(kept.why)
    tasks = []
    for k in range(CLIENTS):
        own, tests = np.arange(k * OWN, (k + 1) * OWN), np.arange(k * TESTS, (k + 1) * TESTS)
        train, val = kept.task.train.take(own), kept.task.val.take(tests)
        tasks.append(kept.task.but(train=train, val=val, client=f"client-{k:02d}"))
    names = list(tasks[0].model.state_dict())
    states = [{k: start[k] for k in names} for _ in tasks]
    before = [loop.accuracy(t, s, t.val) for t, s in zip(tasks, states, strict=True)]
    for number in range(1, settings.rounds + 1):
        states = [loop.train(t.but(round=number), s, only=only) for t, s in zip(tasks, states, strict=True)]
        mean = {k: np.asarray(np.mean([s[k] for s in states], 0, np.float64), np.float32) for k in shared_keys}
        states = [{**s, **mean} for s in states]
    last = recipe.but(epochs=settings.alone)
    states = [loop.train(t, s, only=only, recipe=last, purpose="alone") for t, s in zip(tasks, states, strict=True)]
    after = [loop.accuracy(t, s, t.val) for t, s in zip(tasks, states, strict=True)]
    update = Update({k: states[0][k] for k in shared_keys}, weight=float(OWN))
    dense = sum(p.numel() for p in zoo.build(SPEC).parameters())
    trained = sum(start[k].size for k in only)
    return {
        "accuracy": fmean(after),
        "worst": min(after),
        "clients": after,
        "before": fmean(before),
        "parameters": sum(p.numel() for p in plain.parameters()) / dense,
        "trained": trained / dense,
        "trained_of_own": trained / sum(p.numel() for p in model.parameters()),
        "upload": len(codec.encode_update(update, "raw")),
        "upload_share": len(codec.encode_update(update, "raw")) / (4 * dense),
    }


def latencies(out: Path) -> None:
    """Measures the plans that have rows side by side, into these rows."""
    found = rows(out)
    took = _ratios(out, {one["name"]: one["widths"] for one in found if one["widths"] and not one["head"]})
    for one in found:
        if one["name"] in took or one["budget"] == 1:
            told = {**one, "latency": took.get(one["name"], 1.0)}
            (out / f"row-{one['name']}.json").write_text(json.dumps(told, indent=1))


def rows(out: Path) -> list[dict[str, Any]]:
    """Every row that is there, the largest budget first."""
    found = [json.loads(page.read_text()) for page in out.glob("row-*.json")]
    return sorted(found, key=lambda one: (-one["budget"], one["head"]))


def _with_head(backbone: Module, rank: int) -> Module:
    """A copy whose head, where ``rank`` is not 0, is the best product of two factors of that rank."""
    model = deepcopy(backbone)
    head = model.get_submodule("head")
    if not rank or not isinstance(head, Linear):
        return model
    u, s, v = torch.linalg.svd(head.weight.detach(), full_matrices=False)
    down, up = Linear(head.in_features, rank, bias=False), Linear(rank, head.out_features)
    with torch.no_grad():
        root = s[:rank].sqrt()
        down.weight.copy_(root[:, None] * v[:rank])
        up.weight.copy_(u[:, :rank] * root)
        up.bias.copy_(head.bias)
    model.set_submodule("head", adapters.Factors(down, up))
    return model


def _tuned(out: Path, data: Data, settings: Settings) -> Module:
    """The pretrained network after the coordinator's own epochs."""
    model = zoo.build(SPEC)
    learn(model, data, settings.tune, settings.seed, None, out / "tuned")
    return model.eval()


def _taught(tuned: Module, data: Data) -> Tensors:
    """The tuned network's logits for the coordinator's images in each view."""
    upper = halves(tuned).upper
    return {"logits": np.stack([loop.predict(upper, array_of(seen)) for seen in data.views])}


def _kept(path: Path, make: Callable[[], Tensors]) -> Tensors:
    """Tensors from a file, or made now and kept."""
    if not path.exists():
        draft = path.with_suffix(".part")
        tensorfile.save_file({k: np.asarray(v, order="C") for k, v in make().items()}, draft)
        draft.replace(path)
    return tensorfile.load_file(path)


def _same(out: Path, settings: Settings) -> None:
    """Refuses a folder whose results were found with other settings."""
    out.mkdir(parents=True, exist_ok=True)
    page = out / "settings.json"
    if page.exists() and json.loads(page.read_text()) != asdict(settings):
        raise ConfigError(f"{out} holds results of other settings ({page}); give another --out")
    page.write_text(json.dumps(asdict(settings), indent=1))


if __name__ == "__main__":
    try:
        main()
    except (ConfigError, DataError) as error:
        raise SystemExit(f"error: {error}") from None
