"""What does the fleet give to a speaker whom it never heard? Over seeds and over amounts of labels, as a table.

    python benchmarks/vowels.py --seeds 0 1 2

Eight speakers learn together; the seven of the official test come later and label 1, 2 or 3 frames of each vowel. Per
newcomer the accuracy is the mean over the seeds; intervals are Student's over the newcomers, 95 %.
"""

import argparse
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy import stats

import talaria
from talaria.data.client import Client
from talaria.data.federated import Federated
from talaria.simulation.run import evaluate, members_of
from talaria.types import Samples

FLEET = {"fleet model as it is": "fedavg", "FedAvg, fine-tuned (dense)": "fedavg_ft", "personal": "hermes"}
ALONE = "alone"
FRAMES = (1, 2, 3)


def labelled(frames: int) -> Federated:
    """The speakers, where newcomers label that many frames of each vowel; the last of several validates."""
    return talaria.data.load("vowels", newcomer_frames=frames, newcomer_holdout=min(1, frames - 1))


def alone(data: Federated) -> Federated:
    """The newcomers as the members of no fleet, with all their labels to train on."""
    everybody = {
        name: Client(train=Samples.joined([one.train, one.val]), val=one.val, test=one.test)
        for name, one in data.newcomers.items()
    }
    return Federated(name="vowels", clients=everybody, labels=data.labels, input_shape=data.input_shape)


def measured(seeds: list[int], rounds: int) -> dict[str, dict[int, dict[str, list[float]]]]:
    """Method, frames, newcomer: the accuracy per seed; ``members`` beside the newcomers holds the members' mean."""
    found: dict[str, dict[int, dict[str, list[float]]]] = {}

    def note(method: str, frames: int, accuracy: Mapping[str, float]) -> None:
        for name, value in accuracy.items():
            found.setdefault(method, {}).setdefault(frames, {}).setdefault(name, []).append(value)

    for seed in seeds:
        for method, algorithm in FLEET.items():
            result = talaria.simulate(algorithm, labelled(2), rounds=rounds, seed=seed)
            note(method, 0, {"members": result.accuracy.mean, "worst member": result.accuracy.worst})
            for frames in FRAMES:
                data = labelled(frames)
                report = evaluate(result.learned, data, members_of(data.newcomers, {}, "torch"))
                note(method, frames, {name: one.accuracy for name, one in report.clients.items()})
        for frames in FRAMES:
            result = talaria.simulate("local", alone(labelled(frames)), rounds=rounds, seed=seed)
            note(ALONE, frames, {name: one.accuracy for name, one in result.clients.items()})
    return found


def interval(values: Any) -> str:
    """The mean and the half width of its 95 % interval."""
    values = np.asarray(values)
    half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
    return f"{values.mean():+.3f} ± {half:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    found = measured(asked.seeds, asked.rounds)
    if asked.json:
        print(json.dumps(found))
        return
    people = {
        method: {frames: np.array([np.mean(found[method][frames][name]) for name in sorted(found[method][frames])])
                 for frames in FRAMES}
        for method in (ALONE, *FLEET)
    }  # fmt: skip
    print("| newcomers | " + " | ".join(f"{n} of 6 frames | worst" for n in FRAMES) + " |")
    print("|---" * (2 * len(FRAMES) + 1) + "|")
    for method, of in people.items():
        cells = [f"{interval(of[n])[1:]} | {of[n].min():.3f}" for n in FRAMES]
        print(f"| {method} | " + " | ".join(cells) + " |")
    for other, theirs in people.items():
        if other != "personal":
            cells = [f"{interval(people['personal'][n] - of)} | " for n, of in theirs.items()]
            print(f"| personal above {other} | " + " | ".join(cells) + " |")
    for method in FLEET:
        seeds = found[method][0]
        print(f"members, {method}: {np.mean(seeds['members']):.3f}, worst {np.mean(seeds['worst member']):.3f}")
    print("by seed, 2 frames: " + "; ".join(
        f"{method} " + " ".join(f"{v:.3f}" for v in np.mean([found[method][2][k] for k in found[method][2]], 0))
        for method in people
    ))  # fmt: skip


if __name__ == "__main__":
    main()
