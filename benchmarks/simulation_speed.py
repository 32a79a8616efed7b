"""What does simulating a round cost beside a plain training loop, and beside PFLlib? Fashion-MNIST, 20 clients.

    python benchmarks/simulation_speed.py PARTITION.npz [--pfllib PFLlib/system --python OTHER/bin/python]

Each round trains all 20 clients for one epoch over 300 images in batches of 10; FedRep takes one epoch of the head, or
the ten of its authors, before the one of the body. Every candidate is a process of its own with one thread, run for a
few rounds and for more; a round costs the difference in CPU seconds (user and system) over the difference in rounds, so
that starting up and the one evaluation at the end cancel out. Candidates take turns, and each turn gives one ratio to
the loop's.

The loop is what one writes by hand: one model, its weights loaded for each client, SGD, a mean; nothing is encoded,
checked or resumable. PFLlib is run as published (github.com/TsingZ0/PFLlib), its evaluation in between turned off, with
the Python of --python, which has what it imports.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from talaria.data import load
from talaria.model import zoo
from talaria.model.spec import ModelSpec
from talaria.model.state import tensor_of

WORKS = {"fedavg": 0, "fedrep-1": 1, "fedrep-10": 10}
"""Epochs of the head before the one of the body; 0: FedAvg."""
FEW, MORE = 2, 5
"""Rounds of the two runs whose difference is measured."""
BATCH, LR = 10, 0.01


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("partition", type=Path, help="npz with train_idx and test_idx per client")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--pfllib", type=Path, help="the folder with PFLlib's main.py")
    parser.add_argument("--python", default=sys.executable, help="a Python that has what PFLlib imports")
    parser.add_argument("--out", type=Path, default=Path("runs/simulation_speed.json"))
    parser.add_argument("--loop", choices=WORKS, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.loop:
        loop(asked.partition, asked.loop, asked.rounds)
        return
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        place = None if asked.pfllib is None else for_pfllib(asked.partition, asked.pfllib, Path(folder))
        for name in WORKS:
            rows = found[name] = {}
            for _ in range(asked.turns):
                for who in ("loop", "talaria", *(() if place is None else ("pfllib",))):
                    rows.setdefault(who, []).append(cost(who, name, asked.partition, place, asked.python))
            for who, turns in rows.items():
                ratio = median(t["round_s"] / base["round_s"] for t, base in zip(turns, rows["loop"], strict=True))
                print(
                    f"{name:10} {who:8} {median(t['round_s'] for t in turns):6.2f} CPU s a round, {ratio:.2f} of the "
                    f"loop's  start {median(t['start_s'] for t in turns):.1f} CPU s  "
                    f"memory {max(t['memory_mb'] for t in turns):.0f} MB",
                    flush=True,
                )
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(found, indent=1))


def cost(who: str, work: str, partition: Path, place: Path | None, python: str) -> dict[str, float]:
    """CPU seconds of a round and of everything else, and the most memory that the longer run held."""
    few, more = (spent(*command(who, work, partition, rounds, place, python)) for rounds in (FEW, MORE))
    round_s = (more[0] - few[0]) / (MORE - FEW)
    return {"round_s": round_s, "start_s": few[0] - FEW * round_s, "memory_mb": more[1]}


def command(
    who: str, work: str, partition: Path, rounds: int, place: Path | None, python: str
) -> tuple[list[str], Path | None]:
    """The command line of one candidate, and the folder that it runs in."""
    algorithm, _, heads = work.partition("-")
    if who == "loop":
        return [sys.executable, __file__, str(partition), "--loop", work, "--rounds", str(rounds)], None
    if who == "talaria":
        words = [str(Path(sys.executable).with_name("talaria")), "simulate", "-a", algorithm, "-d", "fashion-mnist"]
        words += ["--partition", str(partition), "--rounds", str(rounds), "--json"]
        return [*words, *(["-o", f"head_epochs={heads}"] if heads else [])], None
    name = {"fedavg": "FedAvg", "fedrep": "FedRep"}[algorithm]
    # PFLlib trains one round more than it is told; it evaluates every -eg rounds, the first included.
    words = [python, "main.py", "-data", "FashionMNIST", "-m", "CNN", "-algo", name, "-gr", str(rounds - 1)]
    words += ["-nc", "20", "-lbs", str(BATCH), "-ls", "1", "-lr", str(LR), "-eg", "1000", "-dev", "cpu"]
    return [*words, *(["-pls", heads] if heads else [])], place


def spent(words: list[str], folder: Path | None) -> tuple[float, float]:
    """CPU seconds and most memory (MB) of a process."""
    with tempfile.TemporaryFile() as said:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        process = subprocess.Popen(words, cwd=folder, env=environment, stdout=said, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if status:
            said.seek(0)
            raise SystemExit(f"{' '.join(words)}\n{said.read()[-4000:].decode(errors='replace')}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1000


def loop(partition: Path, work: str, rounds: int) -> None:
    """FedAvg or FedRep by hand."""
    torch.set_num_threads(1)
    data = load("fashion-mnist", partition=partition)
    model = zoo.build(ModelSpec("fmnist_cnn", data.input_shape, data.classes))
    heads: list[dict[str, Any]] = [{} for _ in data.clients]
    shared = {k: v.clone() for k, v in model.state_dict().items()}
    for _ in range(rounds):
        states = []
        for number, client in enumerate(data.clients.values()):
            model.load_state_dict({**shared, **heads[number]})
            for in_head in (*[True] * WORKS[work], False) if WORKS[work] else (None,):
                for key, parameter in model.named_parameters():
                    parameter.requires_grad_(in_head is None or key.startswith("head") == in_head)
                optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
                x, y = tensor_of(client.train.x), tensor_of(client.train.y)
                for index in torch.randperm(len(client.train)).split(BATCH):
                    optimizer.zero_grad()
                    F.cross_entropy(model(x[index]), y[index]).backward()
                    optimizer.step()
            state = {k: v.clone() for k, v in model.state_dict().items()}
            if WORKS[work]:
                heads[number] = {k: v for k, v in state.items() if k.startswith("head")}
            states.append(state)
        shared = {k: torch.stack([s[k] for s in states]).mean(0) for k in shared}
    right = []
    for number, client in enumerate(data.clients.values()):
        model.load_state_dict({**shared, **heads[number]})
        with torch.no_grad():
            right.append(float((model(tensor_of(client.test.x)).argmax(1) == tensor_of(client.test.y)).float().mean()))
    print(json.dumps({"accuracy": sum(right) / len(right)}))


def for_pfllib(partition: Path, program: Path, folder: Path) -> Path:
    """A copy of PFLlib beside the data in its own form, a pickled dictionary; the folder with its main.py."""
    data = load("fashion-mnist", partition=partition)
    for part in ("train", "test"):
        place = folder / "dataset" / "FashionMNIST" / part
        place.mkdir(parents=True)
        for number, client in enumerate(data.clients.values()):
            own = getattr(client, part)
            np.savez_compressed(place / f"{number}.npz", data={"x": own.x, "y": own.y})  # type: ignore[arg-type]
    (folder / "results").mkdir()
    return Path(shutil.copytree(program, folder / "system"))


if __name__ == "__main__":
    main()
