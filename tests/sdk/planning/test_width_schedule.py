"""Chains of widths: nested, in whole blocks, and by worth the cheapest loss first."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from talaria.errors import ConfigError, ModelError
from talaria.model.spec import ModelSpec
from talaria.planning import planner, width_schedule
from talaria.planning.budget import Budget
from talaria.planning.latency_model import Cost
from talaria.planning.layer_stats import anatomy
from talaria.planning.profile import Profile
from talaria.tensors import Array

IMU = ModelSpec("imu_cnn", (6, 100), 7)
PARTS = anatomy(IMU)
SIZES = PARTS.layout.sizes


def _worth(seed: int) -> dict[str, Array]:
    draws = np.random.default_rng(seed)
    return {g: draws.random(n) ** 2 for g, n in SIZES.items()}


@settings(max_examples=10, deadline=None)
@given(block=st.sampled_from([8, 16, 24]), seed=st.integers(0, 100))
def test_every_cut_gives_up_one_block_of_one_group_down_to_one_block_each(block: int, seed: int) -> None:
    chain = width_schedule.by_worth(PARTS, block, _worth(seed), PARTS.products)
    assert chain[0] == SIZES
    for before, after in pairwise(chain):
        (group,) = (g for g in SIZES if before[g] != after[g])
        assert 0 < before[group] - after[group] <= block
        assert after[group] % block == 0
    assert chain[-1] == {g: min(n, block) for g, n in SIZES.items()}


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 1000))
def test_each_step_is_the_best_of_all_steps(seed: int) -> None:
    """Against the plain greedy search that weighs every group at every step."""
    worth, block = _worth(seed), 16
    ordered = {g: np.sort(worth[g]) for g in SIZES}
    now = dict(SIZES)
    for after in width_schedule.by_worth(PARTS, block, worth, PARTS.products)[1:]:

        def ratio(group: str, now: dict[str, int] = now) -> float:
            less = now[group] - block
            given_up = float(ordered[group][SIZES[group] - now[group] : SIZES[group] - less].sum())
            return given_up / (PARTS.products(now) - PARTS.products({**now, group: less}))

        (taken,) = (g for g in SIZES if now[g] != after[g])
        assert ratio(taken) <= min(ratio(g) for g in SIZES if now[g] > block) * (1 + 1e-9)
        now = dict(after)


def test_a_plan_by_worth_spares_what_matters_and_says_so(profile: Profile, cost: Cost) -> None:
    """Two groups of one size: the one whose channels are worth a thousand times more loses later."""
    budget, worth = Budget(latency_ratio=0.7), {g: np.full(n, 1e9) for g, n in SIZES.items()}
    first, second = [g for g, n in SIZES.items() if n == 128]
    for dear, cheap in ((first, second), (second, first)):
        made = planner.plan(
            IMU, budget, profile, cost, worth={**worth, dear: 1e-6 * worth[dear], cheap: 1e-9 * worth[cheap]}
        )
        kept = {**SIZES, **made.widths}
        assert kept[dear] > kept[cheap]
        assert made.predicted["latency_ratio"] <= 0.7
        assert "worth least" in made.reasons["widths"]
        assert all(w % profile.block == 0 for w in made.widths.values())
    assert planner.plan(IMU, Budget(), profile, worth=worth).widths == {}
    dense = planner.plan(IMU, Budget(), profile).predicted["bundle_mb"]
    assert planner.plan(IMU, Budget(bundle_mb=0.3 * dense), profile, worth=worth).widths  # products are the price


def test_an_even_plan_is_weighed_again_and_all_else_stays(profile: Profile, cost: Cost) -> None:
    for budget in (Budget(latency_ratio=0.7), Budget(latency_ratio=0.8, upload_mb=0.01, train_memory_mb=3)):
        even = planner.plan(IMU, budget, profile, cost)
        again = planner.weighed(IMU, budget, even, profile, cost, _worth(0))
        assert again.widths
        assert again.widths != even.widths
        assert again.predicted["latency_ratio"] <= (budget.latency_ratio or 1)
        for name in ("adapter", "rank", "trained", "batch", "accumulate", "precision", "codec"):
            assert getattr(again, name) == getattr(even, name), name
    whole = planner.plan(IMU, Budget(), profile)
    assert planner.weighed(IMU, Budget(), whole, profile, None, _worth(0)) is whole
    with pytest.raises(ConfigError, match="another budget"):
        planner.weighed(IMU, Budget(latency_ratio=1e-4), even, profile, cost, _worth(0))


def test_scores_of_another_model_are_refused(profile: Profile, cost: Cost) -> None:
    for wrong in ({}, {"conv1": np.ones(64)}, {**_worth(0), "conv1": np.ones(63)}):
        with pytest.raises(ModelError, match="do not fit"):
            planner.plan(IMU, Budget(latency_ratio=0.7), replace(profile, block=8), cost, worth=wrong)
