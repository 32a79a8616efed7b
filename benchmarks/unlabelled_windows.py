"""What a newcomer's unlabelled windows are worth to BatchNorm on the smartwatch (benchmarks/unlabelled_windows.py).

Everybody else is the fleet; a subject's two wrists come when its rounds are over, with labels for their first windows
of each exercise. Wherever the engine calibrates for them, it does so once on the labelled windows, as Talaria did, and
once on all windows before those of the test, labelled or not. ``all after`` takes the statistics of the finished model
anew from all windows, also where no algorithm calibrates. ``as it is`` is what Talaria serves a device whose other
training windows are unlabelled.
"""

import argparse
import json
from copy import deepcopy
from dataclasses import replace

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from talaria.federated import rounds as both_sides
from talaria.federated.run import Member
from talaria.programs.engine import ProgramEngine
from talaria.simulation.experiment import prepare
from talaria.simulation.run import members_of, simulate
from talaria.training import evaluation
from talaria.types import Samples
from talaria_bench.people.studies import STUDIES

TUNE = {"tune_lr": 0.005, "tune_on": "all"}
SMALL = TUNE | {"choose_by": "download", "newcomer_epochs": 80}
WAYS = {
    "FedAvg's model, own statistics": ("fedavg", "fedavg", {}, False),
    "FedAvg, tuned 20 epochs": ("fedavg", "fedavg_ft", TUNE | {"tune_epochs": 20}, False),
    "FedAvg, tuned 80 epochs": ("fedavg", "fedavg_ft", TUNE | {"tune_epochs": 80}, False),
    "Hermes, small, 80 epochs": ("hermes", "hermes", SMALL, True),
}
AMOUNTS = ("4 windows", "8 windows", "16 windows")
SERVING = {"tune_epochs", "tune_lr", "tune_on", "newcomer_epochs"}
given = {}
"""By client what is calibrated on in the place of the labelled windows; nothing: on these."""
calibrated = ProgramEngine.calibrate


def calibrate(engine, task, state, samples=None, batch=256):
    x = given.get(task.client)
    samples = samples if x is None else Samples(x, np.zeros(len(x), np.int64))
    return calibrated(engine, task, state, samples, batch)


def taken_anew(model, x):
    """The model with BatchNorm statistics of ``x`` alone."""
    made = deepcopy(model).eval()
    for layer in made.modules():
        if isinstance(layer, _BatchNorm) and layer.track_running_stats:
            layer.reset_running_stats()
            layer.momentum = None
            layer.train()
    with torch.no_grad():
        for part in np.array_split(x, -(-len(x) // 256)):
            made(torch.from_numpy(part))
    return made.eval()


def measured(study, subject, seed, rounds):
    """A row for each way, amount and wrist."""
    data = {amount: study.load(subject, amount) for amount in (*AMOUNTS, "all")}
    first, learned, rows = data[AMOUNTS[0]], {}, []
    for name, (learns, serves, options, small) in WAYS.items():
        own = {} if learns != serves else {key: value for key, value in options.items() if key not in SERVING}
        run = prepare(learns, first, rounds=rounds, seed=seed, options=own, engine="onnx").run
        plan = study.plan if small else None
        if learns not in learned:
            plans = dict.fromkeys(first.clients, plan) if small else {}
            learned[learns] = simulate(run, members_of(first.clients, plans, "onnx")).shared
        served = replace(run, algorithm=serves, hparams={**run.hparams, **options})
        for amount in AMOUNTS:
            for person, mine in data[amount].newcomers.items():
                every = data["all"].newcomers[person]
                x = np.concatenate([every.train.x, every.val.x])
                member, row = Member(person, mine.train, mine.val, plan, "onnx"), {}
                for kind in ("labelled", "all"):
                    given.update({person: x} if kind == "all" else {})
                    model = both_sides.personalize(served, member, learned[learns], None)
                    given.clear()
                    row[kind] = evaluation.evaluate(model, mine.test).accuracy
                    if kind == "labelled":
                        row["all after"] = evaluation.evaluate(taken_anew(model, x), mine.test).accuracy
                known = {one.tobytes() for one in (*mine.train.x, *mine.val.x)}
                rest = every.train.x[[one.tobytes() not in known for one in every.train.x]]
                as_it_is = both_sides.personalize(served, replace(member, unlabelled=rest), learned[learns], None)
                row["as it is"] = evaluation.evaluate(as_it_is, mine.test).accuracy
                rows.append({"way": name, "amount": amount, "subject": subject, "seed": seed, "person": person, **row})
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--subjects", type=int, nargs="+", default=[1, 2, 3, 6, 9])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", action="store_true", help="all rows as JSON")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    ProgramEngine.calibrate = calibrate
    study = STUDIES["smartwatch"]()
    rows = [row for s in asked.seeds for one in asked.subjects for row in measured(study, one, s, asked.rounds)]
    if asked.json:
        print(json.dumps(rows, indent=1))
        return
    kinds = ("labelled", "all", "all after", "as it is")
    print("| | " + " | ".join(kinds) + " |\n|---" + "|---" * len(kinds) + "|")
    for name in WAYS:
        for amount in AMOUNTS:
            mine = [row for row in rows if (row["way"], row["amount"]) == (name, amount)]
            cells = [f"{np.mean([r[k] for r in mine]):.4f}, {min(r[k] for r in mine):.3f}" for k in kinds]
            print(f"| {name}, {amount} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
