"""Robust rules against vectors worked by hand, and each flaw that other code is known for."""

import math

import numpy as np
import pytest
import torch
from tolerance import roundings

from talaria.aggregate.masked import MaskedMean
from talaria.aggregate.robust.bucketing import Bucketed, bucketed, permutation, shuffled
from talaria.aggregate.robust.centered_clipping import CenteredClip
from talaria.aggregate.robust.geometric_median import RFA, distances, middle, objective
from talaria.aggregate.robust.krum import Krum, MultiKrum, scores, squared_distances
from talaria.aggregate.robust.median import Median, TrimmedMean
from talaria.aggregate.robust.stacked_updates import RowRule, gather
from talaria.errors import AggregationError, ConfigError
from talaria.model.masks import ChannelLayout, ChannelMask
from talaria.tensors import Array, Tensors
from talaria.types import Update


def array(values: object) -> Array:
    return np.array(values, np.float32)


OLD = [7.0, 7.0, 7.0]


def plain(*rows: list[float], weights: list[float] | None = None) -> list[Update]:
    """One tensor ``w`` per client, float64."""
    w = weights or [1.0] * len(rows)
    return [
        Update({"w": np.array(r, np.float64)}, weight=a, client=f"c{i:02d}")
        for i, (r, a) in enumerate(zip(rows, w, strict=True))
    ]


def zeros(n: int) -> Tensors:
    return {"w": np.zeros(n)}


def run(rule: RowRule | MaskedMean | Bucketed, updates: list[Update], shared: Tensors | None = None) -> list[float]:
    shared = shared or zeros(updates[0].tensors["w"].size)
    new, _ = rule.apply(shared, rule.init(shared), updates)
    out: list[float] = new["w"].tolist()
    return out


@pytest.fixture
def four() -> tuple[Tensors, list[Update]]:
    """Four clients, three coordinates; the last one is kept by the first two clients only."""
    layout = ChannelLayout({"g": 3}, {"w": ((("g", 1),),)})
    rows = [[1.0, 2.0, 3.0], [2.0, 4.0, 9.0], [3.0, 60.0], [100.0, 6.0]]
    updates = [
        Update({"w": array(r)}, weight=1, client=f"c{i}", mask=ChannelMask(layout, {"g": tuple(range(len(r)))}))
        for i, r in enumerate(rows)
    ]
    return {"w": array(OLD)}, updates


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (MaskedMean(), [26.5, 18, 6]),
        (Median(f=0), [2.5, 5, 6]),
        (TrimmedMean(f=1, min_holders=1), [2.5, 5, 6]),
        (Median(f=0, keep="all"), [2.5, 5, 7]),
        (TrimmedMean(f=1, keep="all"), [2.5, 5, 7]),
        (Median(f=1), [2.5, 5, 7]),
        (Median(f=0, min_holders=3), [2.5, 5, 7]),
        (TrimmedMean(f=1), [2.5, 5, 7]),
    ],
)
def test_masked_rules_by_hand(
    four: tuple[Tensors, list[Update]], rule: RowRule | MaskedMean, expected: list[float]
) -> None:
    shared, updates = four
    assert run(rule, updates, shared) == expected


def test_keep_all_says_which_channels_moved(four: tuple[Tensors, list[Update]]) -> None:
    shared, updates = four
    new, _ = Median(f=0, keep="all").apply(shared, {}, updates)
    assert new["mask/g"].tolist() == [1, 1, 0]


@pytest.mark.parametrize("rule", [Median(), TrimmedMean(), MultiKrum(), RFA(), CenteredClip()])
def test_a_sole_keeper_does_not_own_its_coordinate(rule: RowRule) -> None:
    """Without a support rule the median and RFA both return the attacker's 1e6."""
    layout = ChannelLayout({"g": 2}, {"w": ((("g", 1),),)})
    both, one = ChannelMask(layout, {"g": (0, 1)}), ChannelMask(layout, {"g": (0,)})
    honest = [Update({"w": array([1.0])}, weight=1, client=f"h{i}", mask=one) for i in range(5)]
    liar = Update({"w": array([1.0, 1e6])}, weight=1, client="x", mask=both)
    assert run(rule, [*honest, liar], {"w": array([0.0, 0.25])}) == [1.0, 0.25]


