"""What a fleet is worth to people whose glucose is forecast: ``python benchmarks/glucose.py --seeds 0 1 2``.

Prints R², its worst, and the mean absolute error in mg/dl, of members and newcomers: alone (as many epochs as the
rounds of the fleet take together), the fleet's model as it is, FedAvg fine-tuned, and the personal model of Ditto.
"""

from __future__ import annotations

import argparse
import math
import statistics
from dataclasses import replace

import talaria
from talaria.data import load
from talaria.data.federated import Federated
from talaria.training.evaluation import Metrics

ROUNDS = 20
METHODS = {"alone": "local", "fleet model": "fedavg", "FedAvg, fine-tuned": "fedavg_ft", "personal (Ditto)": "ditto"}
STUDENT = {5: 2.776, 19: 2.101}
"""Student's t for a 95 % interval over so many people."""


def measured(data: Federated, algorithm: str, seed: int) -> dict[str, dict[str, Metrics]]:
    """Members' and newcomers' figures."""
    found = talaria.simulate(algorithm, data, rounds=ROUNDS, seed=seed)
    if algorithm != "local":
        assert found.newcomers is not None
        return {"members": dict(found.clients), "newcomers": dict(found.newcomers.clients)}
    # A newcomer alone trains as long as a member: it is a member of a fleet where nobody learns from anybody.
    apart = replace(data, clients=data.newcomers, newcomers={})
    alone = talaria.simulate(algorithm, apart, rounds=ROUNDS, seed=seed)
    return {"members": dict(found.clients), "newcomers": dict(alone.clients)}


def main() -> None:
    """Run all methods at all seeds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    seeds, data = parser.parse_args().seeds, load("glucose")
    found = {name: [measured(data, algorithm, seed) for seed in seeds] for name, algorithm in METHODS.items()}
    for group, people in (("members", data.clients), ("newcomers", data.newcomers)):
        print(f"\n{group}: R2, worst person, MAE mg/dl; R2 by seed")
        mean = {
            name: {one: statistics.mean(run[group][one].accuracy for run in runs) for one in people}
            for name, runs in found.items()
        }
        for name, runs in found.items():
            by_seed = [statistics.mean(one.accuracy for one in run[group].values()) for run in runs]
            error = statistics.mean(-one.macro_recall for run in runs for one in run[group].values())
            told = " ".join(f"{value:.3f}" for value in by_seed)
            values = mean[name].values()
            print(f"{name:20} {statistics.mean(values):.3f} {min(values):.3f} {error:.2f}; {told}")
        for name in list(METHODS)[:-1]:
            gains = [mean["personal (Ditto)"][one] - mean[name][one] for one in people]
            wide = STUDENT[len(gains)] * statistics.stdev(gains) / math.sqrt(len(gains))
            print(f"personal above {name}: {statistics.mean(gains):+.3f} ± {wide:.3f}")


if __name__ == "__main__":
    main()
