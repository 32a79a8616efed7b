"""Do the reconstructed algorithms work? Thorki and pFedGM against the mean of Local and FedAvg-FT, over seeds.

    python benchmarks/reconstructed.py --partition PARTITION.npz --seeds 0 1 2 --out runs/reconstructed.json

Runs `talaria simulate -a NAME -d DATASET --rounds R --seed S --json` with the defaults of each dataset (smartwatch for
30 rounds; Fashion-MNIST, where a partition is given, for 25) and prints accuracies per seed. Results are kept in
``--out``, so that a broken run goes on where it stopped.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean

BASELINES = ("local", "fedavg_ft")
RECONSTRUCTED = ("thorki", "pfedgm")


def accuracy(name: str, dataset: list[str], rounds: int, seed: int) -> float:
    """The mean personal accuracy of one run, as a user types it."""
    command = [str(Path(sys.executable).with_name("talaria")), "simulate", "-a", name, *dataset]
    command += ["--rounds", str(rounds), "--seed", str(seed), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    return float(json.loads(done.stdout)["accuracy"]["mean"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--partition", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/reconstructed.json"))
    asked = parser.parse_args()
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    results = json.loads(asked.out.read_text()) if asked.out.exists() else {}
    tasks = {"smartwatch": (["-d", "smartwatch"], 30)}
    if asked.partition is not None:
        tasks["fashion-mnist"] = (["-d", "fashion-mnist", "--partition", str(asked.partition)], 25)
    for task, (dataset, rounds) in tasks.items():
        rows: dict[str, list[float]] = {}
        for name in (*BASELINES, *RECONSTRUCTED):
            for seed in asked.seeds:
                key = f"{task}/{name}/{rounds}/{seed}"
                if key not in results:
                    results[key] = accuracy(name, dataset, rounds, seed)
                    asked.out.write_text(json.dumps(results, indent=1))
                rows.setdefault(name, []).append(results[key])
            told = " ".join(f"{v:.4f}" for v in rows[name])
            print(f"{task:14} {name:10} {told}  mean {fmean(rows[name]):.4f}", flush=True)
        bar = fmean(fmean(rows[name]) for name in BASELINES)
        for name in RECONSTRUCTED:
            print(f"{task:14} {name:10} against the mean of the baselines, {bar:.4f}: {fmean(rows[name]) - bar:+.4f}")


if __name__ == "__main__":
    main()
