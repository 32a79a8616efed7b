"""pFedGM: conjugate updates, pooled statistics, linear discriminants, and what they do for clients that differ."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerance import roundings, slack
from torch import Tensor, nn
from torch.nn import functional as F

from talaria.aggregate import class_statistics as pooled
from talaria.aggregate.class_statistics import PooledStatistics
from talaria.aggregate.masked import MaskedMean
from talaria.aggregate.robust.median import Median
from talaria.algorithms.pfedgm import PFedGM, gaussian
from talaria.algorithms.pfedgm.gaussian import Statistics
from talaria.algorithms.pfedgm.head import Linear, Quadratic, fused, log_prior, personal_head
from talaria.algorithms.pfedgm.head import covariance as own_covariance
from talaria.algorithms.pfedgm.navigator import (
    ANCHORS,
    SCALE,
    Projection,
    last_layer,
    last_linear,
    projection,
    projection_of,
    spread_apart,
)
from talaria.algorithms.pfedgm.objective import Navigation
from talaria.algorithms.pfedgm.resampling import resampled, sampled_log_prior
from talaria.errors import AggregationError, ConfigError, ModelError
from talaria.federated import rounds
from talaria.federated.run import Member, Run
from talaria.model.masks import ChannelMask
from talaria.model.spec import ModelSpec
from talaria.model.split import split_model
from talaria.model.state import tensor_of
from talaria.seeds import Draws
from talaria.tensors import Array, Tensors, copied, equal
from talaria.training.interface import Task
from talaria.training.loop import predict
from talaria.types import Recipe, Samples, Update

Tiny = Callable[..., Task]


def head_of(algorithm: PFedGM, stats: Statistics, shared: Tensors, matrix: Array) -> Linear | Quadratic:
    nu = algorithm.prior_samples or float(len(matrix))
    return personal_head(stats, shared, matrix, nu, algorithm.predictive)


def covariance(seed: int, d: int = 4) -> Array:
    root = normal(seed, d, d + 2)
    return root @ root.T / d + 0.1 * np.eye(d)


def normal(seed: int, *size: int) -> Array:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).numpy()


def ones(*size: int) -> Array:
    return np.ones(size, np.float32)


# ---- conjugate updates --------------------------------------------------------------------------------


def test_a_vague_prior_gives_the_sample_mean_and_a_sure_one_stays() -> None:
    mean, prior, sigma = normal(0, 4), normal(1, 4), covariance(2)
    eye = np.eye(4)
    assert np.allclose(gaussian.posterior(prior, 1e9 * eye, mean, sigma)[0], mean, atol=1e-8)
    assert np.allclose(gaussian.posterior(prior, 1e-12 * eye, mean, sigma)[0], prior, atol=1e-9)
    assert np.allclose(gaussian.posterior(prior, eye, mean, 1e-12 * sigma)[0], mean, atol=1e-10)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), n=st.integers(1, 12))
def test_one_update_with_n_samples_is_n_updates_with_one(seed: int, n: int) -> None:
    z, prior, spread, sigma = normal(seed, n, 4), normal(seed + 1, 4), covariance(seed + 2), covariance(seed + 3)
    mean, after, gain = gaussian.posterior(prior, spread, z.mean(0), sigma / n)
    step, left = prior, spread
    for row in z:
        step, left, _ = gaussian.posterior(step, left, row, sigma)
    assert roundings(mean, step) <= 1000
    assert roundings(after, left) <= 1000
    information = np.linalg.inv(np.linalg.inv(spread) + n * np.linalg.inv(sigma))
    assert roundings(after, information) <= 1000
    assert float(np.linalg.eigvalsh(spread - after).min()) >= -slack(spread, 1000)
    eigen, room = np.linalg.eigvals(gain), slack(gain, 10_000)  # an unsymmetric matrix: the square root of rounding
    assert float(np.abs(eigen.imag).max()) <= room**0.5
    assert float(eigen.real.min()) >= -(room**0.5)
    assert float(eigen.real.max()) <= 1 + room**0.5


def test_the_gain_grows_with_the_samples_and_diagonal_is_the_same_form() -> None:
    sigma, spread = covariance(1).diagonal(), covariance(2).diagonal()
    zero, m = np.zeros(4), normal(3, 4)
    gains = [gaussian.posterior(zero, spread, m, sigma / n)[2] for n in (1, 2, 8)]
    assert bool((gains[0] < gains[1]).all())
    assert bool((gains[1] < gains[2]).all())
    full = gaussian.posterior(zero, np.diag(spread), m, np.diag(sigma / 2))
    flat = gaussian.posterior(zero, spread, m, sigma / 2)
    assert roundings(full[0], flat[0]) <= 100
    assert roundings(full[1].diagonal(), flat[1]) <= 100


def test_without_samples_the_posterior_is_the_prior_exactly() -> None:
    shared = pooled.empty(3, 4, diagonal=False)
    shared[pooled.MEAN] = normal(0, 3, 4).astype(np.float32)
    shared[pooled.WITHIN] = covariance(1).astype(np.float32)
    shared[pooled.PRIOR] = np.full((3, 4), 0.5, np.float32)
    stats = gaussian.collect(normal(2, 6, 4), np.array([0, 0, 0, 2, 2, 2]), 3)
    means, spreads = fused(stats, shared)
    assert np.array_equal(means[1], shared[pooled.MEAN][1])
    assert np.array_equal(spreads[1], 0.5 * np.eye(4))
    assert not np.array_equal(means[0], shared[pooled.MEAN][0])


# ---- statistics ---------------------------------------------------------------------------------------


def test_statistics_equal_numpys_per_class() -> None:
    z, y = normal(5, 20, 3), np.arange(20) % 4
    y[y == 3] = 0
    stats = gaussian.collect(z, y, 4)
    scatter = np.zeros((3, 3))
    for c in range(3):
        own = z[y == c]
        assert roundings(stats.mean[c], own.mean(0)) <= 100
        scatter += np.cov(own.T, bias=True) * len(own)
    assert roundings(stats.scatter, scatter) <= 100
    assert stats.count.tolist() == [10, 5, 5, 0]


def test_classes_of_too_few_samples_are_not_sent() -> None:
    """The mean of one sample is that sample."""
    stats = gaussian.collect(normal(1, 5, 2), np.array([0, 0, 0, 0, 1]), 3, at_least=2)
    assert stats.count.tolist() == [4, 0, 0]
    assert stats.mean[1].tolist() == [0, 0]


@pytest.mark.parametrize("flat", [False, True])
def test_the_pooled_covariance_is_that_of_the_classes_that_are_sent(flat: bool) -> None:
    """Scatter of a class whose count is hidden would be divided by too few samples."""
    y = np.repeat(np.arange(4), [40, 4, 3, 2])
    z = normal(3, len(y), 2)
    pool = pooled.Pool(4, 2, (2,) if flat else (2, 2))
    sent = gaussian.collect(z, y, 4, diagonal=flat, at_least=5)
    pool.add(sent.count, sent.mean, sent.scatter)
    want = np.cov(z[y == 0].T)
    np.testing.assert_allclose(pool.covariance(), want.diagonal() if flat else want, rtol=1e-7, atol=1e-7)


# ---- discriminants ------------------------------------------------------------------------------------


def test_linear_discriminant_equals_scikit_learn_with_the_maximum_likelihood_covariance() -> None:
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

    y = np.arange(90) % 3
    z = normal(7, 90, 5) + 0.7 * normal(8, 3, 5)[y]
    stats = gaussian.collect(z, y, 3)
    prior = np.log(stats.count / 90)
    reference = LinearDiscriminantAnalysis(solver="lsqr").fit(z, y)
    want = reference.decision_function(z)

    def apart(scale: float) -> float:
        w, b = gaussian.discriminant(stats.mean, stats.scatter / scale, prior)
        return roundings(z @ w.T + b, want)

    assert apart(90) < 10_000
    assert apart(90 - 3) > 1e10  # the unbiased covariance is another classifier


def test_rotating_the_features_leaves_full_covariance_logits_alone_but_not_diagonal_ones() -> None:
    y = np.arange(60) % 3
    z = normal(1, 60, 4) @ covariance(3) + normal(2, 3, 4)[y]
    turn = np.linalg.qr(normal(4, 4, 4))[0]

    def logits(x: Array, diagonal: bool) -> Array:
        stats = gaussian.collect(x, y, 3, diagonal=diagonal)
        w, b = gaussian.discriminant(stats.mean, gaussian.regular(stats.scatter / 57), np.zeros(3))
        return x @ w.T + b

    assert roundings(logits(z, False), logits(z @ turn, False)) <= 10_000
    assert not np.allclose(logits(z, True), logits(z @ turn, True), atol=1e-2)


def test_a_regular_covariance_adds_a_share_of_its_level_to_the_diagonal_alone() -> None:
    """A known slip adds the constant to every entry and a whole identity."""
    sigma = np.array([[2.0, 1.0], [1.0, 4.0]])
    assert roundings(gaussian.regular(sigma, 0.1), np.array([[2.3, 1.0], [1.0, 4.3]])) <= 16
    assert np.array_equal(gaussian.regular(np.zeros((2, 2))), np.eye(2))
    assert np.array_equal(gaussian.regular(np.zeros(2)), np.ones(2))


def test_the_predictive_head_is_the_gaussian_log_density() -> None:
    stats = gaussian.collect(normal(1, 12, 3), np.arange(12) % 2, 3)
    algorithm = PFedGM(features=3, predictive=True)
    shared = pooled.empty(3, 3, diagonal=False)
    shared |= {pooled.COUNT: ones(3), pooled.WITHIN: covariance(2, 3).astype(np.float32), pooled.PRIOR: ones(3, 3)}
    head = head_of(algorithm, stats, shared, np.eye(3))
    z = normal(4, 5, 3)
    means, spreads = fused(stats, shared)
    sigma, prior = own_covariance(stats, shared, 3.0), log_prior(stats, shared)
    want = np.zeros((5, 3))
    for c in range(3):
        density = torch.distributions.MultivariateNormal(tensor_of(means[c]), tensor_of(sigma + spreads[c]))
        want[:, c] = density.log_prob(tensor_of(z)).numpy() + prior[c] + 1.5 * np.log(2 * np.pi)
    at = stats.mean[stats.count > 0]
    factor = float((head(z)[0] / want[0])[0])
    assert roundings(head(z), factor * want) <= 1000
    assert 0 < factor <= 1 + slack(1.0, 100)
    assert float((head(at).max(1) - head(at).min(1)).max()) <= 30 + slack(30.0, 100)


# ---- the server ---------------------------------------------------------------------------------------


def sent(stats: Statistics, client: str, **extra: Array) -> Update:
    c, d = stats.mean.shape
    tensors = {
        pooled.COUNT: stats.count.astype(np.float32),
        pooled.MEAN: stats.mean.astype(np.float32),
        pooled.WITHIN: stats.scatter.astype(np.float32),
        pooled.BETWEEN: 0 * ones(d),
        pooled.PRIOR: 0 * ones(c, d),
        **extra,
    }
    return Update(tensors, 1.0, client)


def served(updates: list[Update], c: int, d: int, rounds: int = 1, **options: float) -> Tensors:
    rule = PooledStatistics(inner=MaskedMean(), **options)
    shared = pooled.empty(c, d, diagonal=False)
    for _ in range(rounds):
        shared, _ = rule.apply(shared, rule.init(shared), updates)
    return shared


def test_pooled_means_weigh_each_class_by_its_own_count() -> None:
    """Weighting by a client's total would let a class that it lacks dilute the mean."""
    one = Statistics(np.array([4.0, 0.0]), np.array([[1.0], [0.0]]), np.array([[2.0]]))
    two = Statistics(np.array([2.0, 90.0]), np.array([[4.0], [7.0]]), np.array([[88.0]]))
    shared = served([sent(one, "a"), sent(two, "b")], 2, 1)
    assert shared[pooled.MEAN].flatten().tolist() == pytest.approx([2.0, 7.0], rel=1e-4)
    assert shared[pooled.COUNT].tolist() == [6.0, 90.0]
    assert shared[pooled.WITHIN].item() == pytest.approx(90 / (96 - 3), rel=1e-6)


