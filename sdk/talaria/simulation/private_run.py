"""What privacy asks of a simulated run, and what it came to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from talaria.errors import ConfigError
from talaria.federated import rounds
from talaria.federated.private_rule import require_private, with_noise
from talaria.federated.run import Run
from talaria.foreign import shown
from talaria.privacy.accounting import ledger_in
from talaria.privacy.clipping import clip_in
from talaria.privacy.forms import FORMS
from talaria.privacy.rule import Privacy
from talaria.tensors import Tensors


def settled(run: Run, asked: Privacy | Mapping[str, Any] | None, clients: Sequence[str], over: float) -> Privacy | None:
    """The privacy of ``run``, with the noise that its budget needs; None where nothing is asked for.

    The noise is the least with which the device that is drawn most often stays within the budget. Raises
    :class:`ConfigError` where the run cannot keep to it.
    """
    if asked is None or (isinstance(asked, Mapping) and not asked):
        return None
    if not isinstance(asked, Privacy | Mapping):
        raise ConfigError(f"simulate: privacy={shown(asked)} must be a Privacy, or a table of its settings")
    privacy = asked if isinstance(asked, Privacy) else Privacy.of(asked)
    require_private(run, privacy)
    return with_noise(privacy, run.rounds if over or privacy.epsilon is None else _most_often(run, clients))


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


def _most_often(run: Run, clients: Sequence[str]) -> int:
    """Rounds of the client that the run's cohorts ask most often."""
    if run.fraction == 1:
        return run.rounds
    asked = Counter(name for round in range(1, run.rounds + 1) for name in rounds.cohort(run, round, clients))
    return max(asked.values())
