"""What a device's folder of windows costs: reading all of it, as before each round, and keeping a window or a label.

    python benchmarks/folder_source.py --windows 10000 --each 1

Windows are 6 x 100 float32, ``--each`` of them in a file. Prints one JSON document: CPU seconds of one reading, the
process's peak memory before and after, and wall milliseconds of keeping one window and one label, each on flash.
"""

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

import numpy as np

from talaria_edge import FolderSource


def peak():
    """MiB of this process at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def measured(windows, each, kept=50):
    """The figures, by name."""
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as name:
        source = FolderSource(Path(name), most=windows)
        for i in range(windows // each):
            x = rng.standard_normal((each, 6, 100)).astype(np.float32)
            np.savez(Path(name, f"w{i}.npz"), x=x, y=np.arange(each) % 7)
        before, begun = peak(), time.process_time()
        found = source.load()
        told = {"windows": len(found.train) + len(found.val), "read_cpu_s": round(time.process_time() - begun, 2)}
        told |= {"peak_mb": peak(), "before_mb": before}
        begun = time.perf_counter()
        names = [source.record(np.zeros((6, 100), np.float32)) for _ in range(kept)]
        told["record_ms"] = round((time.perf_counter() - begun) * 1000 / kept, 1)
        begun = time.perf_counter()
        for one in names:
            source.label(one, 1)
        return told | {"label_ms": round((time.perf_counter() - begun) * 1000 / kept, 1)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--windows", type=int, default=10_000)
    parser.add_argument("--each", type=int, default=1)
    given = parser.parse_args()
    print(json.dumps(measured(given.windows, given.each), indent=2))


if __name__ == "__main__":
    main()