def test_the_variance_between_clients_is_the_method_of_moments() -> None:
    n, m = np.array([5.0, 8.0, 3.0]), np.array([0.0, 2.0, -1.0])
    stats = [Statistics(np.array([a]), np.array([[b]]), np.array([[a - 1.0]])) for a, b in zip(n, m, strict=True)]
    shared = served([sent(s, f"c{i}") for i, s in enumerate(stats)], 1, 1)
    bar = (n * m).sum() / n.sum()
    want = ((n * (m - bar) ** 2).sum() - 2 * 1.0) / (n.sum() - (n**2).sum() / n.sum())
    assert shared[pooled.BETWEEN].item() == pytest.approx(want, rel=1e-5)


def test_a_class_that_nobody_sends_keeps_its_mean_and_grows_unsure() -> None:
    stats = gaussian.collect(normal(1, 12, 2), np.arange(12) % 2, 3)
    rule = PooledStatistics(inner=MaskedMean())
    shared = pooled.empty(3, 2, diagonal=False)
    shared |= {pooled.MEAN: 9 * ones(3, 2), pooled.PRIOR: ones(3, 2), pooled.COUNT: ones(3)}
    after, _ = rule.apply(shared, {}, [sent(stats, "a")])
    assert np.array_equal(after[pooled.MEAN][2], shared[pooled.MEAN][2])
    assert bool((after[pooled.PRIOR][2] > 1).all())
    assert not np.array_equal(after[pooled.MEAN][0], shared[pooled.MEAN][0])


