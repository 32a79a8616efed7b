"""One fold: the rounds of a fleet without one subject, and what each way is worth to that subject's people.

What was learned and what was measured are files, each under the digest of all that decides it, so that a bench that was
cut short, or that is asked for one way more, goes on where it stood.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from talaria import durable
from talaria.data.federated import Federated
from talaria.federated import rounds as both_sides
from talaria.federated.run import Engine, Member, Run
from talaria.simulation.experiment import prepare
from talaria.simulation.run import members_of, simulate
from talaria.tensors import Tensors
from talaria.training import evaluation
from talaria.types import Samples
from talaria.wire import strict_safetensors
from talaria_bench.people.studies import Study, Way

ENGINE: Engine = "onnx"
"""Who trains: with models as small as these its graphs are the quicker engine."""
MOST = 1 << 10
"""Tensors of a fleet's file."""


def fold(
    study: Study,
    folder: Path,
    subject: int | str,
    seed: int,
    rounds: int,
    tell: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """A row for each way, amount of labels and person of ``subject``: ``scores`` (the task's two figures on the test
    windows), ``parameters`` of the model that was served, ``labels`` (how many labelled samples there were).

    ``folder`` keeps the files; ``tell`` is given a line for whatever had to be computed.
    """
    place = folder / study.data / f"seed-{seed}"
    place.mkdir(parents=True, exist_ok=True)
    data: dict[str, Federated] = {}
    rows = []
    for way in study.ways:
        facts = {"study": study.facts(way, rounds), "subject": subject, "seed": seed}
        path = place / f"{subject}-{way.method}-{_digest(facts)}.json"
        if path.exists():
            rows += json.loads(path.read_bytes())["rows"]
            continue
        data = data or {amount: study.load(subject, amount) for amount in study.amounts}
        found = _measured(study, way, data, place, subject, seed, rounds)
        durable.write(path, json.dumps({**facts, "rows": found}, sort_keys=True).encode(), mode=0o644)
        tell(f"{study.data}, seed {seed}, without {subject}: {way.method}, {way.name}")
        rows += found
    return rows


def _measured(
    study: Study, way: Way, data: dict[str, Federated], place: Path, subject: int | str, seed: int, rounds: int
) -> list[dict[str, Any]]:
    rows = []
    first = next(iter(data.values()))
    run, shared = _fleet(study, way, first, place, subject, seed, rounds)
    for amount, one in data.items():
        if amount not in (way.amounts or data):
            continue
        for name, person in one.newcomers.items():
            member = Member(name, person.train, person.val, study.plan if way.small else None, ENGINE)
            if shared is None:
                alone = replace(member, train=Samples.joined([member.train, member.val]))
                model = simulate(run, {name: alone}).personal(alone)
            else:
                model = both_sides.personalize(run, member, shared, None)
            found = evaluation.evaluate(model, person.test, task=one.task)
            rows.append(
                {
                    "method": way.method,
                    "way": way.name,
                    "amount": amount,
                    "subject": str(subject),
                    "person": name,
                    "seed": seed,
                    "labels": len(person.train) + len(person.val),
                    "scores": [found.accuracy, found.macro_recall],
                    "parameters": sum(weight.numel() for weight in model.parameters()),
                }
            )
    return rows


def _fleet(
    study: Study, way: Way, data: Federated, place: Path, subject: int | str, seed: int, rounds: int
) -> tuple[Run, Tensors | None]:
    """The run by which the newcomers are served, and what the fleet learned; nothing where one learns alone."""
    if way.learns is None:
        return _run(study, way, data, seed, 1, recipe={"epochs": way.epochs}), None
    run = _run(study, way, data, seed, rounds)
    served = replace(run, algorithm=way.serves, hparams={**run.hparams, **way.options})
    facts = {"study": study.rounds_facts(way, rounds), "subject": subject, "seed": seed}
    path = place / f"{subject}-fleet-{_digest(facts)}.safetensors"
    if not path.exists():
        plans = dict.fromkeys(data.clients, study.plan) if way.small else {}
        learned = simulate(run, members_of(data.clients, plans, ENGINE))
        durable.write(path, strict_safetensors.pack(learned.shared), mode=0o644)
    entries, _ = strict_safetensors.unpack(path.read_bytes(), most=MOST)
    return served, {name: entry.array() for name, entry in entries.items()}


def _run(study: Study, way: Way, data: Federated, seed: int, rounds: int, **more: Any) -> Run:
    learns = way.learns or "local"
    buffers = study.dense_buffers if learns == "fedavg" else "local"
    options = way.rounds_options
    return prepare(learns, data, rounds=rounds, seed=seed, options=options, buffers=buffers, engine=ENGINE, **more).run


def _digest(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