def test_krum_by_hand() -> None:
    updates = plain([0, 0], [1, 0], [0, 1], [1, 1], [10, 10])
    rows = gather(zeros(2), updates).rows
    assert scores(squared_distances(rows), 2).tolist() == [2, 2, 2, 2, 343]
    assert run(Krum(f=1), updates) == [0, 0]
    assert run(MultiKrum(f=1, m=4), updates) == [0.5, 0.5]
    assert run(MultiKrum(f=1), updates) == [0.5, 0.5], "m is n - f by default, and the mean, not the sum"


def test_krum_ties_go_to_the_first_name() -> None:
    updates = plain([1, 1], [0, 0], [1, 0], [0, 1], [10, 10])
    names = ["e", "d", "c", "b", "a"]
    renamed = [u.but(client=n) for u, n in zip(updates, names, strict=True)]
    assert run(Krum(f=1), renamed) == [0, 1], "all four have score 2; 'b' is first by name"


def test_krum_sums_squared_distances_once() -> None:
    """Fourth powers would choose row 3 (score 34 against 36), squares choose row 4 (8 against 10)."""
    updates = plain([0.0], [1.0], [3.0], [8.0], [4.0])
    d = [[(a - b) ** 2 for b in (0, 1, 3, 8, 4)] for a in (0, 1, 3, 8, 4)]
    assert squared_distances(gather(zeros(1), updates).rows).tolist() == d
    by_squares = min(range(5), key=lambda i: sum(sorted(d[i])[1:3]))
    assert run(Krum(f=1), updates) == updates[by_squares].tensors["w"].tolist()
    g = np.random.default_rng(0)
    differs = 0
    for _ in range(200):
        x = g.standard_normal((9, 5))
        s = np.square(x[:, None] - x[None]).sum(2)
        want = int(np.sort(s, 1)[:, 1:7].sum(1).argmin())
        fourth = int(np.sort(np.square(s), 1)[:, 1:7].sum(1).argmin())
        differs += want != fourth
        assert run(Krum(f=1), plain(*x.tolist())) == x[want].tolist()
    assert differs > 5


@pytest.mark.parametrize("f", [1, 2])
def test_krum_needs_two_f_plus_three_rows(f: int) -> None:
    enough = [[float(i)] for i in range(2 * f + 3)]
    run(Krum(f=f), plain(*enough))
    with pytest.raises(AggregationError, match=rf"got {2 * f + 2} rows and needs {2 * f + 3}"):
        run(Krum(f=f), plain(*enough[:-1]))
    with pytest.raises(AggregationError, match=r"got 7 rows and needs 8 .* \(of multi_krum also m\)"):
        run(MultiKrum(f=2, m=6), plain(*[[float(i)] for i in range(7)]))
    assert run(MultiKrum(f=2, m=6), plain(*[[float(i)] for i in range(8)])) == [3.5]


def test_krum_compares_only_what_both_hold() -> None:
    layout = ChannelLayout({"g": 4}, {"w": ((("g", 1),),)})
    kept = [(0, 1, 2, 3), (0, 1), (2, 3), (0, 2, 3)]
    dense = array([[1.0, 2, 3, 4], [2, 4, 0, 0], [0, 0, 3, 5], [0, 0, 1, 1]])
    updates = [
        Update({"w": dense[i, list(k)]}, weight=1, client=str(i), mask=ChannelMask(layout, {"g": k}))
        for i, k in enumerate(kept)
    ]
    d = squared_distances(gather({"w": np.zeros(4, np.float32)}, updates).rows)
    assert d[0, 1] == 4 / 2 * (1 + 4)
    assert d[0, 2] == 4 / 2 * 1
    assert d[1, 2] == math.inf, "nothing in common"
    assert d[1, 3] == 4 / 1 * 4
    assert np.array_equal(d, d.T)


def test_krum_refuses_rows_with_nothing_in_common() -> None:
    layout = ChannelLayout({"g": 5}, {"w": ((("g", 1),),)})
    apart = [
        Update({"w": np.ones(1, np.float32)}, weight=1, client=str(i), mask=ChannelMask(layout, {"g": (i,)}))
        for i in range(5)
    ]
    with pytest.raises(AggregationError, match="share enough coordinates"):
        run(Krum(f=1, min_holders=1), apart, {"w": np.zeros(5, np.float32)})


