"""``talaria bench simulation``: what a simulated round costs beside a training loop written by hand, in one run.

Every candidate is a process of its own with one thread of torch (and its workers', where it has some), and they take
turns; the first round of each is not counted. CPU seconds are those of the process and of its workers.

- Fashion-MNIST over 20 clients, 300 images each in batches of 10, all of them in each round, one model for all that is
  evaluated on every client's test images after each round.
- ``mlp`` and ``imu_cnn`` in batches of 16, 20 steps per client: what is around a step of ``mlp`` weighs half as much as
  the step. ``mlp`` once more with 60 steps per client, where it weighs less.
- 10,000 clients of which a hundredth is asked, beside the hundred alone: the most memory of the process.

The loop is what one writes for itself: one model, its weights loaded for each client, ``torch.optim.SGD``, a mean.
Nothing in it is encoded, checked, seeded by name or resumable.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from talaria_bench import bars

AIMS = {"one process": 0.72, "workers 2 (wall)": 0.40, "mlp": 8.0, "imu_cnn": 1.25, "memory_mb": 100.0}
"""Of the loop's CPU seconds, of its wall time; times the loop's steps per CPU second; more than the hundred take."""

SMALL = {"mlp": ("mlp", 20), "mlp, 60 steps": ("mlp", 60), "imu_cnn": ("imu_cnn", 20)}
"""Small networks, and the steps of a client in a round."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one process does: ``who`` is ``"loop"``, or the engine of a simulation."""

    who: str
    model: str
    rounds: int
    batch: int
    lr: float
    momentum: float = 0.0
    workers: int = 0
    clients: int = 0
    samples: int = 0
    """Training samples of each client, which are drawn; 0: Fashion-MNIST of ``partition``."""
    fraction: float = 1.0
    evaluated: bool = False
    partition: str | None = None


UNITS = {"CPU of a round": "cpu", "wall time of a round": "wall"}


