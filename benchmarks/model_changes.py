"""How many bytes a device downloads of a global model where it has an older one: what changed since.

    python benchmarks/model_changes.py smartwatch -a hermes --rounds 30
    python benchmarks/model_changes.py fashion-mnist -a fedavg --rounds 8 --partition PARTITION.npz

For each way down and each age of the model that is there: the changes beside the whole file, mean over the second half
of the rounds; and milliseconds of CPU for each MiB of the file to make them and to undo them, the least of them.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import fmean

import torch

from talaria.data import load
from talaria.federated.global_model import encode_model
from talaria.simulation.experiment import prepare
from talaria.simulation.run import course, members_of
from talaria.wire.changes import applied, changes
from talaria.wire.download import CODECS

AGES = (1, 2, 4, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset")
    parser.add_argument("-a", "--algorithm", default="fedavg")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--partition", help="npz with train_idx and test_idx per client")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    data = load(asked.dataset, **({} if asked.partition is None else {"partition": asked.partition}))
    for how in CODECS:
        experiment = prepare(asked.algorithm, data, rounds=asked.rounds, download=how)
        fleet, rounds = course(experiment.run, members_of(data.clients))
        files = [encode_model(fleet.shared, how)]
        files += [encode_model(fleet.shared, how) for _ in rounds]
        print(f"{how:5} {len(files[-1]):9,d} bytes ", end="")
        make, undo = [], []
        for age in AGES:
            found = []
            for before, after in pairs(files, age):
                took, few = spent(lambda before=before, after=after: changes(before, after))
                make.append(took / len(after))
                found.append(len(few or after) / len(after))
                if few is not None:
                    took, same = spent(lambda few=few, before=before: applied(few, before))
                    undo.append(took / len(after))
                    assert same == after
            print(f"  {age} old {fmean(found):.3f}" if found else f"  {age} old: none", end="", flush=True)
        print(
            f"  make {min(make, default=0) * 2**20 * 1e3:.1f} ms/MiB, undo {min(undo, default=0) * 2**20 * 1e3:.1f}",
            flush=True,
        )


def pairs(files: Sequence[bytes], age: int) -> list[tuple[bytes, bytes]]:
    """Each file of the second half that has one ``age`` rounds older, after that one."""
    return [(files[i - age], files[i]) for i in range(max(len(files) // 2, age), len(files))]


def spent(work: Callable[[], bytes | None]) -> tuple[float, bytes | None]:
    """CPU seconds of ``work``, and what it gives."""
    begun = time.process_time()
    found = work()
    return time.process_time() - begun, found


if __name__ == "__main__":
    main()
