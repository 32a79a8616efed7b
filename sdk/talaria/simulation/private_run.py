"""What privacy asks of a simulated run, and what it came to."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from talaria.errors import ConfigError
from talaria.federated import rounds
from talaria.federated.private_rule import require_private, with_noise
from talaria.federated.run import Run
from talaria.foreign import shown
from talaria.privacy.accounting import epsilon, ledger_in
from talaria.privacy.clipping import clip_in
from talaria.privacy.forms import FORMS
from talaria.privacy.rule import Privacy, threshold_of
from talaria.tensors import Tensors


def settled(run: Run, asked: Privacy | Mapping[str, Any] | None, clients: Sequence[str], over: float) -> Privacy | None:
    """The privacy of ``run``, with the noise that its budget needs; None where nothing is asked for.

    The noise is the least with which the device that is drawn most often stays within the budget. Raises
    :class:`ConfigError` where the run cannot keep to it, also where the noise that is given spends the budget before
    the last round: what was learned until then would not be measured.
    """
    if asked is None or (isinstance(asked, Mapping) and not asked):
        return None
    if not isinstance(asked, Privacy | Mapping):
        raise ConfigError(f"simulate: privacy={shown(asked)} must be a Privacy, or a table of its settings")
    privacy = asked if isinstance(asked, Privacy) else Privacy.of(asked)
    require_private(run, privacy)
    asked_for = rounds.needed(run, len(clients))
    if asked_for < (least := max(3, threshold_of(privacy, asked_for))):
        more = "raise fraction" if run.fraction < 1 else "take more clients"
        lower = "" if privacy.threshold is None else ", or lower threshold"
        raise ConfigError(
            f"privacy: a round asks {asked_for} of {len(clients)} clients (fraction={run.fraction:g}), and {least} "
            f"must be there to hide each other; {more}{lower}"
        )
    budget = privacy.epsilon
    if over or budget is None:  # who counts is not known beforehand
        return with_noise(privacy, run.rounds)
    often = _most_often(run, clients)
    privacy = with_noise(privacy, often[-1])
    noise = privacy.noise or 0.0
    kept = bisect_right(often, budget, key=lambda count: epsilon(noise, count, privacy.delta))
    if kept < run.rounds:
        mend = f"set rounds={kept}, more noise or a larger epsilon" if kept else "set more noise or a larger epsilon"
        raise ConfigError(
            f"privacy: noise={noise:g} keeps epsilon={budget:g} for {kept} of rounds={run.rounds}; "
            f"{mend}, or leave noise out: it is then the least that keeps all rounds"
        )
    return privacy


def figures(privacy: Privacy | None, server: Tensors) -> dict[str, Any] | None:
    """What a run with ``privacy`` came to, from the server's state: settings, and epsilon as it was spent."""
    if privacy is None:
        return None
    out: dict[str, Any] = {"secure": privacy.secure, "bits": privacy.bits, "clip": privacy.clip}
    if privacy.quantile is not None:
        out["clip_now"] = clip_in(server)
    ledger = ledger_in(server)
    if ledger is None:
        return out
    most = max(ledger.rounds.values(), default=0)
    spent = ledger.epsilon if ledger.noise else None
    return out | {
        "noise": ledger.noise,
        "delta": ledger.delta,
        "epsilon": spent,
        "budget": privacy.epsilon,
        "rounds_of_one_device": most,
        "form": FORMS[privacy.noise_by],
        "covers": "what updates say, not the masks that devices choose",
    }


def _most_often(run: Run, clients: Sequence[str]) -> list[int]:
    """How often, until each round, the run's cohorts ask the client that they ask most often."""
    asked, most = Counter[str](), list[int]()
    for round in range(1, run.rounds + 1):
        asked.update(rounds.cohort(run, round, clients))
        most.append(max(asked.values()))
    return most