def test_without_any_update_nothing_moves() -> None:
    shared = pooled.empty(3, 2, diagonal=True)
    after, _ = PooledStatistics(inner=MaskedMean()).apply(shared, {}, [])
    assert equal(after, shared)


def test_differences_are_added_to_the_shared_statistics() -> None:
    stats = gaussian.collect(normal(1, 12, 2), np.arange(12) % 3, 3)
    rule, shared = PooledStatistics(inner=MaskedMean()), pooled.empty(3, 2, diagonal=False)
    shared, _ = rule.apply(shared, {}, [sent(stats, "a")])
    value = sent(stats, "b")
    delta = value.but(tensors={k: v - shared[k] for k, v in value.tensors.items()}, kind="delta")
    one, two = rule.apply(shared, {}, [value])[0], rule.apply(shared, {}, [delta])[0]
    assert all(roundings(one[k], two[k]) <= 100 for k in one)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({pooled.COUNT: np.array([-1.0, 2.0, 1.0], np.float32)}, "negative"),
        ({pooled.MEAN: np.full((3, 2), np.nan, np.float32)}, "finite"),
        ({pooled.WITHIN: np.zeros((3, 3), np.float32)}, "shape"),
    ],
)
def test_bad_statistics_are_refused_with_the_clients_name(change: Tensors, says: str) -> None:
    stats = gaussian.collect(normal(1, 12, 2), np.arange(12) % 3, 3)
    with pytest.raises(AggregationError, match=says) as error:
        served([sent(stats, "mallory", **change)], 3, 2)
    assert "mallory" in str(error.value)


