"""``talaria bench audit``: what somebody who sees every model can find out of one device, beside what is claimed.

The rule is the one that fleets and simulations use. A canary takes part in each round or sends zeros in its place, and
sends more than it may: one direction, ten times as long as ``clip``. Whoever knows that direction adds up how far the
models moved along it. From how often a threshold tells the two apart follows, with Clopper and Pearson's intervals, a
lower bound on the mu of a Gaussian trade-off, and so on epsilon (Nasr et al., "Tight Auditing of Differentially Private
Machine Learning", USENIX Security 2023). A bound above the claim means that noise, clipping or ledger are wrong.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Annotated

import numpy as np
import typer

from talaria import seeds
from talaria.aggregate.masked import MaskedMean
from talaria.privacy import accounting
from talaria.privacy.accounting import ledger_in
from talaria.privacy.rule import Privacy, private
from talaria.tensors import Array, Tensors
from talaria.types import Update
from talaria_bench import bars

COMPANY, SIZE = 3, 16
"""Devices beside the canary, and the model's values."""
LONGER = 10.0
SURE = 1e-6
"""How likely a right rule is accused."""


def audit(
    noise: Annotated[float, typer.Option(help="Standard deviation of the noise, in lengths of clip.", min=0.1)] = 2.0,
    rounds: Annotated[int, typer.Option(help="Rounds that the canary is in.", min=1, max=1000)] = 4,
    trials: Annotated[int, typer.Option(help="Runs with the canary, and as many without.", min=100)] = 5000,
    plot: Annotated[Path | None, typer.Option(help="Draw both epsilons here, as SVG.", callback=bars.place)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Attack the noise of private rounds with a canary: no more epsilon may show than is claimed."""
    found = audited(Privacy(clip=1.0, noise=noise), rounds, trials)
    if plot is not None:
        both = {"claimed": found.claimed, "shows": found.shown}
        bars.draw({f"{rounds} rounds": both}, f"epsilon at {found.delta:g}", plot)
    if as_json:
        typer.echo(json.dumps(asdict(found) | {"kept": found.kept}, indent=1))
    else:
        typer.echo(
            f"claimed epsilon {found.claimed:.3f} at delta {found.delta:g}, {found.shown:.3f} shows in {trials} runs"
        )
    raise typer.Exit(0 if found.kept else 1)


@dataclass(frozen=True)
class Audit:
    """What a ledger claims, and what shows at least but with probability :data:`SURE`; both at ``delta``."""

    claimed: float
    shown: float
    delta: float
    false_alarms: int
    missed: int
    trials: int

    @property
    def kept(self) -> bool:
        """Whether no more shows than is claimed."""
        return self.shown <= self.claimed


def audited(privacy: Privacy, rounds: int, trials: int) -> Audit:
    """Play ``trials`` runs with the canary and as many without. Who sees them says that it was there where the models
    moved by more than half of what it may add."""
    scores = np.array([[_score(privacy, rounds, n, there) for n in range(trials)] for there in (False, True)])
    claimed = _claim(privacy, rounds)
    false_alarms, missed = int((scores[0] > rounds / 2).sum()), int((scores[1] <= rounds / 2).sum())
    mu = -_z(_most(false_alarms, trials)) - _z(_most(missed, trials))
    shown = accounting.epsilon(1 / mu, 1, privacy.delta) if mu > 0 else 0.0
    return Audit(claimed, shown, privacy.delta, false_alarms, missed, trials)


def _score(privacy: Privacy, rounds: int, trial: int, there: bool) -> float:
    """How far one run's models moved along the canary's direction, in lengths of clip."""
    model, _ = _run(privacy, rounds, trial, there)
    return float((COMPANY + 1) * model["w"].astype(np.float64) @ _direction() / (privacy.clip or 1.0))


def _claim(privacy: Privacy, rounds: int) -> float:
    _, state = _run(privacy, rounds, 0, True)
    ledger = ledger_in(state)
    assert ledger is not None
    return ledger.epsilon


def _run(privacy: Privacy, rounds: int, trial: int, there: bool) -> tuple[Tensors, Tensors]:
    rule = private(MaskedMean(weighting="uniform"), privacy, seeds.seed_of(trial, "", int(there), "canary"))
    model: Tensors = {"w": np.zeros(SIZE, np.float32)}
    state = rule.init(model)
    for round in range(rounds):
        model, state = rule.apply(model, state, _updates(privacy, round, there))
    return model, state


def _updates(privacy: Privacy, round: int, there: bool) -> list[Update]:
    """Those of a round: the canary's first."""
    canary = _direction() * (LONGER * (privacy.clip or 1.0) if there else 0.0)
    steps = [canary] + [np.zeros(SIZE)] * COMPANY
    return [
        Update({"w": step.astype(np.float32)}, 1.0, f"device-{n}", kind="delta", base_version=round)
        for n, step in enumerate(steps)
    ]


def _direction() -> Array:
    return np.full(SIZE, SIZE**-0.5)


def _most(count: int, of: int) -> float:
    """The upper end of Clopper and Pearson's interval for ``count`` out of ``of``."""
    from scipy.stats import beta  # type: ignore[import-untyped]  # dp-accounting brings it

    return float(beta.ppf(1 - SURE / 2, count + 1, of - count)) if count < of else 1.0


def _z(share: float) -> float:
    return NormalDist().inv_cdf(min(max(share, 1e-300), 1 - 1e-16))