def test_multi_krum_leaves_what_none_of_the_chosen_holds() -> None:
    layout = ChannelLayout({"g": 2}, {"w": ((("g", 1),),)})
    thin, wide = ChannelMask(layout, {"g": (0,)}), ChannelMask(layout, {"g": (0, 1)})
    rows = [([0.0], thin), ([0.1], thin), ([0.2], thin), ([50.0, 9.0], wide), ([60.0, 9.0], wide), ([70.0, 9.0], wide)]
    updates = [Update({"w": array(v)}, weight=1, client=str(i), mask=m) for i, (v, m) in enumerate(rows)]
    new = run(MultiKrum(f=1, m=3), updates, {"w": array([5.0, 0.25])})
    assert new == pytest.approx([0.1, 0.25])


def test_rfa_by_hand() -> None:
    assert run(RFA(f=1), plain([0], [1], [10])) == pytest.approx([1.0], abs=1e-5)
    points = plain([0, 0], [4, 0], [0, 3])
    z = run(RFA(f=1, steps=200, tol=0), points)
    assert z == pytest.approx([0.695789, 0.751176], abs=1e-5)
    far = distances(gather(zeros(2), points).rows, {"w": np.array(z)})
    assert float(far.sum()) == pytest.approx(math.sqrt(25 + 12 * math.sqrt(3)), abs=1e-9)


@pytest.mark.parametrize("steps", [32, 500])
def test_rfa_leaves_a_row_that_is_not_the_median(steps: int) -> None:
    """The coordinate median (0, 0, 0) is a row, and the plain iteration would stick to it."""
    points = [[0.0, 0, 0], [1.0, 0, 0], [0, 1.0, 0], [0, 0, 1.0], [1.0, 1, 1], [-0.1, -0.1, -0.1], [0.0, -0.1, 0.9]]
    start = run(Median(f=0), plain(*points))
    assert start in points
    z = run(RFA(f=1, steps=steps, tol=0), plain(*points))
    total = lambda p: sum(math.dist(p, r) for r in points)
    from scipy.optimize import minimize

    best = minimize(total, [0.3, 0.2, 0.3], method="Nelder-Mead", options={"xatol": 1e-10, "fatol": 1e-12})
    assert total(z) < total(start) - 1e-3
    assert total(z) == pytest.approx(best.fun, rel=1e-4 if steps == 32 else 1e-9)


def test_rfa_equals_a_general_optimizer() -> None:
    x = np.random.default_rng(3).standard_normal((9, 4))
    z = run(RFA(f=1, steps=500, tol=0), plain(*x.tolist()))
    from scipy.optimize import minimize

    want = minimize(lambda p: sum(math.dist(p, r) for r in x.tolist()), x.mean(0), method="BFGS", tol=1e-12)
    assert z == pytest.approx(want.x.tolist(), abs=1e-6)


def test_rfa_uses_weights_only_when_told() -> None:
    rows, weights = ([0.0], [1.0], [10.0]), [1.0, 1.0, 5.0]
    assert run(RFA(f=1), plain(*rows, weights=weights)) == pytest.approx([1.0], abs=1e-4)
    assert run(RFA(f=1, weighting="samples", steps=200), plain(*rows, weights=weights)) == pytest.approx(
        [10.0], abs=1e-3
    )


def test_rfa_objective_never_rises() -> None:
    x = np.random.default_rng(1).standard_normal((12, 6))
    x[:3] += 1e3
    updates = plain(*x.tolist())
    rows = gather(zeros(6), updates).rows
    ones = np.ones(12)
    start = {"w": np.array(run(Median(f=0), updates))}
    nu = 1e-6 * middle(distances(rows, start))
    last = math.inf
    for steps in range(1, 25):
        z = {"w": np.array(run(RFA(f=1, steps=steps, tol=0), updates))}
        now = objective(distances(rows, z), ones, nu)
        assert now <= last * (1 + 1e-14)
        last = now


def test_rfa_does_not_become_the_mean_when_updates_shrink() -> None:
    """An absolute smoothing of 0.1 is the mean for updates of 1e-6."""
    rows = [[0.0, 0.0], [1e-6, 0.0], [0.0, 1e-6], [1e-6, 1e-6], [9e-6, 9e-6]]
    small, large = run(RFA(f=1), plain(*rows)), run(RFA(f=1), plain(*[[a * 1e6 for a in r] for r in rows]))
    assert [a * 1e6 for a in small] == pytest.approx(large, rel=1e-6)
    mean = sum(r[0] for r in rows) / 5
    assert abs(small[0] - mean) > 1e-6


