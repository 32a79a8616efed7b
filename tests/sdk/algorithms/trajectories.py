"""Three rounds of every algorithm on a small made-up fleet, as few numbers as tell one trajectory from another.

    python tests/sdk/algorithms/trajectories.py --write     takes the vectors of test_trajectories.py anew
    python tests/sdk/algorithms/trajectories.py --bits      a hash of all bits per case, to compare two checkouts
    python tests/sdk/algorithms/trajectories.py --steady    by how many roundings each moves where samples do by one

The hashes hold on one machine with one count of threads; the vectors are compared by tests/tolerance.py.
"""

import hashlib
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from tolerance import roundings

from talaria.algorithms import ALGORITHMS
from talaria.federated.fedbuff_run import Buffering
from talaria.federated.run import Member, Run
from talaria.model.spec import AdapterSpec, ModelSpec
from talaria.model.state import to_torch
from talaria.planning.plan import Plan
from talaria.simulation.run import Learned, simulate
from talaria.tensors import Tensors
from talaria.training.loop import predict
from talaria.types import Recipe, Samples

VECTORS = Path(__file__).with_suffix(".npz")
LEAST = 1e-2
"""The least size that values are compared to: what is smaller is sums that cancel."""
SHAPE, CLASSES = (3, 16), 3
PLAIN = ModelSpec("imu_cnn", SHAPE, CLASSES)
ADAPTED = ModelSpec("imu_cnn", SHAPE, CLASSES, adapters=AdapterSpec("lowrank", rank=2))
NARROW = Plan(widths={"conv1": 16, "conv2": 24, "conv3": 32, "conv4": 40})
NARROW_ADAPTED = Plan(widths={f"{group}.base": width for group, width in NARROW.widths.items()})

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "masks, adapters": {"plan": NARROW_ADAPTED, "spec": ADAPTED, "buffers": "aggregate"},
    "masks, fp16": {"plan": NARROW_ADAPTED, "spec": ADAPTED, "codec": "fp16", "buffers": "aggregate"},
    "asynchronous": {"plan": NARROW, "asynchronous": True},
}
OPTIONS: dict[str, dict[str, Any]] = {
    **{name: {} for name in sorted(ALGORITHMS)},
    "apfl every step": {"alpha_update": "every_step", "alpha_lr": 0.1},
    "fedavg_ft head": {"tune": "head", "tune_on": "all"},
    "ffgg gradient": {"form": "gradient", "head_steps": 3},
    "ffgg refit": {"refit": True, "local_steps": 2, "gamma": 0.05},
    "heart_pfl B": {"variant": "B", "trains": "full"},
    "hermes": {"threshold": 0.0, "block": 4, "tune_epochs": 2},
    "hermes intersection": {
        "threshold": 0.0, "block": 4, "mode": "intersection", "private": "head", "importance": "taylor",
        "tune_epochs": 0,
    },
    "hermes download": {
        "threshold": 0.0, "block": 4, "choose_by": "download", "importance": "bn", "tune": "head", "tune_epochs": 2,
        "tune_on": "all", "newcomer_epochs": 3, "min_holders": 2,
    },
    "perfedavg hf": {"form": "hf"},
    "perfedavg exact": {"form": "exact", "inner_lr": 0.01, "adapt_steps": 2},
    "pfedgm diagonal": {"covariance": "diagonal", "features": 16, "rho": 1.0, "tune_on": "all"},
    "pfedgm predictive": {"predictive": True, "features": 8, "prior_samples": 4.0, "tune_epochs": 0},
    "thorki adapters": {"general": "adapters", "gate": "sample", "gate_steps": 5, "small_epochs": 2},
    "thorki constant": {"gate": "constant", "prior": "none", "join_epochs": 2},
}  # fmt: skip
AS_THEY_COME = ("fedavg", "ffgg gradient", "heart_pfl", "hermes download")
"""Who is looked at in an asynchronous run."""
ROUNDED = ("apfl", "fedavg", "thorki")
"""Who is looked at with updates that are rounded: a value that falls to the other side is 2^13 roundings off."""
SEEDS = {"ditto | plain": 4, "pfedgm diagonal | masks, adapters": 7, "fedavg_ft | plain": 7, "fedprox | plain": 7}
"""Seeds of runs that have an activation within a few roundings of a kink under the usual one, 3."""
WHO = {"plain": sorted(ALGORITHMS), "masks, adapters": OPTIONS, "masks, fp16": ROUNDED, "asynchronous": AS_THEY_COME}
CASES = [
    (name, setting)
    for name in OPTIONS
    for setting, wanted in WHO.items()
    if name in wanted and (name, setting) != ("pfedgm", "masks, adapters")  # 64 features of 12 samples: only noise
]