def generative(seed: int, n: int, sd: float) -> tuple[dict[str, float], float]:
    """30 clients whose class means differ by ``sd``: mean accuracy of each head, and the estimate of sd²."""
    rng = np.random.default_rng(seed)
    clients, classes, d = 30, 10, 16
    common = rng.normal(size=(classes, d))
    data = []
    for _ in range(clients):
        means = common + sd * rng.normal(size=(classes, d))
        mix = rng.dirichlet([0.3] * classes)
        y, t = rng.choice(classes, n, p=mix), rng.choice(classes, 300, p=mix)
        data.append((means[y] + rng.normal(size=(n, d)), y, means[t] + rng.normal(size=(300, d)), t))
    stats = [gaussian.collect(x, y, classes) for x, y, _, _ in data]
    shared = served([sent(s, f"c{i:02d}") for i, s in enumerate(stats)], classes, d)
    alone = pooled.empty(classes, d, diagonal=False)
    everyone = {**copied(shared), pooled.BETWEEN: 1e-9 * ones(d), pooled.PRIOR: 1e-9 * ones(classes, d)}
    heads = {
        "local": (PFedGM(features=d), alone),
        "global": (PFedGM(features=d, prior_samples=1e6), everyone),
        "fused": (PFedGM(features=d), shared),
        "predictive": (PFedGM(features=d, predictive=True), shared),
        "fused, one covariance": (PFedGM(features=d, prior_samples=1e6), shared),
    }
    eye, accuracy = np.eye(d), {}
    for name, (algorithm, state) in heads.items():
        hits = [
            float((head_of(algorithm, s, state, eye)(x).argmax(1) == t).mean())
            for s, (_, _, x, t) in zip(stats, data, strict=True)
        ]
        accuracy[name] = sum(hits) / clients
    return accuracy, float(shared[pooled.BETWEEN].mean())


