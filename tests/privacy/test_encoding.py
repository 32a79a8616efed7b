"""Values as whole numbers, coordinates as rows, messages as bytes."""

import numpy as np
import pytest
from cohorts import COORDINATES, LAYOUT, NAMES, SHAPES, contributions, device, mask, terms_of
from hypothesis import given
from hypothesis import strategies as st

from talaria.errors import AggregationError, ConfigError, TooLarge, WireError
from talaria.model.masks import gather
from talaria.privacy import messages, roster
from talaria.privacy.clipping import WITHIN
from talaria.privacy.fixed_point import Grid
from talaria.privacy.neighbours import bitsets, chances, graph, smallest_part
from talaria.privacy.terms import Terms


@pytest.mark.parametrize(("bits", "most"), [(16, 1), (16, 100), (32, 1), (32, 100), (32, 1024)])
@pytest.mark.parametrize("side", [-1e30, 1e30])
def test_no_sum_leaves_the_modulus(bits: int, most: int, side: float) -> None:
    grid = Grid(bits, most)
    worst = grid.encode(np.full(3, side, np.float32), 0.7, 1.0)
    assert abs(int(grid.signed(worst)[0])) == grid.unit
    total = (worst.astype(np.uint64) * most).astype(grid.dtype)
    assert grid.signed(total).tolist() == [int(np.sign(side)) * grid.unit * most] * 3


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=9), st.floats(0.01, 1), st.sampled_from((16, 32)))
def test_each_value_is_off_by_half_a_step_at_most(values: list[float], share: float, bits: int) -> None:
    grid, x = Grid(bits, 9), np.array(values)
    back = grid.decode(grid.encode(x, 2.0, share), 2.0)
    assert np.abs(back - share * x).max() <= 0.5 * 2.0 / grid.unit * (1 + 1e-9)


def test_what_is_no_number_or_leaves_no_bits_is_refused() -> None:
    with pytest.raises(AggregationError, match="NaN"):
        Grid(32, 3).encode(np.array([1.0, np.nan]), 1, 1)
    with pytest.raises(ConfigError, match="bits"):
        Grid(8, 3)
    with pytest.raises(ConfigError, match="bits=32"):
        Grid(16, 1024)


@given(st.integers(0, 2**32))
def test_rows_are_what_masks_keep(seed: int) -> None:
    rng = np.random.default_rng(seed)
    one = mask(rng)
    dense = {k: rng.normal(size=s).astype(np.float32) for k, s in SHAPES.items()}
    flat = np.concatenate([v.reshape(-1) for v in dense.values()])
    compact = np.concatenate([v for _, v in COORDINATES.flat(gather(dense, one), one)])
    assert np.array_equal(flat[COORDINATES.values(COORDINATES.rows(one))], compact)
    other = COORDINATES.rows(mask(rng))
    rows = COORDINATES.rows(one)
    at = COORDINATES.within(rows, rows & other)
    both = flat[COORDINATES.values(rows & other)]
    assert np.array_equal(compact if at is None else compact[at], both)
    for long in (0, 1024):  # as runs, and as indices
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("talaria.privacy.coordinates._LONG", long)
            places = COORDINATES.places(rows, rows & other)
        assert np.array_equal(roster.taken(compact, places), both)
        whole = np.arange(len(compact), dtype=np.uint32)
        expected = whole.copy()
        expected[slice(None) if at is None else at] += np.uint32(7)
        roster.sign(whole, places, np.full(len(both), 7, np.uint32), plus=True)
        assert np.array_equal(whole, expected)
        roster.sign(whole, places, np.full(len(both), 7, np.uint32), plus=False)
        assert np.array_equal(whole, np.arange(len(compact)))
    assert roster.mask_of(LAYOUT, roster.packed(one)) == (None if one.is_full else one)


@given(st.integers(2, 12), st.integers(0, 5), st.binary(min_size=32, max_size=32))
def test_neighbours_are_mutual_and_as_many_as_asked(devices: int, half: int, seed: bytes) -> None:
    names = [f"n{i:02}" for i in range(devices)]
    edges = graph(names, 2 * half, seed)
    want = devices - 1 if half == 0 or 2 * half >= devices - 1 else 2 * half
    for name, others in edges.items():
        assert len(others) == want
        assert name not in others
        assert all(name in edges[other] for other in others)
    assert smallest_part((1 << devices) - 1, bitsets(edges, names)) == devices


def test_the_smallest_part_is_found() -> None:
    edges = bitsets({"a": ("b",), "b": ("a", "c"), "c": ("b",), "d": ("e",), "e": ("d",)}, "abcde")
    assert smallest_part(0b11111, edges) == 2
    assert smallest_part(0b00111, edges) == 3
    assert smallest_part(0b00101, edges) == 1
    assert smallest_part(0, edges) == 0


