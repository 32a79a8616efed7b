"""What counts as rounding: the measure that all numerical tests take."""

import math

import numpy as np
import pytest
import torch
from tolerance import roundings


def test_one_step_to_the_next_number_is_one_rounding_at_any_size():
    for size in (1e-20, 1.0, 1e20):
        x = torch.full((3,), size)
        assert 0.5 <= roundings(torch.nextafter(x, 2 * x), x) <= 1
        assert 0.5 <= roundings(np.nextafter(size, 2 * size), size) <= 1


def test_the_coarser_type_counts():
    third = torch.tensor(1 / 3)
    assert roundings(third.double(), 1 / 3) > 1e7
    assert roundings(third, 1 / 3) < 1


def test_the_largest_number_sets_the_scale_unless_one_is_given():
    a, b = torch.tensor([1000.0, 1e-4]), torch.tensor([1000.0, 0.0])
    assert roundings(a, b) == pytest.approx(1e-7 / torch.finfo().eps)
    assert roundings(a, b, 1.0) == pytest.approx(1000 * roundings(a, b))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_never_near(bad):
    assert roundings([1.0, bad], [1.0, 1.0]) == math.inf
    assert roundings([1.0, 1.0], [1.0, bad]) == math.inf
    assert roundings([1.0], [0.0]) == math.inf, "nothing is near zero unless a scale says how large the terms were"


def test_shapes_and_names_must_agree():
    with pytest.raises(AssertionError, match="shapes"):
        roundings(torch.ones(2), torch.ones(1, 2))
    with pytest.raises(AssertionError, match="w"):
        roundings({"w": 1.0}, {})
    assert roundings({"a": 1.0, "b": 2.0}, {"a": 1.0, "b": 2.0}) == 0