def test_centered_clip_by_hand() -> None:
    points = plain([0, 0], [6, 8], [-1, 0])
    textbook = CenteredClip(f=1, radius=5.0, start="previous")
    assert run(textbook, points) == pytest.approx([2 / 3, 4 / 3])
    assert run(CenteredClip(f=0, radius=1e9, start="previous"), points) == pytest.approx([5 / 3, 8 / 3]), "the mean"
    assert run(CenteredClip(f=0, radius=1e-12, start="previous"), points) == pytest.approx([0, 0], abs=1e-11)


def test_centered_clip_starts_where_it_last_stepped() -> None:
    rule = CenteredClip(f=0, radius=1.0, start="previous")
    shared = zeros(1)
    state = rule.init(shared)
    shared, state = rule.apply(shared, state, plain([5.0], [5.0]))
    assert shared["w"].tolist() == [1.0]
    assert state["centre/w"].tolist() == [1.0]
    shared, state = rule.apply(shared, state, plain([9.0], [9.0]))
    assert shared["w"].tolist() == [3.0], "start 1 + last step 1, then one radius further"
    assert state["centre/w"].tolist() == [2.0]


def test_centered_clip_radius_follows_the_updates() -> None:
    rows = [[0.0], [1e-8], [2e-8], [3e-8], [1e3]]
    assert run(CenteredClip(f=1), plain(*rows))[0] < 1e-7
    assert run(CenteredClip(f=1, radius=1.0), plain(*rows))[0] == pytest.approx(0.2, abs=1e-6), (
        "the floor of a fixed one"
    )


def test_trimmed_mean_survives_huge_outliers_in_float32() -> None:
    """The total minus the extremes gives 0.505 here."""
    honest = [0.1, -0.7, 0.3, -0.4, 0.2, -0.538]
    x = array([*honest, 1e12, 1e12, -1e12, -1e12])
    shared = {"w": np.zeros(1, np.float32)}
    updates = [Update({"w": v.reshape(1)}, weight=1, client=f"c{i}") for i, v in enumerate(x)]
    new, _ = TrimmedMean(f=2).apply(shared, {}, updates)
    assert roundings(new["w"], sum(honest) / 6, 1.0) <= 16


def test_trimmed_mean_cuts_what_it_says_it_cuts() -> None:
    rows = [[float(i)] for i in (0, 1, 2, 4, 100)]
    assert run(TrimmedMean(f=1), plain(*rows)) == pytest.approx([7 / 3])
    assert run(TrimmedMean(f=2), plain(*rows)) == [2.0]
    assert run(TrimmedMean(f=1, trim=2), plain(*rows)) == [2.0]
    with pytest.raises(AggregationError, match="needs 5"):
        run(TrimmedMean(f=2), plain(*rows[:4]))


@pytest.mark.parametrize(
    ("weights", "expected"), [([1, 1, 1, 1], 2.5), ([1, 1, 1, 5], 100.0), ([3, 1, 1, 1], 1.5), ([1, 5, 1, 1], 2.0)]
)
def test_weighted_median_by_hand(weights: list[float], expected: float) -> None:
    updates = plain([1.0], [2.0], [3.0], [100.0], weights=weights)
    assert run(Median(f=1, weighting="samples"), updates) == [expected]
    assert run(Median(f=1), updates) == [2.5]


def test_buckets_are_means_over_holders() -> None:
    layout = ChannelLayout({"g": 3}, {"w": ((("g", 1),),)})
    rows = [([1.0, 5.0], (0, 1)), ([3.0, 7.0], (0, 2)), ([9.0], (1,))]
    updates = [
        Update({"w": array(v)}, weight=i + 1, client=str(i), mask=ChannelMask(layout, {"g": k}))
        for i, (v, k) in enumerate(rows)
    ]
    table = gather({"w": np.zeros(3, np.float32)}, updates).rows
    two = bucketed(table, [0, 1, 2], 2)
    assert two.values["w"].tolist() == [[2, 5, 7], [0, 9, 0]]
    assert two.held["w"].tolist() == [[True, True, True], [False, True, False]]
    assert two.weights.tolist() == [3, 3]
    assert bucketed(table, [0, 1, 2], 2, whole=True).held["w"].tolist() == [[True, False, False], [False, True, False]]
    one = bucketed(table, [2, 0, 1], 1)
    assert np.array_equal(one.values["w"], table.values["w"][[2, 0, 1]])
    assert np.array_equal(one.held["w"], table.held["w"][[2, 0, 1]])