@pytest.mark.parametrize("n", [10, 20, 40, 160])
def test_fusing_beats_the_client_alone_and_the_fleet_alone(n: int) -> None:
    accuracy, between = generative(0, n, 0.6)
    assert accuracy["fused"] > max(accuracy["local"], accuracy["global"])
    assert accuracy["predictive"] > max(accuracy["local"], accuracy["global"])
    assert between == pytest.approx(0.36, rel=0.25)


def test_clients_that_do_not_differ_are_seen_as_such() -> None:
    accuracy, between = generative(1, 40, 0.0)
    assert between < 0.01
    assert accuracy["fused, one covariance"] == pytest.approx(accuracy["global"], abs=0.005)


# ---- the device ---------------------------------------------------------------------------------------


def test_full_resampling_makes_classes_equally_frequent() -> None:
    y = np.array([0] * 900 + [1] * 90 + [2] * 10)
    draws = Draws(0)
    count = np.bincount(y[resampled(y, 1.0, draws)], minlength=3)
    sigma = (1000 * (1 / 3) * (2 / 3)) ** 0.5
    assert (np.abs(count - 1000 / 3) < 3 * sigma).all()
    assert resampled(y, 0.0, draws).tolist() == list(range(1000))
    assert resampled(np.array([4]), 1.0, draws).tolist() == [0]


def test_the_prior_is_that_of_the_resampled_classes() -> None:
    count = np.array([90.0, 10.0, 0.0])
    assert np.exp(sampled_log_prior(count, 0.0)).tolist() == pytest.approx([90 / 101, 10 / 101, 1 / 101])
    assert np.exp(sampled_log_prior(count, 1.0)).tolist() == pytest.approx([1 / 3] * 3)


def test_anchors_are_pushed_apart_up_to_the_margin() -> None:
    anchors = np.array([[0.0, 0.0], [0.6, 0.8], [0.0, 3.0]])
    loss, slope = spread_apart(anchors, 2.0)
    assert loss == pytest.approx((1.0 + 0.0 + 0.0) / 3)
    assert roundings(slope[1], np.array([-0.6, -0.8]) * 2 / 3) <= 16
    same, still = spread_apart(np.zeros((2, 2)), 1.0)
    assert same == 1.0
    assert not still.any()


def test_the_projection_keeps_lengths_and_is_the_same_everywhere() -> None:
    r = projection(16, 200)
    assert roundings(r @ r.T, np.eye(16) * 200 / 16) <= 1000
    assert np.array_equal(r, projection(16, 200))
    assert np.array_equal(projection(8, 5), np.eye(5))


def test_a_pruned_device_projects_into_the_same_space(
    tiny: Tiny, narrowed: Callable[[Task], tuple[Task, ChannelMask]]
) -> None:
    task = tiny()
    small, mask = narrowed(task)
    assert last_linear(small.model, small.split) == last_layer(small.split)
    narrow = projection_of(small.split, mask, 2).matrix(3, np.float64)
    assert np.array_equal(narrow, projection(2, 4)[:, [0, 2, 3]])
    shared, _ = PFedGM(features=2).init(task.model, task.split)
    assert shared[pooled.MEAN].shape == (3, 2)


