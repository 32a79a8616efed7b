"""Augmentations: shapes, determinism, what may change and what may not."""

import numpy as np
import pytest
import torch
from tolerance import roundings

from talaria.errors import ConfigError, DataError
from talaria.seeds import Draws
from talaria.training import augment

SHAPES = [("none", (4, 6, 100)), ("imu", (4, 6, 100)), ("imu", (1, 9, 7)), ("crop_flip", (5, 3, 32, 24))]


@pytest.mark.parametrize(("name", "shape"), SHAPES)
def test_pure_deterministic_and_same_shape(name: str, shape: tuple[int, ...]) -> None:
    x = Draws(1).normal(*shape).astype(np.float32)
    before = x.copy()
    a, b = augment.get(name)(x, Draws(2)), augment.get(name)(x, Draws(2))
    assert np.array_equal(x, before)
    assert np.array_equal(a, b)
    assert a.shape == x.shape
    assert a.dtype == np.float32


@pytest.mark.parametrize(("name", "shape"), SHAPES[1:])
def test_other_draws_give_other_samples_and_leave_the_global_generators_alone(
    name: str, shape: tuple[int, ...]
) -> None:
    x = Draws(1).normal(*shape).astype(np.float32)
    state, beside = torch.random.get_rng_state(), np.random.get_state()[1].copy()
    assert not np.array_equal(augment.get(name)(x, Draws(2)), augment.get(name)(x, Draws(3)))
    assert torch.equal(state, torch.random.get_rng_state())
    assert np.array_equal(beside, np.random.get_state()[1])


def test_rotations_are_small_proper_rotations() -> None:
    r = augment._rotations(200, Draws(0)).astype(np.float64)
    assert roundings((r @ r.transpose(0, 2, 1)).astype(np.float32), np.broadcast_to(np.eye(3), (200, 3, 3))) <= 32
    assert roundings(np.linalg.det(r).astype(np.float32), np.ones(200)) <= 64
    angle = np.rad2deg(np.arccos(np.clip((np.trace(r, axis1=1, axis2=2) - 1) / 2, -1, 1)))
    assert 10 < float(angle.max()) <= 15 + 1e-3


def test_imu_keeps_the_length_of_a_constant_vector_up_to_gain_and_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(augment, "_SCALE", 0.0)
    monkeypatch.setattr(augment, "_JITTER", 0.0)
    constant = np.array([3.0, 0.0, 4.0, 0.0, 12.0, 5.0], np.float32)
    x = np.broadcast_to(constant[None, :, None], (8, 6, 20))
    out = np.linalg.norm(augment.imu(x, Draws(0)).reshape(8, 2, 3, 20), axis=2)
    assert roundings(out[:, 0], np.full((8, 20), 5.0)) <= 64
    assert roundings(out[:, 1], np.full((8, 20), 13.0)) <= 64


def test_imu_shifts_by_at_most_a_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_SCALE", "_JITTER", "_ANGLE"):
        monkeypatch.setattr(augment, name, 0.0)
    x = np.broadcast_to(np.arange(100, dtype=np.float32), (50, 3, 100))
    out = augment.imu(x, Draws(0))
    shift = out[:, 0, 50] - 50
    assert set(shift.tolist()) <= set(range(-10, 11))
    assert len(set(shift.tolist())) > 5
    assert roundings(out[:, 0], np.clip(np.arange(100.0) + shift[:, None], 0, 99)) <= 64


def test_crop_flip_moves_whole_images_and_mirrors_about_half() -> None:
    ramp = np.broadcast_to(np.arange(32, dtype=np.float32), (400, 2, 16, 32))
    out = augment.crop_flip(ramp, Draws(0))
    rising = (np.diff(out[:, 0, 0], axis=1) >= 0).all(1)
    falling = (np.diff(out[:, 0, 0], axis=1) <= 0).all(1)
    assert bool((rising ^ falling).all())
    assert 150 < int(falling.sum()) < 250
    assert np.array_equal(out[:, 0], out[:, 1])
    middle = out[:, 0, 8, 16]
    assert float(np.abs(middle[rising] - 16).max()) == 4


def test_unknown_name_lists_the_valid_ones() -> None:
    with pytest.raises(ConfigError, match="augment='blur' is unknown; use one of none, imu, crop_flip"):
        augment.get("blur")


@pytest.mark.parametrize(("name", "shape"), [("imu", (2, 4, 10)), ("imu", (2, 6)), ("crop_flip", (2, 6, 10))], ids=str)
def test_wrong_shape_is_refused(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match=f"augment '{name}': x has shape"):
        augment.get(name)(np.zeros(shape, np.float32), Draws(0))
