"""The opened sum is the plain integer sum, bit by bit, whatever happens on the way.

Hundreds of rounds by default; thousands: ``pytest tests/privacy/test_secure_sum.py --hypothesis-profile=minutes``.
"""

from itertools import combinations
from random import Random
from traceback import extract_tb

import numpy as np
import pytest
from cohorts import COORDINATES, NAMES, contributions, disturbed, terms_of, who
from hypothesis import given, settings
from hypothesis import strategies as st

from talaria.errors import AggregationError
from talaria.privacy.coordinator import CoordinatorHalf, Opened
from talaria.privacy.in_process import plain_sum, secure_sum
from talaria.privacy.roster import Roster
from talaria.privacy.terms import Terms


def same(opened: Opened, plain: Opened) -> None:
    assert opened.survivors == plain.survivors
    for name in ("rows", "sums", "holders"):
        assert np.array_equal(getattr(opened, name), getattr(plain, name)), name
    assert opened.weights == plain.weights
    assert opened.metrics == plain.metrics


@st.composite
def rounds(draw: st.DrawFn) -> tuple[Terms, tuple[str, ...], dict[str, tuple[str, ...]]]:
    count = draw(st.integers(3, 7))
    threshold = draw(st.integers(count // 2 + 1, count))
    terms = terms_of(
        threshold,
        holders=draw(st.none() | st.integers(2, threshold)),
        bits=draw(st.sampled_from((16, 32))),
        most_weight=draw(st.sampled_from((0, 50))),
        tiers=draw(st.integers(1, 4)),
        metrics=draw(st.sampled_from(((), ("loss", "accuracy")))),
    )
    names = NAMES[:count]
    leaving = draw(st.lists(st.sampled_from(names), unique=True, max_size=count - threshold))
    phases = ("shares", "masked", "agreed", "openings")
    out: dict[str, tuple[str, ...]] = {}
    for name in leaving:
        phase = draw(st.sampled_from(phases))
        out[phase] = (*out.get(phase, ()), name)
    return terms, names, out


@settings(max_examples=2 * settings().max_examples)
@given(rounds(), st.integers(0, 1000), st.integers(0, 2**32))
def test_what_opens_is_the_plain_sum(
    asked: tuple[Terms, tuple[str, ...], dict[str, tuple[str, ...]]], seed: int, chance: int
) -> None:
    terms, names, leaving = asked
    given_ = contributions(names, seed, terms)
    members = set(names) - set(leaving.get("shares", ()))
    survivors = members - set(leaving.get("masked", ()))
    opened, _ = disturbed(terms, given_, leaving, Random(chance))
    same(opened, plain_sum(terms, COORDINATES, given_, members=members, survivors=survivors))


def test_messages_of_another_round_change_nothing() -> None:
    earlier, terms = terms_of(3), terms_of(3, attempt=2)
    given_ = contributions(NAMES[:4], 5, terms)
    _, old = disturbed(earlier, given_, {}, Random(0))
    opened, _ = disturbed(terms, given_, {"agreed": ["d2"]}, Random(1), old)
    same(opened, plain_sum(terms, COORDINATES, given_))


@pytest.mark.parametrize("leaving", [{}, {"masked": ["d3", "d7"]}, {"shares": ["d1"], "agreed": ["d0"]}])
def test_with_neighbours_alone_it_is_the_same_sum(leaving: dict[str, list[str]]) -> None:
    terms = terms_of(6, degree=4, own_threshold=3, most_weight=50, holders=2)
    given_ = contributions(NAMES, 3, terms, kinds=1)
    opened = secure_sum(terms, COORDINATES, given_, who(), leaving=leaving, least=2)
    members = set(NAMES) - set(leaving.get("shares", ()))
    plain = plain_sum(terms, COORDINATES, given_, members=members, survivors=members - set(leaving.get("masked", ())))
    assert (opened.rows <= plain.rows).all()
    assert opened.rows.any()
    both = COORDINATES.values(opened.rows)
    assert np.array_equal(opened.sums[both], plain.sums[both])


@pytest.mark.parametrize("phase", ["shares", "masked", "agreed", "openings"])
def test_one_more_that_leaves_and_nothing_opens(phase: str) -> None:
    terms = terms_of(4)
    given_ = contributions(NAMES[:5], 1, terms)
    with pytest.raises(AggregationError, match="4 must be there"):
        secure_sum(terms, COORDINATES, given_, who(), leaving={phase: ["d0", "d3"]})


def test_fewer_survivors_than_holders_are_not_asked_to_open() -> None:
    terms = terms_of(4, holders=5)
    with pytest.raises(AggregationError, match=r"4 are too few for holders=5; try again") as found:
        secure_sum(terms, COORDINATES, contributions(NAMES[:5], 1, terms), who(), leaving={"masked": ["d0"]})
    assert "opened" not in {frame.name for frame in extract_tb(found.value.__traceback__)}


@pytest.mark.parametrize("phase", ["masked", "agreed", "openings"])
def test_where_too_few_of_a_devices_neighbours_stay_nothing_opens_and_it_is_not_blamed(phase: str) -> None:
    terms = terms_of(6, degree=4, own_threshold=4, holders=2)
    given_ = contributions(NAMES, 3, terms, kinds=1)
    leaving = [name for name in NAMES if name != "d0"]
    found = []
    for pair in combinations(leaving, 2):
        try:
            secure_sum(terms, COORDINATES, given_, who(), leaving={phase: pair}, least=2)
        except AggregationError as error:
            found.append(error)
    assert found
    for error in found:
        assert type(error) is AggregationError
        assert "3 of those who hold shares of 'd" in str(error)
        asked = "opened" in {frame.name for frame in extract_tb(error.__traceback__)}
        assert asked == (phase == "openings"), "nobody is asked to open what will not"


def test_whose_shares_a_device_holds_is_worked_out_once_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was once for each share: of a thousand devices that took as long as all else of a round."""
    asked, holders, opened = list[str](), Roster.holders, CoordinatorHalf.opened
    monkeypatch.setattr(Roster, "holders", lambda self, owner: asked.append(owner) or holders(self, owner))
    monkeypatch.setattr(CoordinatorHalf, "opened", lambda self: asked.clear() or opened(self))
    terms = terms_of(6)
    secure_sum(terms, COORDINATES, contributions(NAMES, 1, terms), who())
    assert 0 < len(asked) <= 2 * len(NAMES)


def test_the_mean_of_metrics_and_the_weights_of_classes_open() -> None:
    terms = terms_of(3, most_weight=100, metrics=("loss",))
    given_ = contributions(NAMES[:4], 2, terms, kinds=0)
    opened = secure_sum(terms, COORDINATES, given_, who())
    losses = [one.metrics["loss"] for one in given_.values()]
    unit = terms.metric_bound / terms.side.unit
    assert abs(opened.metrics["loss"] - sum(losses) / 4) <= unit
    assert opened.weights == (int(sum(one.weight for one in given_.values())),)