def test_what_is_sent_and_what_stays(tiny: Tiny) -> None:
    task = tiny(norm=True)
    algorithm = PFedGM()
    shared, private = algorithm.init(task.model, task.split)
    update, kept = algorithm.fit(task, shared, private)
    assert set(update.tensors) == set(shared)
    assert not [k for k in shared if k.startswith("head")]
    assert {"head.weight", "body.1.running_mean"} & set(update.tensors) == set()
    assert "body.1.running_mean" in kept
    assert float(update.tensors[pooled.COUNT].sum()) == len(task.train)


def algorithm_scale(stats: Statistics, want: Array, z: Array) -> float:
    """The factor of the served logits: read off the linear map, whose values at the class means it bounds."""
    ones = np.concatenate([z, np.ones((len(z), 1))], 1, dtype=np.float64)
    linear = np.linalg.lstsq(ones, want, rcond=None)[0]
    at = np.concatenate([stats.mean, np.ones((len(stats.mean), 1))], 1) @ linear
    return min(1.0, 30.0 / float((at.max(1) - at.min(1)).max()))


def test_the_served_model_ends_in_one_linear_layer_that_is_the_gaussian_formula(tiny: Tiny) -> None:
    task = tiny(count=30)
    algorithm = PFedGM(tune_epochs=0)
    shared, private = algorithm.init(task.model, task.split)
    rule = algorithm.aggregator
    update, private = algorithm.fit(task, shared, private)
    shared, _ = rule.apply(shared, rule.init(shared), [update])
    model = algorithm.personal(task, shared, private)
    assert type(model.head) is nn.Linear
    z = np.tanh(task.train.x @ shared["body.0.weight"].T + shared["body.0.bias"])  # d = 4 < features: no projection
    stats = gaussian.collect(z, task.train.y, 3)
    means, _ = fused(stats, shared)
    inverse = np.linalg.inv(own_covariance(stats, shared, 4.0))
    want = z.astype(np.float64) @ inverse @ means.T - 0.5 * np.einsum("cd,de,ce->c", means, inverse, means)
    want = want + log_prior(stats, shared)
    centred = (want - want.mean(1, keepdims=True)) * algorithm_scale(stats, want, z)
    assert roundings(predict(model, task.train.x), centred) <= 200
    assert np.abs(own_covariance(stats, shared, 4.0) - np.eye(4)).max() > 1e-3


def test_the_prior_weighs_as_many_samples_as_the_features_have_numbers(tiny: Tiny) -> None:
    task = tiny(count=30)
    algorithm = PFedGM(tune_epochs=0)
    shared, private = algorithm.init(task.model, task.split)
    update, private = algorithm.fit(task, shared, private)
    shared, _ = algorithm.aggregator.apply(shared, algorithm.aggregator.init(shared), [update])
    wide = {**shared, pooled.WITHIN: 4 * shared[pooled.WITHIN]}

    def served(prior: float) -> Array:
        model = PFedGM(tune_epochs=0, prior_samples=prior).personal(task, wide, private)
        return predict(model, task.train.x)

    assert np.array_equal(served(0.0), served(4.0))  # d = 4 < features
    assert not np.allclose(served(0.0), served(float(algorithm.features)))


def test_large_logits_are_scaled_down_without_changing_a_decision() -> None:
    """Compact classes far apart: the plain discriminant spans thousands, which float32 cannot hold to 1e-4."""
    y = np.arange(40) % 4
    z = normal(0, 4, 3)[y] + 1e-3 * normal(1, 40, 3)
    stats = gaussian.collect(z, y, 4)
    shared = pooled.empty(4, 3, diagonal=False) | {
        pooled.COUNT: ones(4),
        pooled.WITHIN: 1e-6 * np.eye(3, dtype=np.float32),
    }
    head = head_of(PFedGM(features=3), stats, shared, np.eye(3))
    points = normal(2, 200, 3)
    means, _ = fused(stats, shared)
    w, b = gaussian.discriminant(means, own_covariance(stats, shared, 3.0), log_prior(stats, shared))
    plain = points @ w.T + b
    assert float(np.abs(plain).max()) > 1e4
    assert np.array_equal(head(points).argmax(1), plain.argmax(1))
    at = head(stats.mean)
    assert float((at.max(1) - at.min(1)).max()) == pytest.approx(30.0)


