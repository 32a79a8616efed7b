"""A length that follows the devices' own: where it goes, what it costs, and that no byte depends on the protocol."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest

import talaria
from talaria import tensors
from talaria.aggregate.fedopt import ServerMomentum
from talaria.aggregate.masked import MaskedMean
from talaria.errors import ConfigError, StateError
from talaria.privacy.clipping import COUNT_NOISE, KEY, WITHIN, clip_in, next_clip, on_values
from talaria.privacy.coordinates import Coordinates
from talaria.privacy.forms import FORMS
from talaria.privacy.neighbours import bitsets, graph, smallest_part
from talaria.privacy.rule import Privacy, PrivateMean, contribution, private
from talaria.seeds import Draws
from talaria.tensors import Tensors
from talaria.types import Update

LENGTHS = np.linspace(0.1, 2.0, 20)
"""Of 20 devices' differences."""


def shared_of(size: int = 50) -> Tensors:
    return {"w": np.zeros(size, np.float32)}


def updates() -> list[Update]:
    each = [np.full(50, norm / 50**0.5, np.float32) for norm in LENGTHS]
    return [Update({"w": step}, 1.0, f"d{n:02}", kind="delta") for n, step in enumerate(each)]


@pytest.mark.parametrize("first", [0.05, 1.0, 3.0])
@pytest.mark.parametrize("quantile", [0.25, 0.5, 0.9])
def test_it_goes_where_the_share_asked_for_is_within(first: float, quantile: float) -> None:
    rule = PrivateMean(privacy=Privacy(clip=first, quantile=quantile, holders=4))
    state, shared = rule.init(shared_of()), shared_of()
    for _ in range(80):
        _, state = rule.apply(shared, state, updates())
    clip = clip_in(state)
    assert clip is not None
    # A step is a factor of at most exp(.2): it hovers where the share changes from below to above.
    low, high = np.quantile(LENGTHS, [max(quantile - 0.1, 0), min(quantile + 0.1, 1)])
    assert low * math.exp(-0.2) <= clip <= high * math.exp(0.2)


@pytest.mark.parametrize("noise_by", FORMS)
def test_both_noises_together_are_as_private_as_the_one_asked_for(noise_by: str) -> None:
    """Of devices at the two ends of what may come; measured on what a coordinator sees, or adds."""
    z, clip = 1.5, 0.5
    asked = Privacy(secure=True, clip=clip, quantile=0.5, noise=z, noise_by=noise_by, holders=14)
    rule, coordinates = PrivateMean(privacy=asked), Coordinates.of(shared_of(), None)
    terms = rule.terms(coordinates, 20, 0, clip, fleet="f", round=1, attempt=1)
    if noise_by == "devices":
        values, count = terms.noise * terms.needed**0.5, terms.metric_noise * terms.threshold**0.5
    else:
        assert terms.noise == terms.metric_noise == 0
        values, count = rule._deviation(coordinates, terms, z), COUNT_NOISE * z
    # Sensitivity: one difference of length clip, and one count of 1/2.
    assert 1 / math.hypot(clip / values, 0.5 / count) == pytest.approx(z, rel=1e-4)
    assert 1 / math.hypot(clip / values, 0.5 / count) >= z
    assert on_values(z) == pytest.approx(z / math.sqrt(0.99))


def test_a_device_tells_whether_it_was_cut_with_the_noise_that_its_terms_ask_for() -> None:
    rule = PrivateMean(privacy=Privacy(secure=True, clip=1.0, quantile=0.5, noise=1.0, noise_by="devices"))
    coordinates = Coordinates.of(shared_of(), None)
    terms = rule.terms(coordinates, 20, 0, 1.0, fleet="f", round=1, attempt=1)
    told = np.array(
        [
            contribution(shared_of(), coordinates, terms, one, Draws(100 * trial + n)).metrics[WITHIN]
            for trial in range(30)
            for n, one in enumerate(updates())
        ]
    ).reshape(30, 20)
    means, spread = told.mean(0), terms.metric_noise
    assert np.abs(means - np.where(LENGTHS <= 1.0, 0.5, -0.5)).max() < 5 * spread / 30**0.5
    assert told.std() == pytest.approx(math.hypot(spread, 0.5), rel=0.15)