def test_chances_are_exact_where_they_can_be_counted() -> None:
    # 4 devices, all share with all: a round fails where more than 1 of 4 leaves; 3 colluding ones open the fourth.
    assert chances(4, 3, 3, colluding=2, leaving=1) == (0.0, 0.0)
    assert chances(4, 3, 3, colluding=3, leaving=2) == (1.0, 1.0)
    fails, shows = chances(100, 40, 25, colluding=10, leaving=10)
    assert fails < 1e-6
    assert shows == 0.0


def every_message() -> list[messages.Message]:
    terms = terms_of(2, most_weight=9, metrics=("loss",))
    given_ = contributions(NAMES[:3], 0, terms)
    devices = {name: device(terms, name, one) for name, one in given_.items()}
    from cohorts import AUTHORITY

    from talaria.privacy.coordinator import CoordinatorHalf

    coordinator = CoordinatorHalf(terms, COORDINATES, AUTHORITY.public)
    out: list[messages.Message] = [half.advert() for half in devices.values()]
    for advert in tuple(out):
        coordinator.receive(advert)
    while coordinator.phase != "openings" or not coordinator.complete:
        for name, message in coordinator.proceed().items():
            answer = devices[name].receive(message)
            out += [message, answer]
            coordinator.receive(answer)
    return out


def test_messages_come_back_from_their_bytes_and_nothing_else_does() -> None:
    found = every_message()
    assert {type(one) for one in found} == set(messages.ALL)
    rng = np.random.default_rng(0)
    for one in found:
        data = one.encode()
        assert messages.decode(data) == one
        for _ in range(5):
            cut = data[: int(rng.integers(len(data)))]
            with pytest.raises(WireError):
                messages.decode(cut)
        with pytest.raises(TooLarge):
            messages.decode(data, len(data) - 1)


@given(st.binary(max_size=200))
def test_garbage_is_a_wire_error(data: bytes) -> None:
    with pytest.raises(WireError):
        messages.decode(data)
    with pytest.raises(WireError):
        Terms.decode(data)


def test_terms_come_back_and_are_checked() -> None:
    terms = terms_of(3, metrics=("loss",), degree=4, own_threshold=3)
    assert Terms.decode(terms.encode()) == terms
    assert Terms.decode(terms.encode()).digest == terms.digest
    for wrong, why in (
        ({"threshold": 1}, "threshold=1 must"),
        ({"threshold": 10}, "threshold=10 must"),
        ({"threshold": 3, "holders": 1}, "holders=1 must"),
        ({"threshold": 3, "degree": 3}, "degree=3 must be even"),
        ({"threshold": 3, "degree": 4, "own_threshold": 2}, "own_threshold=2 must"),
        ({"threshold": 3, "own_threshold": 2}, "own_threshold=2 goes with a degree"),
        ({"threshold": 3, "bits": 24}, "bits=24 must"),
        ({"threshold": 3, "bound": float("nan")}, "bound=nan must"),
        ({"threshold": 3, "most_weight": 1 << 31}, "most_weight=2147483648 must"),
        ({"threshold": 3, "metrics": ("a", "a")}, "metrics"),
        ({"threshold": 3, "noise": 1.0}, "noise=1 hides what is cut to a length; give clip too"),
        ({"threshold": 3, "clip": 1.0, "noise": 1.0, "metrics": ("loss",)}, "noise=1 is on values alone"),
        ({"threshold": 3, "clip": 1.0, "noise": 1.0, "most_weight": 8}, "noise=1 is on values alone"),
    ):
        with pytest.raises(ConfigError, match=why):
            terms_of(**wrong)  # type: ignore[arg-type]


def test_what_is_told_beside_the_values_counts_for_the_noise_that_an_owner_asks_for() -> None:
    """A coordinator that lies could have it without any noise, and the values with enough."""
    noisy = {"clip": 2.0, "noise": 4.0, "holders": 4}
    assert terms_of(4).noise_by_devices == 0
    assert terms_of(4, **noisy).noise_by_devices == 4  # type: ignore[arg-type]
    for beside, least, most in ((0.0, 0, 0), (5e-324, 0, 1e-300), (0.25, 0.97, 0.98), (1e9, 4 - 1e-9, 4)):
        told = terms_of(4, **noisy, metrics=(WITHIN,), metric_noise=beside)  # type: ignore[arg-type]
        assert least <= told.noise_by_devices <= most
        ring = terms_of(6, **noisy, metrics=(WITHIN,), metric_noise=beside, degree=4, own_threshold=3)  # type: ignore[arg-type]
        assert ring.noise_by_devices == told.noise_by_devices, "a part of four may be told from the others"
