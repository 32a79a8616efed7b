"""How much accuracy does a latency budget cost? Real smartwatch users, the whole curve.

    python benchmarks/accuracy_at_budget.py [--rounds 20] [--seeds 0] [--out FOLDER]

Every user's device is planned for a share of the unpruned model's latency on this machine; the fleet learns with
Hermes, whose plan is the floor of its pruning, and with FedAvg and fine-tuning, whose mask is the plan from the start.
The dense twin of both is FedAvg with fine-tuning on the unpruned model. Figures are means over users of the accuracy
on their own test samples; latency is that of the exported model, measured side by side with the dense one's.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

import budget_curve

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from smartwatch.setting import run_of

from talaria.data import registry
from talaria.model import zoo
from talaria.model.spec import ModelSpec
from talaria.planning import latency_model
from talaria.planning import measured as planning
from talaria.planning.budget import Budget
from talaria.planning.layer_stats import anatomy
from talaria.planning.onnx_runtime import Resizer, exporter
from talaria.planning.plan import Plan
from talaria.planning.planner import plan
from talaria.planning.profile import cached
from talaria.simulation.run import evaluate, members_of, simulate

RATIOS = (0.7, 0.5, 0.35)


def main() -> None:
    """Print one row per budget, or write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--ratios", type=float, nargs="+", default=list(RATIOS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--out", type=Path, help="folder for rows.json and the picture of the curve")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for seed in asked.seeds for row in curve(seed, asked.rounds, asked.ratios)]
    if asked.json:
        asked.json.write_text(json.dumps(rows, indent=1))
    if asked.out:
        asked.out.mkdir(parents=True, exist_ok=True)
        (asked.out / "rows.json").write_text(json.dumps(rows, indent=1))
        budget_curve.draw({"smartwatch": rows}, asked.out / budget_curve.NAME)


def curve(seed: int, count: int, ratios: list[float]) -> list[dict[str, Any]]:
    """The dense twin and each budget, for one seed."""
    data = registry.load("smartwatch")
    spec = run_of(data, "fedavg_ft", seed, count).spec
    device = cached()
    measured = planning.costed(spec, device)
    rows = []
    for ratio in [1.0, *ratios]:
        made = Plan() if ratio == 1.0 else plan(spec, Budget(latency_ratio=ratio), device, measured)
        for algorithm in ("fedavg_ft",) if ratio == 1.0 else ("hermes", "fedavg_ft"):
            run = run_of(data, algorithm, seed, count)
            members = members_of(data.clients, dict.fromkeys(data.clients, made))
            report = evaluate(simulate(run, members), data, members)
            row = {
                "seed": seed,
                "budget": ratio,
                "algorithm": algorithm,
                "accuracy": report.accuracy.mean,
                "widths": dict(made.widths),
                "latency": 1.0 if ratio == 1.0 else _latency(spec, made),
            }
            rows.append(row)
            print(f"{seed}  {ratio:4.2f}  {algorithm:10}  {row['accuracy']:.4f}  {row['latency']:.3f}", flush=True)
    return rows


def _latency(spec: ModelSpec, made: Plan) -> float:
    """Measured latency of the planned model to the dense one."""
    parts = anatomy(spec)
    resizer = Resizer(exporter()(latency_model.lively(zoo.build(spec)), zoo.example(spec, 2)), parts)
    files = {"dense": resizer.at(parts.full()), "planned": resizer.at({**parts.full(), **made.widths})}
    took, _ = latency_model.side_by_side(files, zoo.example(spec), 60)
    times = latency_model.milliseconds(took)
    return times["planned"] / times["dense"]


if __name__ == "__main__":
    main()