@pytest.mark.parametrize("noise_by", FORMS)
@pytest.mark.parametrize("wrapped", [False, True])
def test_the_protocol_changes_no_byte(noise_by: str, wrapped: bool) -> None:
    both = []
    for secure in (True, False):
        asked = Privacy(secure=secure, clip=0.7, quantile=0.5, noise=1.0, noise_by=noise_by)
        mean = MaskedMean()
        rule = private(ServerMomentum(inner=mean) if wrapped else mean, asked, seed=3)
        shared, state = shared_of(), rule.init(shared_of())
        for _ in range(3):
            shared, state = rule.apply(shared, state, updates())
        both.append((shared, state))
        assert clip_in(state) not in (None, 0.7)
    assert tensors.equal(both[0][0], both[1][0])
    assert tensors.equal(both[0][1], both[1][1])


def test_a_share_with_much_noise_moves_it_by_one_step_at_most() -> None:
    for share in (-7.0, 0.0, 1.0, 9.0):
        assert math.exp(-0.2) <= next_clip(1.0, share, 0.5, 0.2) <= math.exp(0.2)
    assert next_clip(1e-9, 1.0, 0.1, 1.0) == 1e-9


def test_the_cases_of_pfl_research() -> None:
    """Its tests/privacy/test_adaptive_clipping.py: noise .6 beside a count whose noise is 1 of a step of 1, and two
    bounds of 3 with half of the cohort within."""
    assert pytest.approx(on_values(0.6, count=1 / (2 * 0.6))) == 0.6 * 1.25
    assert next_clip(3.0, 0.5, 0.5, 0.1) == 3.0
    assert next_clip(3.0, 0.5, 0.2, 0.2) == pytest.approx(2.825293600752746, rel=1e-14)


def test_what_cannot_be_is_refused() -> None:
    for asked, why in (
        ({"quantile": 0.5}, "set clip too"),
        ({"clip": 1.0, "quantile": 1.5}, r"quantile=1.5 must be in \(0, 1\)"),
        ({"clip": 1.0, "quantile": 0.5, "clip_rate": 0}, "clip_rate=0 must be above 0"),
    ):
        with pytest.raises(ConfigError, match=why):
            Privacy(**asked)  # type: ignore[arg-type]
    for wrong in (np.array([1.0]), np.array(np.nan), np.array(1)):
        with pytest.raises(StateError, match="is damaged"):
            clip_in({KEY: wrong})


def test_a_simulation_says_where_it_went_and_resumes_from_there(tmp_path: object) -> None:
    from pathlib import Path

    rng = np.random.default_rng(0)
    y = np.tile([0, 1], 60)
    x = rng.normal(size=(120, 1, 16)) + 2 * y[:, None, None]
    data = talaria.data.Federated.from_arrays(x, y, np.repeat(["anna", "bela", "cleo", "dana"], 30))
    asked = {"secure": True, "clip": 5.0, "quantile": 0.5, "epsilon": 8.0, "holders": 2}
    folder = Path(str(tmp_path)) / "run"
    whole = talaria.simulate("fedavg", data, rounds=3, privacy=asked, save=folder)
    told = whole.as_dict()["privacy"]
    assert (told["clip"], told["clip_now"]) == (5.0, clip_in(whole.learned.server))
    assert told["clip_now"] != 5.0
    assert told["epsilon"] == pytest.approx(8.0, rel=1e-9)
    assert talaria.resume(folder, data=data).as_dict() == whole.as_dict()


def test_how_many_were_cut_has_its_noise_in_a_part_of_a_ring_too() -> None:
    """A coordinator that says who left parts the ring, and opens what so few of it tell beside their values."""
    asked = Privacy(secure=True, clip=0.5, quantile=0.5, noise=1.5, noise_by="devices", holders=4, degree=6)
    coordinates = Coordinates.of(shared_of(), None)
    terms = PrivateMean(privacy=asked).terms(coordinates, 40, 0, fleet="f", round=1, attempt=1)
    names = [f"d{i:02}" for i in range(40)]
    bits = bitsets(graph(names, terms.degree, b""), names)
    order = sorted(names, key=lambda name: hashlib.sha256(b"talaria/ring/1\x00" + name.encode()).digest())
    alive = sum(1 << names.index(name) for name in (*order[3:7], *order[10:37]))
    assert alive.bit_count() >= terms.threshold
    assert smallest_part(alive, bits) == terms.needed == 4
    of_a_part = 1 / math.hypot(terms.clip / terms.noise / 2, 0.5 / terms.metric_noise / 2)
    assert of_a_part >= 1.5
    assert 1.5 <= terms.noise_by_devices <= of_a_part
