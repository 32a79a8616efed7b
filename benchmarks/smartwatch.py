"""What does the fleet give to its members and to newcomers? The demo over several seeds, as a table.

    python benchmarks/smartwatch.py --seeds 0 1 2 --out runs/smartwatch

Runs examples/demo.py (broker, coordinator, agents, bundles) once per seed and keeps each summary.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

DEMO = Path(__file__).parents[1] / "examples" / "demo.py"
MEMBERS = ("local", "fedavg", "fedavg_ft", "personal")
NEWCOMERS = ("scratch", "zero_shot", "fedavg_ft", "personal")
RATIOS = ("params_ratio", "bundle_ratio", "latency_ratio", "upload_ratio")


def summary(seed: int, out: Path, rounds: int | None) -> dict[str, Any]:
    """The demo's summary for one seed; an earlier one is kept."""
    path = out / str(seed) / "summary.json"
    if not path.exists():
        command = [sys.executable, str(DEMO), "--seed", str(seed), "--out", str(path.parent)]
        command += [] if rounds is None else ["--rounds", str(rounds)]
        subprocess.run(command, check=True)
    return json.loads(path.read_text())


def row(name: str, values: list[float]) -> str:
    """A Markdown row: the figure per seed, and its mean."""
    return f"| {name} | " + " | ".join(f"{v:.3f}" for v in [*values, statistics.fmean(values)]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--out", type=Path, default=Path("runs/smartwatch"))
    asked = parser.parse_args()
    found = [summary(seed, asked.out, asked.rounds) for seed in asked.seeds]
    print("| | " + " | ".join(f"seed {s}" for s in asked.seeds) + " | mean |")
    print("|---" * (len(found) + 2) + "|")
    for method in MEMBERS:
        print(row(f"members: {method}", [s["accuracy"][method] for s in found]))
        print(row(f"members: {method}, worst tenth", [s["worst_tenth"][method] for s in found]))
    for method in NEWCOMERS:
        print(row(f"newcomers: {method}", [s["newcomers"]["accuracy"][method] for s in found]))
        print(row(f"newcomers: {method}, worst", [s["newcomers"]["worst"][method] for s in found]))
    for ratio in RATIOS:
        print(row(ratio, [s[ratio] for s in found]))
    print(f"\nONNX against torch: at most {max(s['onnx_max_abs_diff'] for s in found):.1e}")


if __name__ == "__main__":
    main()