@pytest.mark.parametrize("predictive", [False, True])
def test_logits_that_large_terms_cancel_in_keep_to_what_float32_holds(predictive: bool) -> None:
    """Features that differ by little beside what they have in common: a bundle's sums are to be as torch's, to 1e-4."""
    y = np.arange(40) % 4
    z = 1 + 3e-3 * normal(0, 4, 16)[y] + 1e-3 * normal(1, 40, 16)
    stats = gaussian.collect(z, y, 4)
    shared = pooled.empty(4, 16, diagonal=False) | {
        pooled.COUNT: ones(4),
        pooled.WITHIN: 1e-6 * np.eye(16, dtype=np.float32),
    }
    algorithm = PFedGM(features=16, predictive=predictive)
    exact, head = (head_of(algorithm, stats, shared, np.eye(16, dtype=kind)) for kind in ("f8", "f4"))
    assert np.array_equal(exact(z).argmax(1), y)
    nearly = np.nextafter(z.astype("f4"), np.float32(2))  # another order of sums in the layers before it
    assert float(np.abs(head(nearly) - exact(z.astype("f4"))).max()) < 1e-4


def test_statistics_follow_the_body_that_is_served(tiny: Tiny) -> None:
    """Stale statistics of another body version must not decide: another shared body gives another head."""
    task = tiny(count=30)
    algorithm = PFedGM(tune_epochs=0)
    shared, private = algorithm.init(task.model, task.split)
    _, private = algorithm.fit(task, shared, private)
    moved = {**shared, "body.0.weight": -shared["body.0.weight"]}
    assert not torch.allclose(
        algorithm.personal(task, shared, private).head.weight, algorithm.personal(task, moved, private).head.weight
    )


def test_tuning_on_all_labels_is_tuning_on_one_set_of_them(tiny: Tiny) -> None:
    task, other = tiny(count=24), tiny(count=9, client="other")
    both = Samples.joined([task.train, other.train])
    divided = task.but(val=other.train)
    joined = task.but(train=both)
    algorithm = PFedGM(tune_epochs=2)
    shared, private = algorithm.init(task.model, task.split)

    def weight(task: Task, **options: object) -> Tensor:
        model = PFedGM(tune_epochs=2, **options).personal(task, shared, private)  # type: ignore[arg-type]
        return model.head.weight.detach()

    assert torch.equal(weight(divided, tune_on="all"), weight(joined))
    assert not torch.equal(weight(divided, tune_on="all"), weight(divided))
    assert not torch.equal(weight(divided, tune_lr=1e-4), weight(divided))


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("kind", ["full", "diagonal"])
def test_a_client_of_few_samples_or_one_class_is_served(tiny: Tiny, count: int, kind: str) -> None:
    task = tiny(count=count, classes=1, norm=True)
    algorithm = PFedGM(covariance=kind)
    shared, private = algorithm.init(task.model, task.split)
    rule = algorithm.aggregator
    for number in range(2):
        update, private = algorithm.fit(task.but(round=number), shared, private)
        shared, _ = rule.apply(shared, rule.init(shared), [update])
    logits = predict(algorithm.personal(task, shared, private), task.train.x)
    assert np.isfinite(logits).all()
    assert logits.argmax(1).tolist() == [0] * count
    assert all(np.isfinite(v).all() for v in shared.values())


def test_virtual_features_teach_the_navigator_classes_that_a_client_lacks(tiny: Tiny) -> None:
    task = tiny(count=20, classes=2)
    algorithm = PFedGM(virtual=1.0)
    shared, private = algorithm.init(task.model, task.split)
    known = {
        **shared,
        pooled.COUNT: 9 * ones(3),
        pooled.MEAN: torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).numpy(),
        pooled.WITHIN: np.eye(4, dtype=np.float32) * 0.01,
    }
    with_virtual, _ = algorithm.fit(task, known, private)
    without, _ = PFedGM(virtual=0.0).fit(task, known, private)
    one, two = (u.tensors["navigator/anchors"] for u in (with_virtual, without))

    def score(anchors: Array) -> float:
        z = known[pooled.MEAN][2]
        return float(tensor_of(-0.5 * np.square(z - anchors).sum(1)).log_softmax(0)[2])

    assert score(one) > score(two)


