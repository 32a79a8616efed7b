"""HEART-PFL in its own setting: ResNet-18 with adapters on CIFAR-100, 20 clients of Dirichlet(0.1), 8 per round.

    python benchmarks/heart_pfl_cifar100.py cifar100.npz --weights resnet18.safetensors --out runs/heart_pfl

The npz holds train_x, test_x uint8 (N, 32, 32, 3) and train_y, test_y. ``--weights`` is a torchvision ResNet-18 state
dict (ImageNet) as safetensors or npz; without it the frozen backbone is random, which shows that the recipe runs and
nothing else. The server keeps a stratified tenth of the training images as its proxy set, as the released scripts
do; unlike them it judges on a fifth of those that it does not distil on. The test images of each client follow its
own label mix, where the release deals 40 % of them uniformly: accuracies are not comparable to the digit.

Runs on a GPU when there is one (there dropout is not reproducible to the bit). Each round is saved whole before the
next begins; the same command resumes.
"""

import argparse
import json
import os
import time
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import numpy as tensorfile
from torch.nn import Module

from talaria import npz
from talaria.aggregate.adversarial import Attack, Normalization
from talaria.aggregate.distill import Distilled
from talaria.algorithms.heart_pfl import HeartPFL, trainable
from talaria.data.cifar100 import MEAN, SD
from talaria.data.partition import dirichlet, mixed, mixes_of, stratified
from talaria.errors import ConfigError, DataError
from talaria.model import zoo
from talaria.model.adapters import HEART_RESNET
from talaria.model.spec import ModelSpec
from talaria.model.split import Split
from talaria.model.state import load, state_of
from talaria.seeds import generator
from talaria.tensors import Tensors
from talaria.training.interface import Task
from talaria.training.loop import predict
from talaria.types import Recipe, Samples

CLASSES = 100


@dataclass(frozen=True)
class Client:
    """One client's samples."""

    train: Samples
    test: Samples


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="cifar100.npz")
    parser.add_argument("--weights", type=Path, help="ResNet-18 state dict, .safetensors or .npz")
    parser.add_argument("--out", type=Path, default=Path("runs/heart_pfl_cifar100"), help="where the run is kept")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--per-round", type=int, default=8)
    parser.add_argument("--alpha", type=float, default=0.1)
    parser.add_argument("--epochs", type=int, default=10, help="of each of the two local phases")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--lam", type=float, default=1.0)
    parser.add_argument("--variant", default="A", choices=["A", "B"])
    parser.add_argument("--distil-rounds", type=int, default=30, help="0: the server is the plain mean")
    parser.add_argument("--distil-steps", type=int, default=500)
    parser.add_argument("--distil-batch", type=int, default=2048)
    parser.add_argument("--attack-steps", type=int, default=20)
    parser.add_argument("--samples", type=int, help="at most this many training images per client")
    parser.add_argument("--tests", type=int, default=500, help="test images per client")
    parser.add_argument("--proxy", type=int, help="at most this many proxy images")
    parser.add_argument("--evaluate-every", type=int, default=10, help="rounds")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def inputs(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any], index: np.ndarray[Any, Any]) -> Samples:
    pixels = torch.from_numpy(x[index].astype(np.float32) / 255).permute(0, 3, 1, 2)
    return Samples.of(Normalization(MEAN, SD).inputs(pixels), y[index])


def read(args: argparse.Namespace) -> tuple[dict[str, Client], Samples]:
    """The clients, and the server's proxy set."""
    raw = npz.read(args.data, ("train_x", "train_y", "test_x", "test_y"), ("classes",))
    rest, _, server = stratified(raw["train_y"], 0.0, 0.1, np.random.default_rng(args.seed))
    labels = raw["train_y"][rest]
    parts = dirichlet(labels, args.clients, args.alpha, args.seed, min_samples=10)
    tests = mixed(raw["test_y"], mixes_of(labels, parts, CLASSES), args.tests, args.seed)
    clients = {}
    for k, (own, tested) in enumerate(zip(parts, tests, strict=True)):
        kept = np.random.default_rng([args.seed, k]).permutation(own)[: args.samples]
        clients[f"client-{k:02d}"] = Client(
            inputs(raw["train_x"], raw["train_y"], rest[np.sort(kept)]),
            inputs(raw["test_x"], raw["test_y"], tested),
        )
    shuffled = np.random.default_rng(args.seed).permutation(server)[: args.proxy]
    return clients, inputs(raw["train_x"], raw["train_y"], shuffled)


def with_weights(model: Module, path: Path | None) -> Module:
    """``model`` with the backbone's published tensors; its own adapters and head stay."""
    if path is None:
        return model
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as file:
            given = {k: np.asarray(file[k]) for k in file.files}
    else:
        given = tensorfile.load_file(path)
    state = state_of(model)
    for key, value in state.items():
        if ".adapter." in key or key.startswith("fc."):
            continue
        source = given.get(key.replace(".base.", "."))
        if source is None and key.endswith("num_batches_tracked"):
            continue
        if source is None or source.shape != value.shape:
            found = "missing" if source is None else f"of shape {tuple(source.shape)}"
            raise ConfigError(f"{path}: tensor {key.replace('.base.', '.')!r} is {found}; need torchvision's ResNet-18")
        state[key] = source.astype(value.dtype)
    return load(model, state)


def save(out: Path, round: int, tensors: Tensors, facts: dict[str, Any]) -> None:
    """Tensors first, then the page that names them: a crash in between leaves the round before."""
    name = f"round-{round:04d}.safetensors"
    write(out / name, tensorfile.save({k: np.asarray(v, order="C") for k, v in tensors.items()}))
    write(out / "run.json", json.dumps({**facts, "round": round, "tensors": name}, indent=1).encode())
    for old in out.glob("round-*.safetensors"):
        if old.name != name:
            old.unlink()