def test_buckets_are_secret_new_each_round_and_repeatable() -> None:
    rule, shared = Bucketed(inner=Median(f=1)), zeros(1)
    mine, other = rule.init(shared), rule.init(shared)
    assert not np.array_equal(mine["bucket/key"], other["bucket/key"])
    updates = plain(*[[float(i)] for i in range(10)])
    order = permutation(mine, 10)
    assert order != permutation(other, 10) or permutation(mine, 30) != permutation(other, 30)
    _, later = rule.apply(shared, mine, updates)
    assert np.array_equal(later["bucket/key"], mine["bucket/key"])
    assert permutation(later, 30) != permutation(mine, 30)
    np.random.seed(0)
    first = rule.apply(shared, mine, updates)[0]["w"]
    np.random.seed(1)
    again = rule.apply(shared, mine, updates)[0]["w"]
    assert np.array_equal(first, again), "the global generator plays no part"
    assert "seed" not in repr(Bucketed(inner=Median(), seed=1234))


@pytest.mark.parametrize("seed", [0, 1, 2**32 + 5, 2**63 - 1])
def test_buckets_are_those_that_torch_would_draw(seed: int) -> None:
    """Runs of before, whose buckets torch drew, go on with the same ones."""
    for n in (1, 2, 3, 10, 400, 3000):
        assert shuffled(n, seed) == torch.randperm(n, generator=torch.Generator().manual_seed(seed)).tolist()


def test_bucketed_krum_counts_buckets() -> None:
    rows = plain(*[[float(i)] for i in range(20)])
    run(Bucketed(inner=Krum(f=3), seed=0), rows)
    with pytest.raises(AggregationError, match=r"Krum\(f=4\) got 10 rows and needs 11"):
        run(Bucketed(inner=Krum(f=4), seed=0), rows)


def test_running_statistics_are_not_measured_with_weights() -> None:
    """Row 0 has odd statistics and good weights: it must stay in, and the statistics take the median."""
    shared = {"w": np.zeros(1, np.float32), "bn.running_var": np.ones(1, np.float32)}
    values = [(0.0, 1e6), (0.1, 1.0), (0.2, 2.0), (0.3, 3.0), (50.0, 4.0)]
    updates = [
        Update({"w": array([w]), "bn.running_var": array([v])}, weight=1, client=str(i))
        for i, (w, v) in enumerate(values)
    ]
    for rule in (MultiKrum(f=1, m=4), RFA(f=1), CenteredClip(f=1)):
        new, _ = rule.apply(shared, rule.init(shared), updates)
        assert new["bn.running_var"].item() == 3.0
        assert abs(new["w"].item()) < 1
    new, _ = MultiKrum(f=1, m=4).apply(shared, {}, updates)
    assert new["w"].item() == pytest.approx(0.15)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Median(f=-1), "f=-1 must be a whole number of at least 0"),
        (lambda: Median(f=1.5), "f=1.5"),
        (lambda: Median(keep="most"), "keep='most'"),
        (lambda: Median(min_holders=0), "min_holders=0"),
        (lambda: Median(weighting="n"), "weighting='n'"),
        (lambda: TrimmedMean(f=0), "with 0 it is the mean"),
        (lambda: TrimmedMean(f=2, trim=1), "trim=1 must be at least f=2"),
        (lambda: MultiKrum(m=0), "m=0"),
        (lambda: RFA(nu=0), r"nu=0 must be a number in \(0, 1\]"),
        (lambda: RFA(steps=0), "steps=0"),
        (lambda: RFA(tol=1.0), "tol=1.0"),
        (lambda: CenteredClip(radius=0.0), "radius=0.0"),
        (lambda: CenteredClip(radius=math.nan), "radius=nan"),
        (lambda: CenteredClip(passes=0), "passes=0"),
        (lambda: CenteredClip(start="zero"), "start='zero'"),
        (lambda: Bucketed(inner=MaskedMean()), "does not compare rows"),
        (lambda: Bucketed(inner=Median(), size=1), "size=1 must be a whole number of at least 2"),
        (lambda: Bucketed(inner=Median(), seed=-1), "seed=-1"),
    ],
)
def test_options_out_of_range_are_refused(make: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()  # type: ignore[operator]
