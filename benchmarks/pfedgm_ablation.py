"""What pFedGM's objectives earn: all of them on, each alone off, and all off, over seeds.

    python benchmarks/pfedgm_ablation.py smartwatch npz:mine.npz --rounds 10 --seeds 0 1 2

Prints the mean personal accuracy of members, and of newcomers where the data has some. "Off" keeps the Gaussian
classifier and its statistics: only re-sampling (rho), the spread between classes (inter), the compactness within them
(intra) and the virtual samples of absent classes (virtual) are left out.
"""

import argparse
from statistics import fmean

import torch

import talaria

OBJECTIVES = ("rho", "inter", "intra", "virtual")
SETTINGS = {
    "all on": {},
    **{f"without {name}": {name: 0.0} for name in OBJECTIVES},
    "all off": dict.fromkeys(OBJECTIVES, 0.0) | {"allow_degenerate": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datasets", nargs="+")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for dataset in asked.datasets:
        for name in asked.only:
            members, newcomers = [], []
            for seed in asked.seeds:
                result = talaria.simulate("pfedgm", dataset, rounds=asked.rounds, seed=seed, options=SETTINGS[name])
                members.append(result.accuracy.mean)
                if result.newcomers is not None:
                    newcomers.append(result.newcomers.accuracy.mean)
            told = " ".join(f"{v:.4f}" for v in members)
            more = f"  newcomers {fmean(newcomers):.4f}" if newcomers else ""
            print(f"{dataset[-16:]:16} {name:16} members {told}  mean {fmean(members):.4f}{more}", flush=True)


if __name__ == "__main__":
    main()
