"""Hand-checkable numbers of the recent algorithms, each worked out on paper."""

import math

import numpy as np
import pytest
import torch
from tolerance import roundings

from talaria.aggregate.adversarial import Attack, Normalization, adversarial
from talaria.aggregate.distill import divergence
from talaria.algorithms.heart_pfl.prototypes import alignment
from talaria.algorithms.pfedgm import gaussian
from talaria.algorithms.pfedgm.head import Quadratic
from talaria.algorithms.thorki import fusion_gate
from talaria.tensors import Array
from talaria.training.objectives import cross_entropy, log_softmax


def column(*values: float) -> Array:
    return np.array(values)[:, None]


def test_kalman_gain_in_one_dimension() -> None:
    """Prior N(0, 1), four samples of variance 4 with mean 2."""
    one = np.ones((1, 1))
    mean, variance, gain = gaussian.posterior(0 * one[0], one, 2 * one[0], 4 * one / 4)
    assert (gain.item(), mean.item(), variance.item()) == pytest.approx((0.5, 1.0, 0.5), rel=1e-14)


def test_linear_discriminant_in_one_dimension() -> None:
    """Means ±1, variance 2, priors 1/4 and 3/4, at z = 0.3; the mean of class 1 is +1."""
    prior = np.log([0.25, 0.75])
    sigma = np.array([[2.0]])
    weight, bias = gaussian.discriminant(column(-1.0, 1.0), sigma, prior)
    logits = 0.3 * weight[:, 0] + bias
    assert logits.tolist() == pytest.approx([-1.786294, -0.387682], abs=1e-6)
    assert np.exp(log_softmax(logits[None])[0]).tolist() == pytest.approx([0.198036, 0.801964], abs=1e-6)


def test_predictive_discriminant_in_one_dimension() -> None:
    """Each mean uncertain by 0.5 widens the variance to 2.5."""
    prior = np.log([0.25, 0.75])
    white, log_det = gaussian.whitening(np.array([[2.5]]))
    head = Quadratic(np.stack([white, white]), column(-1.0, 1.0), prior - 0.5 * log_det, np.ones((1, 1)))
    assert np.exp(log_softmax(head(column(0.3))))[0].tolist() == pytest.approx([0.207738, 0.792262], abs=1e-6)


def test_symmetric_divergence_of_two_classes() -> None:
    j = divergence(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]]))
    assert roundings(j, 2 * math.tanh(0.5)) <= 32


def test_alignment_terms_of_one_feature() -> None:
    f, p, same = np.array([[3.0, 4.0]]), np.array([[4.0, 3.0]]), np.ones((1, 2))
    assert 2 * alignment([f, same], [p, same])[0] == pytest.approx(0.04, abs=1e-14)
    assert 2 * alignment([same, f], [same, p])[0] == pytest.approx(1.0, abs=1e-14)


def test_fast_gradient_step_takes_eps_times_the_l1_norm_off_the_margin() -> None:
    model = torch.nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[2.0, -1.0, 0.5], [0.0, 0.0, 0.0]]))
    x = torch.full((1, 3), 0.5)
    attack = Attack(eps=8 / 255, step=8 / 255, steps=1, random_start=False)
    moved = adversarial(model, x, torch.tensor([0]), attack, Normalization(), torch.Generator())
    assert roundings((model(x) - model(moved))[0, 0], 8 / 255 * 3.5, 1.0) <= 32


@pytest.mark.parametrize("seed", range(4))
def test_the_constant_gate_is_at_most_the_better_branch(seed: int) -> None:
    """Sixty samples of five classes, two random branches of like quality: the best α lies within (0, 1)."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(5, (60,), generator=g).numpy()
    general, small = (torch.randn(60, 5, generator=g).numpy() + 1.5 * np.eye(5)[y] for _ in range(2))
    alpha = fusion_gate.constant(general, small, y)
    best, *others = (cross_entropy(z, y)[0] for z in (fusion_gate.mixed(general, small, alpha), general, small))
    assert 0 < alpha < 1
    assert best < min(others)