def simulation(
    partition: Annotated[
        Path | None,
        typer.Option(
            help="npz with train_idx and test_idx per client; without, one is drawn.", exists=True, dir_okay=False
        ),
    ] = None,
    turns: Annotated[int, typer.Option(help="Turns that the candidates take.", min=1)] = 3,
    rounds: Annotated[int, typer.Option(help="Rounds of Fashion-MNIST in each turn.", min=2)] = 4,
    plot: Annotated[Path | None, typer.Option(help="Draw the ratios here, as SVG.", callback=bars.place)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all figures as JSON.")] = False,
) -> None:
    """Measure simulated rounds beside a loop by hand: CPU and wall time, steps of small networks, and memory."""
    figures = measure(partition, turns, rounds)
    if plot is not None:
        panels = {unit: {name: row[key] for name, row in figures["rounds"].items()} for unit, key in UNITS.items()}
        bars.draw(panels, "of the plain loop's", plot)
    if as_json:
        typer.echo(json.dumps(figures, indent=1))
        return
    typer.echo(f"{'Fashion-MNIST, FedAvg':24}{'CPU s a round':>15}{'of the loop':>13}{'wall s':>9}{'of the loop':>13}")
    for name, row in figures["rounds"].items():
        typer.echo(f"{name:24}{row['cpu_s']:>15.2f}{row['cpu']:>13.2f}{row['wall_s']:>9.2f}{row['wall']:>13.2f}")
    typer.echo(f"\n{'client-steps per CPU s':24}{'loop':>10}{'torch':>10}{'onnx':>10}{'aim':>8}")
    for name, row in figures["steps"].items():
        told = [f"{row['loop']:.0f}", *(f"{row[who]:.2f}x" for who in ("torch", "onnx"))]
        told.append(f"{AIMS[name]}x" if name in AIMS else "")
        typer.echo(f"{name:24}" + "".join(f"{one:>{width}}" for one, width in zip(told, (10, 10, 10, 8), strict=True)))
    peak = figures["memory_mb"]
    typer.echo(
        f"\nmost memory: {peak['100']:.0f} MB of 100 clients, {peak['10000']:.0f} MB of 10,000 at 1 %: "
        f"{peak['more']:.0f} MB more (aim {AIMS['memory_mb']:.0f})"
    )


def measure(partition: Path | None = None, turns: int = 3, rounds: int = 4) -> dict[str, Any]:
    """All figures, as plain data: ``rounds``, ``steps``, ``memory_mb``, and what they were measured with."""
    from importlib.metadata import version

    return {
        "versions": {name: version(name) for name in ("torch", "onnxruntime", "numpy")},
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "aims": AIMS,
        "rounds": _rounds(partition, turns, rounds),
        "steps": {name: _steps(model, turns, steps) for name, (model, steps) in SMALL.items()},
        "memory_mb": _memory(),
    }


def _rounds(partition: Path | None, turns: int, rounds: int) -> dict[str, dict[str, float]]:
    plain: dict[str, Any] = {"model": "fmnist_cnn", "rounds": rounds, "batch": 10, "lr": 0.01, "evaluated": True}
    plain["partition"] = None if partition is None else str(partition.resolve())
    works = {
        "loop": Work(who="loop", **plain),
        "one process": Work(who="torch", **plain),
        "workers 1": Work(who="torch", workers=1, **plain),
        "workers 2": Work(who="torch", workers=2, **plain),
        "programs": Work(who="onnx", **plain),
        "programs, workers 2": Work(who="onnx", workers=2, **plain),
    }
    found = _in_turns("Fashion-MNIST", works, turns)
    return {
        name: {
            "cpu_s": median(one["cpu_s"] for one in rows),
            "wall_s": median(one["wall_s"] for one in rows),
            "cpu": _ratio(rows, found["loop"], "cpu_s"),
            "wall": _ratio(rows, found["loop"], "wall_s"),
            "start_cpu_s": median(one["start_cpu_s"] for one in rows),
            "peak_mb": max(one["peak_mb"] for one in rows),
            "accuracy": rows[0]["accuracy"],
        }
        for name, rows in found.items()
    }


def _steps(model: str, turns: int, steps: int = 20) -> dict[str, float]:
    """Client-steps per CPU second where each client takes ``steps`` in a round."""
    plain: dict[str, Any] = {"model": model, "rounds": 31 if model == "mlp" else 5, "batch": 16, "lr": 0.02}
    plain |= {"momentum": 0.9, "clients": 20, "samples": steps * plain["batch"]}
    works = {who: Work(who=who, **plain) for who in ("loop", "torch", "onnx")}
    found = _in_turns(f"{model}, {steps} steps", works, turns)
    return {
        "loop": plain["clients"] * steps / median(one["cpu_s"] for one in found["loop"]),
        **{who: 1 / _ratio(found[who], found["loop"], "cpu_s") for who in ("torch", "onnx")},
    }


def _memory() -> dict[str, float]:
    plain: dict[str, Any] = {"who": "torch", "model": "mlp", "rounds": 3, "batch": 16, "lr": 0.02, "samples": 32}
    typer.echo("memory: 100 clients, and 10,000", err=True)
    few = spent(Work(clients=100, **plain))["peak_mb"]
    many = spent(Work(clients=10_000, fraction=0.01, **plain))["peak_mb"]
    return {"100": few, "10000": many, "more": many - few}


def _in_turns(what: str, works: dict[str, Work], turns: int) -> dict[str, list[dict[str, float]]]:
    found: dict[str, list[dict[str, float]]] = {name: [] for name in works}
    for turn in range(turns):
        for name in list(works)[:: -1 if turn % 2 else 1]:
            typer.echo(f"{what}, turn {turn + 1} of {turns}: {name}", err=True)
            found[name].append(spent(works[name]))
    return found


def _ratio(rows: list[dict[str, float]], base: list[dict[str, float]], figure: str) -> float:
    return median(one[figure] / other[figure] for one, other in zip(rows, base, strict=True))


def spent(work: Work) -> dict[str, float]:
    """A process of its own does ``work``: CPU and wall seconds of a round after the first (``cpu_s``, ``wall_s``), CPU
    seconds until the first was done (``start_cpu_s``), most memory of the process (``peak_mb``), and ``accuracy``, the
    mean over clients after the last round. Raises RuntimeError where it fails."""
    command = [sys.executable, "-c", "from talaria_bench.simulation import child; child()", json.dumps(asdict(work))]
    alone = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, env=os.environ | alone, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{work} failed:\n{done.stderr[-4000:]}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


def child() -> None:
    """What the process of :func:`spent` does."""
    import torch

    torch.set_num_threads(1)
    work = Work(**json.loads(sys.argv[1]))
    marks: list[tuple[float, float]] = []
    accuracy = (_loop if work.who == "loop" else _simulated)(work, lambda: marks.append((_cpu(), time.perf_counter())))
    between = len(marks) - 1
    facts = {
        "cpu_s": (marks[-1][0] - marks[0][0]) / between,
        "wall_s": (marks[-1][1] - marks[0][1]) / between,
        "start_cpu_s": marks[0][0],
        "peak_mb": _peak_mb(),
        "accuracy": accuracy,
    }
    print(json.dumps(facts))


def _simulated(work: Work, whole: Callable[[], None]) -> float:
    import talaria

    recipe = {"epochs": 1, "batch": work.batch, "lr": work.lr, "momentum": work.momentum}
    result = talaria.simulate(
        "fedavg",
        _data(work),
        work.model,
        rounds=work.rounds,
        recipe=recipe,
        fraction=work.fraction,
        engine="onnx" if work.who == "onnx" else "torch",
        workers=work.workers,
        evaluate_every=1 if work.evaluated else 0,
        progress=lambda _: whole(),
    )
    return result.accuracy.mean


def _loop(work: Work, whole: Callable[[], None]) -> float:
    """FedAvg by hand."""
    import torch
    from torch.nn import functional as F

    from talaria.model import zoo
    from talaria.model.spec import ModelSpec
    from talaria.model.state import tensor_of

    data = _data(work)
    model = zoo.build(ModelSpec(work.model, data.input_shape, data.classes))
    clients = [tuple(map(tensor_of, (c.train.x, c.train.y, c.test.x, c.test.y))) for c in data.clients.values()]
    shared = {key: value.clone() for key, value in model.state_dict().items()}

    def accuracy() -> float:
        model.load_state_dict(shared)
        model.eval()
        with torch.no_grad():
            right = [float((model(x).argmax(1) == y).float().mean()) for _, _, x, y in clients]
        return sum(right) / len(right)

    for _ in range(work.rounds):
        states = []
        for x, y, _, _ in clients:
            model.load_state_dict(shared)
            model.train()
            optimizer = torch.optim.SGD(model.parameters(), lr=work.lr, momentum=work.momentum)
            for index in torch.randperm(len(y)).split(work.batch):  # type: ignore[no-untyped-call]
                optimizer.zero_grad()
                F.cross_entropy(model(x[index]), y[index]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            states.append({key: value.clone() for key, value in model.state_dict().items()})
        shared = {k: torch.stack([s[k] for s in states]).float().mean(0).to(v.dtype) for k, v in shared.items()}
        if work.evaluated:
            accuracy()
        whole()
    return accuracy()


def _data(work: Work) -> Any:
    """Fashion-MNIST, or samples in as many classes as the model's smallest use has, each class around a point."""
    import numpy as np

    from talaria.data import load
    from talaria.data.client import Client
    from talaria.data.federated import Federated
    from talaria.types import Samples

    if not work.samples:
        return load("fashion-mnist", partition=work.partition)
    shape, classes = {"mlp": ((20,), 4), "imu_cnn": ((6, 100), 7)}[work.model]
    rng = np.random.default_rng(0)
    middles = rng.standard_normal((classes, *shape), np.float32)

    def drawn(count: int) -> Samples:
        y = rng.integers(0, classes, count)
        return Samples(rng.standard_normal((count, *shape), np.float32) + middles[y], y)

    clients = {
        f"client-{k:05d}": Client(train=drawn(work.samples), val=drawn(8), test=drawn(8)) for k in range(work.clients)
    }
    labels = tuple(f"class {k}" for k in range(classes))
    return Federated(name="drawn", clients=clients, labels=labels, input_shape=shape)


def _cpu() -> float:
    """CPU seconds of this process, its children that ended, and those that live."""
    own, ticks = os.times(), os.sysconf("SC_CLK_TCK")
    found = time.process_time() + own.children_user + own.children_system  # ticks of 10 ms are too coarse for our own
    for thread in Path("/proc/self/task").iterdir():
        for number in (thread / "children").read_text().split():
            with suppress(OSError):
                facts = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
                found += (int(facts[11]) + int(facts[12])) / ticks
    return found


def _peak_mb() -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / 1e6
