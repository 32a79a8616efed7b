"""Is each algorithm as good as an independent implementation of it? Fashion-MNIST, a fixed Dirichlet(0.1) partition.

    python benchmarks/fashion_mnist.py PARTITION.npz --out runs/fashion_mnist.json [NAME ...]

Runs `talaria simulate -a NAME -d fashion-mnist --partition PARTITION.npz --rounds R --seed 0 --json` for every
algorithm (or the named ones) and compares the mean of the 20 personal accuracies with the reference. Results are
kept by name in ``--out``, so that a broken run goes on where it stopped.

The reference figures are PFLlib's (commit d832e76, 20 clients, 300 images each, batch 10, SGD 0.01, seed 0),
measured on the same indices after 25 and 50 rounds.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from talaria.algorithms import ALGORITHMS

REFERENCE = {
    25: {
        "fedavg": 0.7255,
        "local": 0.9230,
        "fedper": 0.9182,
        "fedrep": 0.9233,
        "lg_fedavg": 0.9213,
        "ditto": 0.9253,
        "perfedavg": 0.8932,
    },
    50: {
        "fedavg": 0.7742,
        "fedavg_ft": 0.9272,
        "local": 0.9333,
        "fedper": 0.9313,
        "fedrep": 0.9325,
        "lg_fedavg": 0.9323,
        "ditto": 0.9318,
        "fedbabu": 0.9198,
        "perfedavg": 0.9008,
    },
}


def measure(name: str, partition: Path, rounds: int, seed: int) -> dict[str, object]:
    """One run as a user types it; accuracy per client and CPU seconds of the whole process."""
    command = [str(Path(sys.executable).with_name("talaria")), "simulate", "-a", name, "-d", "fashion-mnist"]
    command += ["--partition", str(partition), "--rounds", str(rounds), "--seed", str(seed), "--json"]
    before, started = os.times(), time.time()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    after = os.times()
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    out = json.loads(done.stdout)
    return {
        "mean": out["accuracy"]["mean"],
        "std": out["accuracy"]["std"],
        "worst": out["accuracy"]["worst"],
        "clients": {client: facts["accuracy"] for client, facts in out["clients"].items()},
        "bytes_up": out["bytes_up"],
        "cpu_s": round(sum(after[2:4]) - sum(before[2:4]), 1),
        "wall_s": round(time.time() - started, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("partition", type=Path)
    parser.add_argument("names", nargs="*", default=sorted(ALGORITHMS))
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/fashion_mnist.json"))
    asked = parser.parse_args()
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    results = json.loads(asked.out.read_text()) if asked.out.exists() else {}
    for name in asked.names:
        key = f"{name}/{asked.rounds}/{asked.seed}"
        if key not in results:
            results[key] = measure(name, asked.partition, asked.rounds, asked.seed)
            asked.out.write_text(json.dumps(results, indent=1))
        mean, reference = results[key]["mean"], REFERENCE.get(asked.rounds, {}).get(name)
        against = "no reference" if reference is None else f"reference {reference:.4f}, {mean - reference:+.4f}"
        print(f"{name:10} {mean:.4f}  worst {results[key]['worst']:.3f}  {against}", flush=True)


if __name__ == "__main__":
    main()
