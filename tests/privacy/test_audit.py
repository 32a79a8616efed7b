"""No more shows of one device than the ledger claims; each flaw put back shows more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from talaria.privacy import rule
from talaria.privacy.accounting import Ledger
from talaria.privacy.forms import FORMS
from talaria.privacy.rule import Privacy, PrivateMean
from talaria.tensors import Tensors
from talaria_bench.audit import Audit, audited


def attacked(
    noise_by: str = "coordinator",
    noise: float = 1.0,
    rounds: int = 1,
    trials: int = 1500,
    quantile: float | None = None,
) -> Audit:
    """With four devices, all of whom must hold a value."""
    asked = Privacy(clip=0.5, noise=noise, holders=4, noise_by=noise_by, quantile=quantile)
    return audited(asked, rounds=rounds, trials=trials)


@pytest.mark.parametrize("quantile", [None, 0.5])
@pytest.mark.parametrize("noise_by", FORMS)
def test_no_more_shows_than_is_claimed_and_not_much_less(noise_by: str, quantile: float | None) -> None:
    found = attacked(noise_by, quantile=quantile)
    assert found.claimed == pytest.approx(4.377, abs=1e-3)
    assert 0.4 * found.claimed < found.shown <= found.claimed


def half_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    right = PrivateMean._deviation
    monkeypatch.setattr(PrivateMean, "_deviation", lambda self, *words: right(self, *words) / 2)


def no_clipping(monkeypatch: pytest.MonkeyPatch) -> None:
    def as_they_are(steps: Tensors, norm: float) -> Tensors:
        return steps

    monkeypatch.setattr(rule, "clipped", as_they_are)
    monkeypatch.setattr(PrivateMean, "_require_within", lambda *words: None)  # it would not use such a sum


def a_ledger_that_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Ledger.after

    def after(self: Ledger, devices: list[str]) -> Ledger:
        new = right(self, devices)
        return new if new.version % 4 == 1 else Ledger(new.noise, new.delta, self.rounds, new.version)

    monkeypatch.setattr(Ledger, "after", after)


@pytest.mark.parametrize(
    ("flaw", "asked"),
    [
        (half_the_noise, {}),
        (half_the_noise, {"noise_by": "devices"}),
        (no_clipping, {"trials": 200}),
        (a_ledger_that_forgets, {"noise": 2.0, "rounds": 4, "trials": 1000}),
    ],
)
def test_a_flaw_shows(
    flaw: Callable[[pytest.MonkeyPatch], None], asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    flaw(monkeypatch)
    found = attacked(**asked)
    assert found.shown > found.claimed
    assert not found.kept
