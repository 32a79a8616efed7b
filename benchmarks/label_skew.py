"""What is a personal subnetwork worth where devices see different labels?

    python benchmarks/label_skew.py [METHOD ...] [--fleet gestures|digits|images] --seeds 0 1 2

A METHOD is an algorithm's name, or ``NAME:OPTION=VALUE,OPTION=VALUE``. ``gestures``: eight devices with three of six
classes each. The signals are made here: a class is a pair of tones on two axes of a six-axis sensor, a window has its
own phases and noise, a device is worn its own way: its axes are turned. ``digits`` and ``images``: ten devices with at
most 150 of the UCI handwritten digits each, with the model and the recipe that ``talaria simulate -d npz:FILE`` takes.
``digits`` are 8 x 8 as they are, labels by Dirichlet(0.3); ``images`` are twice as large, noisy and shifted, and a
device has four of the ten. Printed are the mean and worst accuracy of the served models on test samples, the share of
the parameters that a served model has, and how much two devices' masks have in common (Jaccard: of the channels that
either keeps, the share that both keep).
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

from talaria.data.client import Client, samples
from talaria.data.federated import Federated
from talaria.federated import run_model
from talaria.federated.run import Run
from talaria.model import zoo
from talaria.options import assignments
from talaria.simulation.reporting import pair_overlap
from talaria.simulation.run import members_of, simulate
from talaria.training import evaluation
from talaria.types import Recipe, Samples

DEVICES, CLASSES, EACH, AXES, LENGTH = 8, 6, 3, 6, 32
NOISE = 0.5
TRAIN, VAL, TEST = 14, 6, 60
"""Windows of each of a device's classes."""
RECIPE = Recipe(epochs=2, batch=16, lr=0.05, momentum=0.9)
METHODS = ("local", "fedavg", "fedavg_ft", "fedrep", "hermes", "hermes:mode=intersection")


def fleet(seed: int) -> Federated:
    """The devices of one seed: classes, tones, turns and windows are all drawn from it."""
    rng = np.random.default_rng([seed, 12])
    axes = np.array([rng.choice(AXES, 2, replace=False) for _ in range(CLASSES)])
    rates = rng.uniform(1.0, 7.0, (CLASSES, 2))
    # Every class is on four devices, and no two devices have the same three.
    owned = [(k % CLASSES, (k + 1 + k // CLASSES) % CLASSES, (k + 3) % CLASSES) for k in range(DEVICES)]
    clients = {}
    for device, classes in enumerate(owned):
        turn = np.linalg.qr(rng.standard_normal((AXES, AXES)))[0]
        parts = [_windows(rng, classes, count, axes, rates, turn) for count in (TRAIN, VAL, TEST)]
        clients[f"device-{device}"] = Client(*parts)
    return Federated("label skew", clients, tuple(f"gesture {c}" for c in range(CLASSES)), (AXES, LENGTH))


def _windows(rng: Any, classes: tuple[int, ...], count: int, axes: Any, rates: Any, turn: Any) -> Samples:
    y = np.repeat(classes, count)
    time = np.arange(LENGTH) / LENGTH
    x = NOISE * rng.standard_normal((len(y), AXES, LENGTH))
    for row, label in enumerate(y):
        for axis, rate in zip(axes[label], rates[label], strict=True):
            x[row, axis] += np.sin(2 * np.pi * (rate * time + rng.uniform()))
    return samples(turn @ x, y)


def handwritten(seed: int, images: bool) -> Federated:
    """Digits of one seed over ten devices: 55 of 100 train, 10 validate, 35 test. No digit is on two devices."""
    every = load_digits()
    rng = np.random.default_rng([seed, 78 if images else 77])
    order = rng.permutation(len(every.target))
    left = [list(order[every.target[order] == label]) for label in range(10)]
    clients = {}
    for device in range(10):
        mix = np.isin(np.arange(10), rng.choice(10, 4, replace=False)) / 4 if images else rng.dirichlet([0.3] * 10)
        drawn: list[int] = []
        while len(drawn) < 150 and (mix := mix * [len(rows) > 0 for rows in left]).sum() > 0:
            drawn.append(left[rng.choice(10, p=mix / mix.sum())].pop())
        index = rng.permutation(drawn)
        x = every.images[index] / 16
        if images:
            x = np.roll(np.kron(x, np.ones((1, 2, 2))), tuple(rng.integers(-2, 3, 2)), (1, 2))
            x = x + 0.7 * rng.standard_normal(x.shape)
        parts = np.split(np.arange(len(index)), [int(len(index) * 0.55), int(len(index) * 0.65)])
        clients[f"device-{device}"] = Client(*(samples(x[i][:, None], every.target[index[i]]) for i in parts))
    return Federated("images" if images else "digits", clients, tuple("0123456789"), (1, *x.shape[1:]))


def measure(method: str, of: str, seed: int, rounds_: int) -> dict[str, Any]:
    """One run: accuracies of the served models, their share of the parameters, the overlap of their masks."""
    name, _, options = method.partition(":")
    data = fleet(seed) if of == "gestures" else handwritten(seed, images=of == "images")
    spec = zoo.fitting(data.input_shape, data.classes, sum(len(c.train) for c in data.clients.values()), seed)
    run = Run(
        spec=spec,
        algorithm=name,
        hparams=assignments(options.split(",") if options else None, "METHOD"),
        recipe=RECIPE if of == "gestures" else Recipe(),
        rounds=rounds_,
        seed=seed,
    )
    members = members_of(data.clients)
    result = simulate(run, members)
    served = {client: result.personal(member) for client, member in members.items()}
    report = evaluation.report({k: evaluation.evaluate(m, data.clients[k].test) for k, m in served.items()})
    whole = sum(p.numel() for p in run_model.template(run.spec).parameters())
    return {
        "accuracy": asdict(report.accuracy),
        "parameters": fmean(sum(p.numel() for p in m.parameters()) for m in served.values()) / whole,
        "overlap": pair_overlap(result.masks),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", default=METHODS)
    parser.add_argument("--fleet", choices=("gestures", "digits", "images"), default="gestures")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {}
    print("| | " + " | ".join(f"seed {s}" for s in asked.seeds) + " | mean | worst device | parameters | overlap |")
    print("|---" * (len(asked.seeds) + 5) + "|")
    for method in asked.methods:
        rows = found[method] = [measure(method, asked.fleet, seed, asked.rounds) for seed in asked.seeds]
        means = [row["accuracy"]["mean"] for row in rows]
        cells = [f"{v:.3f}" for v in [*means, fmean(means), min(row["accuracy"]["worst"] for row in rows)]]
        overlaps = [row["overlap"]["mean"] for row in rows if row["overlap"] is not None]
        cells += [f"{fmean(row['parameters'] for row in rows):.3f}", f"{fmean(overlaps):.3f}" if overlaps else ""]
        print(f"| {method} | " + " | ".join(cells) + " |", flush=True)
    if asked.out is not None:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
