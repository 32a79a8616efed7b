"""Augmentations: shapes, determinism, what may change and what may not."""

import pytest
import torch
from tolerance import roundings
from torch import Generator

from talaria.errors import ConfigError, DataError
from talaria.training import augment


def draws(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


SHAPES = [("none", (4, 6, 100)), ("imu", (4, 6, 100)), ("imu", (1, 9, 7)), ("crop_flip", (5, 3, 32, 24))]


@pytest.mark.parametrize(("name", "shape"), SHAPES)
def test_pure_deterministic_and_same_shape(name: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=draws(1))
    before = x.clone()
    a, b = augment.get(name)(x, draws(2)), augment.get(name)(x, draws(2))
    assert torch.equal(x, before)
    assert torch.equal(a, b)
    assert a.shape == x.shape
    assert a.dtype == torch.float32


@pytest.mark.parametrize(("name", "shape"), SHAPES[1:])
def test_other_draws_give_other_samples_and_leave_the_global_generator_alone(name: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=draws(1))
    state = torch.random.get_rng_state()
    assert not torch.equal(augment.get(name)(x, draws(2)), augment.get(name)(x, draws(3)))
    assert torch.equal(state, torch.random.get_rng_state())


def test_rotations_are_small_proper_rotations() -> None:
    r = augment._rotations(200, draws()).double()
    assert roundings((r @ r.transpose(1, 2)).float(), torch.eye(3).expand(200, 3, 3)) <= 32
    assert roundings(torch.linalg.det(r).float(), torch.ones(200)) <= 64
    angle = torch.acos(((r.diagonal(dim1=1, dim2=2).sum(1) - 1) / 2).clamp(-1, 1)).rad2deg()
    assert 10 < float(angle.max()) <= 15 + 1e-3


def test_imu_keeps_the_length_of_a_constant_vector_up_to_gain_and_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(augment, "_SCALE", 0.0)
    monkeypatch.setattr(augment, "_JITTER", 0.0)
    x = torch.tensor([3.0, 0.0, 4.0, 0.0, 12.0, 5.0])[None, :, None].expand(8, 6, 20)
    out = augment.imu(x, draws()).reshape(8, 2, 3, 20).norm(dim=2)
    assert roundings(out[:, 0], torch.full((8, 20), 5.0)) <= 64
    assert roundings(out[:, 1], torch.full((8, 20), 13.0)) <= 64


def test_imu_shifts_by_at_most_a_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_SCALE", "_JITTER", "_ANGLE"):
        monkeypatch.setattr(augment, name, 0.0)
    x = torch.arange(100.0).expand(50, 3, 100)
    out = augment.imu(x, draws())
    shift = out[:, 0, 50] - 50
    assert set(shift.tolist()) <= set(range(-10, 11))
    assert len(set(shift.tolist())) > 5
    assert roundings(out[:, 0], (torch.arange(100.0) + shift[:, None]).clamp(0, 99)) <= 64


def test_crop_flip_moves_whole_images_and_mirrors_about_half() -> None:
    ramp = torch.arange(32.0).expand(400, 2, 16, 32)
    out = augment.crop_flip(ramp, draws())
    rising = (out[:, 0, 0].diff(dim=1) >= 0).all(1)
    falling = (out[:, 0, 0].diff(dim=1) <= 0).all(1)
    assert bool((rising ^ falling).all())
    assert 150 < int(falling.sum()) < 250
    assert torch.equal(out[:, 0], out[:, 1])
    middle = out[:, 0, 8, 16]
    assert float((middle[rising] - 16).abs().max()) == 4


def test_unknown_name_lists_the_valid_ones() -> None:
    with pytest.raises(ConfigError, match="augment='blur' is unknown; use one of none, imu, crop_flip"):
        augment.get("blur")


@pytest.mark.parametrize(("name", "shape"), [("imu", (2, 4, 10)), ("imu", (2, 6)), ("crop_flip", (2, 6, 10))], ids=str)
def test_wrong_shape_is_refused(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match=f"augment '{name}': x has shape"):
        augment.get(name)(torch.zeros(shape), draws())
