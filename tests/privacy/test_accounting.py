"""Epsilon against dp-accounting's own cases and accountants; test_audit.py attacks it."""

import math
from statistics import NormalDist

import numpy as np
import pytest

from talaria.errors import AggregationError, ConfigError, StateError
from talaria.privacy.accounting import KEY, Ledger, epsilon, ledger_in, noise_for


def test_the_gaussian_of_dp_accountings_own_tests() -> None:
    # pld_privacy_accountant_test.test_gaussian_basic: noise sqrt(3), three times, is (1, 0.126936).
    assert epsilon(math.sqrt(3), 3, 0.126936) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize(("budget", "delta"), [(2.0, 1e-4), (0.5, 1e-6), (8.0, 1e-5)])
def test_the_gaussian_of_pfl_researchs_tests(budget: float, delta: float) -> None:
    """Its tests/privacy hold one Gaussian (epsilon 2, delta 1e-4) to the least delta in closed form, as this does."""
    sigma, phi = noise_for(budget, 1, delta), NormalDist().cdf
    least = phi(0.5 / sigma - budget * sigma) - math.exp(budget) * phi(-0.5 / sigma - budget * sigma)
    assert least == pytest.approx(delta, rel=1e-6)


@pytest.mark.parametrize(("noise", "rounds", "delta"), [(0.7, 1, 1e-5), (1.0, 4, 1e-3), (6.0, 30, 1e-5)])
def test_it_is_what_the_accountants_come_to(noise: float, rounds: int, delta: float) -> None:
    import dp_accounting  # here: every process that runs tests would pay a second and a half for it
    from dp_accounting import pld, rdp

    event = dp_accounting.GaussianDpEvent(noise)
    exact = epsilon(noise, rounds, delta)
    relation = dp_accounting.NeighboringRelation.REPLACE_SPECIAL
    by_pld = pld.PLDAccountant(relation).compose(event, rounds).get_epsilon(delta)
    assert exact == pytest.approx(by_pld, rel=1e-3)
    assert exact <= rdp.RdpAccountant().compose(event, rounds).get_epsilon(delta)


@pytest.mark.parametrize(("budget", "rounds"), [(0.5, 1), (8.0, 30), (1.0, 1000)])
def test_the_noise_is_the_least_that_keeps_the_budget(budget: float, rounds: int) -> None:
    noise = noise_for(budget, rounds, 1e-5)
    assert epsilon(noise, rounds, 1e-5) <= budget
    assert epsilon(noise * 0.999, rounds, 1e-5) > budget


def test_each_device_pays_for_the_rounds_that_it_was_counted_in() -> None:
    ledger = Ledger(2.0, 1e-5)
    assert ledger.epsilon == 0
    for cohort in (("anna", "bela"), ("anna",), ("bela",), ("anna",)):
        ledger = ledger.after(cohort)
    assert ledger.rounds == {"anna": 3, "bela": 2}
    assert ledger.version == 4
    assert ledger.epsilon == epsilon(2.0, 3, 1e-5)
    assert ledger_in({"inner/" + KEY: ledger.as_tensors()[KEY]}) == ledger
    ledger.require(ledger.epsilon)
    with pytest.raises(AggregationError, match="not opened"):
        ledger.require(ledger.epsilon * 0.99)
    assert ledger_in({}) is None
    with pytest.raises(StateError, match="damaged"):
        ledger_in({KEY: np.zeros(3, np.uint8)})


def test_without_noise_nothing_is_promised() -> None:
    assert epsilon(0.0, 1, 1e-5) == math.inf
    with pytest.raises(AggregationError, match="inf"):
        Ledger(0.0, 1e-5).after(["anna"]).require(100.0)


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "dp_accounting", None)
    with pytest.raises(ConfigError, match=r"talaria\[privacy\]"):
        epsilon(1.0, 1, 1e-5)


@pytest.mark.parametrize(
    ("noise", "rounds"), [(4.0, {"anna": 12, "bela": 4}), (1.0, {"anna": 1, "bela": 1}), (2.0, None)]
)
def test_what_was_counted_with_another_noise_costs_no_less_in_rounds_with_this_one(noise, rounds) -> None:
    ledger = Ledger(2.0, 1e-5).after(["anna", "bela"]).after(["anna"]).after(["anna"])
    now = ledger.at(noise, 1e-5)
    assert (dict(now.rounds), now.version) == (rounds or dict(ledger.rounds), 3)
    assert now.epsilon >= ledger.epsilon * (1 - 1e-9)
    assert Ledger(0.0, 1e-5).after(["anna"]).at(noise, 1e-5).rounds == {}, "what had none is covered by nothing"