def write(path: Path, data: bytes) -> None:
    draft = path.with_suffix(path.suffix + ".part")
    with open(draft, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """What must be the same for a run to be resumed."""
    skipped = {"rounds", "out", "evaluate_every"}
    return {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items() if k not in skipped}


class Fleet:
    """The whole run's state, in the form that is saved."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.clients, proxy = read(args)
        spec = ModelSpec("resnet18", (3, 32, 32), CLASSES, adapters=HEART_RESNET, seed=args.seed)
        self.model = with_weights(zoo.build(spec), args.weights)
        self.split: Split = zoo.split(spec, self.model)
        self.algorithm = HeartPFL(lam=args.lam, variant=args.variant, trains="adapters")
        self.shared, self.blank = self.algorithm.init(self.model, self.split)
        self.rule = self.algorithm.aggregator
        if args.distil_rounds:
            self.rule = Distilled(
                inner=self.rule,
                model=deepcopy(self.model),
                proxy=proxy,
                normalization=Normalization(MEAN, SD),
                attack=Attack(steps=args.attack_steps),
                rounds=args.distil_rounds,
                steps=args.distil_steps,
                batch=args.distil_batch,
                seed=args.seed,
            )
        self.server = self.rule.init(self.shared)
        self.private: dict[str, Tensors] = {}
        self.history: list[dict[str, Any]] = []
        self.round = 0

    def resume(self) -> None:
        page = self.args.out / "run.json"
        if not page.exists():
            return
        facts = json.loads(page.read_text())
        if facts["settings"] != settings(self.args):
            raise ConfigError(f"{page} is of another run; give another --out, or the same settings")
        self.round, self.history = facts["round"], facts["history"]
        for name, value in tensorfile.load_file(self.args.out / facts["tensors"]).items():
            kind, _, key = name.partition(":")
            if kind == "shared":
                self.shared[key] = value
            elif kind == "server":
                self.server[key] = value
            else:
                self.private.setdefault(kind, dict(self.blank))[key] = value

    def store(self) -> None:
        own = {
            f"{c}:{k}": v
            for c, state in self.private.items()
            for k, v in state.items()
            if not np.array_equal(v, self.blank[k]) or k.startswith("own/")
        }
        parts = {f"shared:{k}": v for k, v in self.shared.items()} | {f"server:{k}": v for k, v in self.server.items()}
        save(self.args.out, self.round, parts | own, {"settings": settings(self.args), "history": self.history})

    def task(self, name: str) -> Task:
        train = self.clients[name].train
        return Task(
            model=deepcopy(self.model),
            split=self.split,
            train=train,
            val=train.take(np.arange(0)),
            recipe=Recipe(epochs=self.args.epochs, batch=self.args.batch, lr=self.args.lr, momentum=0.0),
            classes=CLASSES,
            seed=self.args.seed,
            client=name,
            round=self.round,
            newcomer=name not in self.private,
        )

    def chosen(self) -> list[str]:
        names = sorted(self.clients)
        order = torch.randperm(len(names), generator=generator(self.args.seed, "", self.round, "cohort"))
        return sorted(names[i] for i in order[: self.args.per_round].tolist())

    def advance(self) -> None:
        """One round, saved at its end."""
        self.round += 1
        began, updates = time.monotonic(), []
        names = self.chosen()
        for done, name in enumerate(names, 1):
            private = self.private.get(name, self.blank)
            update, self.private[name] = self.algorithm.fit(self.task(name), self.shared, private)
            updates.append(update)
            print(f"\rround {self.round}: {done}/{len(names)} clients, {time.monotonic() - began:.0f} s", end="")
        self.shared, self.server = self.rule.apply(self.shared, self.server, updates)
        print(f"\rround {self.round}: {len(names)} clients and server, {time.monotonic() - began:.0f} s", flush=True)

    def evaluate(self) -> dict[str, float]:
        """Personal accuracy over the clients that took part, and the global model's over all test images."""
        personal = []
        whole: list[float] = []
        for name, client in self.clients.items():
            if name in self.private:
                private = self.private[name]
                served = self.algorithm.personal(self.task(name), self.shared, private)
                personal.append(accuracy(served, client.test))
                state = {**self.shared, **{k: v for k, v in private.items() if "own/" not in k}}
                whole.append(accuracy(load(deepcopy(self.model), state), client.test))
        return {
            "clients": len(personal),
            "personal": float(np.mean(personal)),
            "personal_sd": float(np.std(personal)),
            "personal_worst": min(personal),
            "global": float(np.mean(whole)),
        }


def accuracy(model: Module, samples: Samples) -> float:
    return float((predict(model, samples.x).argmax(1) == samples.y).mean())


def main() -> None:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    fleet = Fleet(args)
    fleet.resume()
    weights = args.weights or "random: accuracies mean nothing"
    print(f"{trainable(fleet.model, fleet.split):,} trainable parameters; backbone {weights}")
    print(f"{sum(len(c.train) for c in fleet.clients.values())} training images; from round {fleet.round + 1}")
    while fleet.round < args.rounds:
        fleet.advance()
        if fleet.round % args.evaluate_every == 0 or fleet.round == args.rounds:
            fleet.history.append({"round": fleet.round, **fleet.evaluate()})
            print("  " + "  ".join(f"{k} {v:.4g}" for k, v in fleet.history[-1].items()), flush=True)
        fleet.store()


if __name__ == "__main__":
    try:
        main()
    except (ConfigError, DataError) as error:
        raise SystemExit(f"error: {error}") from None
