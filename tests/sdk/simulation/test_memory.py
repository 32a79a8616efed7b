"""A round takes the memory of a few updates, however many clients it asks."""

import subprocess
import sys

import pytest

WIDE = """
import sys

import numpy as np
import torch

import talaria


def peak() -> int:
    told = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(told.split()[1]) // 1024


def learned(clients: int) -> None:
    y = np.tile(np.arange(4), clients)
    x = np.random.default_rng(3).normal(size=(len(y), 64)).astype(np.float32) + y[:, None]
    model = torch.nn.Sequential(torch.nn.Linear(64, 16384), torch.nn.ReLU(), torch.nn.Linear(16384, 4))  # 4.3 MiB
    data = talaria.Federated.from_arrays(x, y, np.repeat([f"c{n:02}" for n in range(clients)], 4))
    talaria.simulate("fedavg", data, model, rounds=1, workers=int(sys.argv[1]), evaluate_every=0, recipe={"steps": 1})


learned(4)
before = peak()
learned(72)
print(peak() - before)
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_updates_of_a_round_are_not_all_held(workers: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WIDE, str(workers)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 150, "68 updates more are 292 MiB"