def samples(seed: int, labels: torch.Tensor, nudge: int = 0) -> Samples:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(len(labels), *SHAPE, generator=g) * 0.5
    x[:, 0] += labels[:, None].float() - 1
    if nudge:
        g.manual_seed(1000 * nudge + seed)
        x = (x.double() * (1 + (torch.rand(x.shape, generator=g) * 2 - 1) * 2**-23)).float()
    return Samples.of(x, labels)


def member(
    name: str, seed: int, plan: Plan | None = None, count: int = 12, classes: int = CLASSES, *, nudge: int = 0
) -> Member:
    val = samples(seed + 50, torch.arange(6) % classes, nudge)
    return Member(name, samples(seed, torch.arange(count) % classes, nudge), val, plan)


def learned(name: str, setting: str, nudge: int = 0) -> tuple[Learned, Member]:
    """Three rounds of three devices, the second of which knows two of the classes; and a newcomer. With a ``nudge``
    each sample's values are off by a rounding at most."""
    wanted = {"spec": PLAIN, **SETTINGS[setting]}
    plan = wanted.pop("plan", None)
    recipe = Recipe(epochs=1, batch=4, lr=0.02, momentum=0.5)
    seed = SEEDS.get(f"{name} | {setting}", 3)
    run = Run(algorithm=name.split(maxsplit=1)[0], hparams=OPTIONS[name], recipe=recipe, rounds=3, seed=seed, **wanted)
    own = partial(member, plan=plan, nudge=nudge)
    fleet = [own("anna", 0), own("ben", 1, count=9, classes=2), own("cleo", 2)]
    buffering = Buffering(buffer=2) if run.asynchronous else None
    return simulate(run, {one.client: one for one in fleet}, buffering=buffering), own("zoe", 77)


def trajectory(name: str, setting: str, nudge: int = 0) -> Tensors:
    """The shared state, what each device keeps, and the logits of the models that devices and a newcomer are served."""
    result, newcomer = learned(name, setting, nudge)
    found = {f"shared/{key}": value for key, value in result.shared.items()}
    for client, private in result.private.items():
        found |= {f"{client}/{key}": value for key, value in private.items()}
    for one in (*result.members.values(), newcomer):
        found[f"{one.client} serves"] = predict(result.personal(one), one.val.x)
    return dict(sorted(found.items()))


def digest(tensors: Tensors) -> np.ndarray:
    """Per tensor: its root mean square, its sum under fixed signs over the root of its size, one of its values."""
    rows = []
    for name, tensor in to_torch(tensors).items():
        flat = tensor.double().flatten()
        draws = torch.Generator().manual_seed(len(name) * 1009 + len(flat))
        signs = torch.randint(2, flat.shape, generator=draws) * 2.0 - 1
        at = int(torch.randint(max(1, len(flat)), (1,), generator=draws))
        size = max(1, len(flat)) ** 0.5
        rows.append(
            (float(flat.norm()) / size, float(flat @ signs.double()) / size, float(flat[at]) if len(flat) else 0)
        )
    return np.array(rows, np.float32)


def distance(now: np.ndarray, then: np.ndarray) -> float:
    """The most roundings between two digests."""
    return max(apart(one, other) for one, other in zip(now, then, strict=True))


def apart(now: np.ndarray, then: np.ndarray) -> float:
    """Roundings between two rows, of the size of what they tell of."""
    return roundings(now, then, max(float(then[0]), LEAST))


def bits(tensors: Tensors) -> str:
    """A hash of all names, types, shapes and values."""
    found = hashlib.sha256()
    for key, value in tensors.items():
        found.update(f"{key} torch.{value.dtype} {value.shape} ".encode() + value.tobytes())
    return found.hexdigest()[:16]


def main() -> None:
    torch.set_num_threads(1)
    if "--steady" in sys.argv:
        for name, setting in CASES:
            straight = digest(trajectory(name, setting))
            moved = [distance(digest(trajectory(name, setting, nudge)), straight) for nudge in range(1, 6)]
            sys.stdout.write(f"{name} | {setting}: {', '.join(f'{one:.0f}' for one in moved)}\n")
        return
    taken = {}
    for name, setting in CASES:
        tensors = trajectory(name, setting)
        taken[f"{name} | {setting}"] = digest(tensors)
        sys.stdout.write(f"{bits(tensors)} {name} | {setting}\n")
    if "--write" in sys.argv:
        np.savez_compressed(VECTORS, **taken)


if __name__ == "__main__":
    main()
