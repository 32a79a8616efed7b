"""What coarse codecs cost in accuracy, with what they leave out sent later (error feedback) and without.

    python benchmarks/coarse_codecs.py npz:mine.npz -a fedavg_ft --rounds 40 --seeds 0 1 2
    python benchmarks/coarse_codecs.py smartwatch -a hermes --rounds 30 --codecs fp16 fp16/fp16 int8/int8

``UP/DOWN`` is how updates travel up and how the model travels down. Prints the mean personal accuracy of each seed, of
newcomers too, and the bytes that all devices sent up, beside whole values.
"""

import argparse
from statistics import fmean
from unittest.mock import patch

import torch

import talaria
from talaria.wire import feedback

CODECS = ("raw", "fp16", "int8", "topk:0.05", "topk:0.01")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset")
    parser.add_argument("-a", "--algorithm", default="fedavg_ft")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--codecs", nargs="+", default=CODECS)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for both in asked.codecs:
        codec, _, download = both.partition("/")
        for fed_back in (True, False) if feedback.is_coarse(codec) else (True,):
            with patch.object(feedback, "is_coarse", feedback.is_coarse if fed_back else lambda codec: False):
                found, newcomers, sent = [], [], 0
                for seed in asked.seeds:
                    result = talaria.simulate(
                        asked.algorithm,
                        asked.dataset,
                        rounds=asked.rounds,
                        seed=seed,
                        codec=codec,
                        download=download or "raw",
                    )
                    found.append(result.accuracy.mean)
                    newcomers += [] if result.newcomers is None else [result.newcomers.accuracy.mean]
                    sent = sum(point.bytes_up for point in result.curve)
            told = " ".join(f"{v:.4f}" for v in found)
            name = f"{both} {'' if fed_back else 'without feedback'}"
            new = f"  newcomers {fmean(newcomers):.4f}" if newcomers else ""
            print(f"{name:28} {told}  mean {fmean(found):.4f}{new}  {sent / 1e6:.2f} MB up", flush=True)


if __name__ == "__main__":
    main()