def test_the_navigators_loss_and_slopes_with_smoothed_labels_are_autograds() -> None:
    g = torch.Generator().manual_seed(0)
    inputs, anchors = (torch.randn(n, 4, generator=g, dtype=torch.float64, requires_grad=True) for n in (6, 3))
    scale = torch.tensor(0.2, dtype=torch.float64, requires_grad=True)
    project, y, offset = Projection(4), torch.arange(6) % 3, np.array([0.1, -0.2, 0.3])
    navigation = Navigation("head", project, offset, 0.0, 0.0, 0.0, 1.0, 0.3)
    own = {ANCHORS: anchors.detach().numpy(), SCALE: scale.detach().numpy()}
    (tap,) = navigation.taps
    found = navigation({tap: inputs.detach().numpy()}, own, inputs.detach().numpy(), y.numpy())
    z = inputs @ tensor_of(project.matrix(4, np.float64)).T
    logits = -0.5 * torch.exp(-2 * scale) * (z[:, None] - anchors).square().sum(2) + torch.from_numpy(offset)
    loss = F.cross_entropy(logits, y, label_smoothing=0.3)
    loss.backward()
    assert found.loss == pytest.approx(loss.item())
    for slope, of in ((found.taps[tap], inputs), (found.own[ANCHORS], anchors)):
        np.testing.assert_allclose(slope, of.grad.numpy(), atol=1e-12)
    assert float(found.own[SCALE]) == pytest.approx(scale.grad.item())


def test_a_head_that_is_not_linear_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Conv1d(1, 3, 1))
    with pytest.raises(ModelError, match="linear"):
        PFedGM().init(model, split_model(model, "1"))


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"features": 0}, "features"),
        ({"covariance": "round"}, "covariance"),
        ({"rho": 1.5}, "rho"),
        ({"inter": -1.0}, "inter"),
        ({"intra": -1.0}, "intra"),
        ({"virtual": -1.0}, "virtual"),
        ({"margin": 0.0}, "margin"),
        ({"n_min": 1}, "n_min"),
        ({"prior_samples": -1.0}, "prior_samples"),
        ({"tune_epochs": -1}, "tune_epochs"),
        ({"tune_lr": -1.0}, "tune_lr"),
        ({"tune_on": "val"}, "tune_on"),
        ({"motion": -1.0}, "motion"),
        ({"blend": 0.0}, "blend"),
        ({"inter": 0.0, "intra": 0.0, "virtual": 0.0}, "allow_degenerate"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        PFedGM(**options)  # type: ignore[arg-type]


def test_a_robust_rule_takes_the_means_place_and_statistics_are_still_pooled() -> None:
    g = torch.Generator().manual_seed(0)
    members = []
    for name in ("a", "b", "c"):
        y = torch.arange(12) % 3
        data = Samples.of(torch.randn(12, 6, generator=g) + y[:, None].float(), y)
        members.append(Member(name, data, data.take(np.arange(3))))
    run = Run(
        spec=ModelSpec("mlp", (6,), 3), algorithm="pfedgm", recipe=Recipe(batch=6, epochs=1, lr=0.05, momentum=0.0)
    )
    shared, state = rounds.start(run, Median(f=1))
    updates = [rounds.participate(run, m, shared, None, 1)[0] for m in members]
    new, _ = rounds.close(run, shared, state, updates, Median(f=1))
    middle = np.median([u.tensors["fc1.weight"] for u in updates], 0)
    assert np.array_equal(new["fc1.weight"], middle)
    assert new[pooled.COUNT].tolist() == [12.0, 12.0, 12.0]


def test_samples_stay_untouched(tiny: Tiny) -> None:
    task = tiny(count=9)
    before = Samples.of(task.train.x, task.train.y)
    shared, private = PFedGM().init(task.model, task.split)
    kept, own = copied(shared), copied(private)
    PFedGM().fit(task, shared, private)
    assert np.array_equal(before.x, task.train.x)
    assert equal(kept, shared)
    assert equal(own, private)
