"""Draws that any language can repeat: Philox 4x64-10 by the algorithm's own definition, and what is made of its words.

Fixed numbers here are promises: another number would give every run of this seed other cohorts and other stragglers.
"""

import math
from collections import Counter
from statistics import fmean, median

import numpy as np
import pytest
import torch
from tolerance import roundings

from talaria import seeds
from talaria.federated import rounds
from talaria.federated.run import Run
from talaria.model.spec import ModelSpec
from talaria.simulation import stragglers
from talaria.simulation.stragglers import delay

FULL = 2**64 - 1
DRAWS = [
    (
        (0, "", 1, "cohort"),
        0x6B65525AEC6E57F4,
        (0x83E399EE0858C449, 0x2FEAF5A561C9392F, 0xA2AF11801D055FFD, 0xAFA67E6FF1C23A71, 0xCA7B86BC8C5FBCA6),
        [1, 6, 5, 0, 2, 3, 4, 7],
        0.5151916700491226,
    ),
    (
        (7, "anna", 3, "delay"),
        0x422FD3EAC38E6B5B,
        (0x539D2C77015BB872, 0xA5920A860E8C52EF, 0xDB876D43497A265D, 0x969C97010564EF80, 0xEAD90B9F072D832F),
        [0, 3, 1, 5, 2, 4, 6, 7],
        0.32661703019526456,
    ),
    (
        (1, "Zoë", 0, "pace"),
        0x69BCA0802A170178,
        (0xDABD03C68AB38088, 0x5110D7CF665D0FBB, 0xB633383C2589D065, 0xEA263DEF30D915E2, 0x1DBC6C751EF565B3),
        [4, 5, 1, 6, 7, 2, 0, 3],
        0.8544466361733623,
    ),
]
"""What is asked for; its seed, first words, order of eight, and number in [0, 1)."""


def philox(key, counter):
    """Four words of Philox 4x64-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3; SC 2011)."""
    (k0, k1), (a, b, c, d) = key, counter
    for _ in range(10):
        left, right = 0xD2E7470EE14C6C93 * a, 0xCA5A826395121157 * c
        a, b, c, d = (right >> 64) ^ b ^ k0, right & FULL, (left >> 64) ^ d ^ k1, left & FULL
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & FULL, (k1 + 0xBB67AE8584CAA73B) & FULL
    return [a, b, c, d]


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        (
            (0, 0),
            (0, 0, 0, 0),
            [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B],
        ),
        (
            (FULL, FULL),
            (FULL, FULL, FULL, FULL),
            [0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0],
        ),
        (
            (0x452821E638D01377, 0xBE5466CF34E90C6C),
            (0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89),
            [0xA528F45403E61D95, 0x38C72DBD566E9788, 0xA5A1610E72FD18B5, 0x57BD43B5E52B7FE6],
        ),
    ],
)
def test_the_reference_here_gives_the_known_answers(key, counter, expected):
    """Those of Random123, the authors' own library."""
    assert philox(key, counter) == expected


@pytest.mark.parametrize(("asked", "seed", "words", "order", "number"), DRAWS)
def test_draws_are_those_of_ever(asked, seed, words, order, number):
    assert seeds.seed_of(*asked) == seed
    assert tuple(seeds.words(5, *asked).tolist()) == words
    assert seeds.order(8, *asked) == order
    assert seeds.uniform(*asked) == number


@pytest.mark.parametrize("asked", [draw[0] for draw in DRAWS])
@pytest.mark.parametrize("count", [0, 1, 4, 5, 1001])
def test_words_are_blocks_of_philox_from_counter_one(asked, count):
    key = (seeds.seed_of(*asked), 0)
    expected = [word for block in range(1, count // 4 + 2) for word in philox(key, (block, 0, 0, 0))][:count]
    found = seeds.words(count, *asked)
    assert (found.dtype, found.shape) == (np.dtype(np.uint64), (count,))
    assert found.tolist() == expected
    assert seeds.order(count, *asked) == sorted(range(count), key=expected.__getitem__)
    if count:
        assert seeds.uniform(*asked) == (expected[0] >> 11) / 2**53


@pytest.mark.parametrize("key", [0, 1, FULL, FULL + 1, 3 << 100, 2**128 - 1])
def test_a_key_may_have_two_words(key):
    """As that of a device that rounds its update at random, which nobody may guess."""
    assert seeds.Draws(key).words(4).tolist() == philox((key & FULL, key >> 64), (1, 0, 0, 0))


def test_every_part_of_the_question_changes_the_draw():
    asked = [(0, "anna", 1, "cohort"), (1, "anna", 1, "cohort"), (0, "bert", 1, "cohort"), (0, "anna", 2, "cohort")]
    asked += [(0, "anna", 1, "delay"), (0, "anna1", 1, "cohort"), (0, "anna", 11, "cohort")]
    assert len({tuple(seeds.words(2, *one).tolist()) for one in asked}) == len(asked)


def test_no_other_draw_is_disturbed_and_none_disturbs():
    before, mine = torch.get_rng_state(), np.random.get_state()[1].copy()
    first = seeds.order(50, 3, "", 9, "cohort")
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], mine)
    torch.rand(3)
    seeds.uniform(3, "", 9, "delay")
    assert seeds.order(50, 3, "", 9, "cohort") == first
    torch.set_rng_state(before)


@pytest.mark.parametrize("count", [0, 1, 2, 7, 1000])
def test_an_order_holds_everybody_once(count):
    for round in range(5):
        assert sorted(seeds.order(count, 0, "", round, "cohort")) == list(range(count))


def test_the_earlier_comes_first_between_equal_words(monkeypatch):
    """Two of 2**64 words are hardly ever equal, but another language must then say the same."""
    monkeypatch.setattr(seeds.Draws, "words", lambda own, count: np.array([9, 2, 9, 2, FULL, 0, 9], np.uint64)[:count])
    assert seeds.order(7, 0, "", 1, "cohort") == [5, 1, 3, 0, 2, 6, 4]


def test_every_order_comes_about_as_often():
    """Pearson's chi-squared over the 24 orders of four: above 49.7 in one of a thousand, with 23 degrees of freedom."""
    drawn = Counter(tuple(seeds.order(4, seed, "", round, "cohort")) for seed in range(40) for round in range(120))
    assert len(drawn) == 24
    assert sum((seen - 200) ** 2 / 200 for seen in drawn.values()) < 49.7


def test_everybody_comes_to_every_place_about_as_often():
    """What a cohort is: the first few. Ten of ten places, 81 degrees of freedom: above 126 in one of a thousand."""
    places = np.zeros((10, 10))
    for round in range(3000):
        places[np.arange(10), seeds.order(10, 5, "", round, "cohort")] += 1
    assert ((places - 300) ** 2 / 300).sum() < 126


def test_numbers_spread_evenly_from_nought_to_below_one():
    """Kolmogorov and Smirnov: the largest gap between shares is above 1.95 / sqrt(n) in one of a thousand."""
    drawn = np.sort([seeds.uniform(seed, f"c{client}", 1, "delay") for seed in range(40) for client in range(100)])
    assert drawn[0] >= 0
    assert drawn[-1] < 1
    expected = (np.arange(len(drawn)) + 0.5) / len(drawn)
    assert np.abs(drawn - expected).max() < 1.95 / math.sqrt(len(drawn))
    neighbours = [(seeds.uniform(0, "c", n, "delay"), seeds.uniform(0, "c", n + 1, "delay")) for n in range(4000)]
    assert abs(np.corrcoef(np.array(neighbours).T)[0, 1]) < 3.3 / math.sqrt(len(neighbours))


@pytest.mark.parametrize(("word", "number"), [(0, 0.0), (2**11 - 1, 0.0), (2**11, 2**-53), (FULL, 1 - 2**-53)])
def test_the_largest_word_is_below_one(word, number, monkeypatch):
    monkeypatch.setattr(seeds.Draws, "words", lambda own, count: np.array([word], np.uint64))
    assert seeds.uniform(0, "c", 1, "delay") == number


RUN = Run(spec=ModelSpec("imu_cnn", (6, 32), 3), algorithm="fedper", fraction=0.5)


def test_a_cohort_is_the_head_of_the_order():
    names = tuple("hgfedcba")
    assert rounds.cohort(RUN, 1, names) == ("a", "b", "f", "g")  # 1, 6, 5 and 0 of the sorted names
    assert rounds.cohort(RUN, 1, names, over=0.25) == ("a", "b", "c", "f", "g")
    assert rounds.cohort(RUN, 1, ()) == ()


def test_members_are_asked_equally_often():
    names = tuple(f"client-{n:02d}" for n in range(10))
    asked = Counter(name for round in range(1, 2001) for name in rounds.cohort(RUN, round, names))
    assert sum(asked.values()) == 10_000
    assert max(abs(asked[name] - 1000) for name in names) < 4 * math.sqrt(2000 * 0.25)


def test_delays_are_those_of_ever():
    """A log, an exponential and the normal's quantiles by rational functions: some roundings of a library's own."""
    assert roundings(delay(7, "anna", 3), 1.0863787458595635) < 64
    assert roundings(delay(1, "Zoë", 1), 1.2431800695723605) < 64


def test_a_devices_nature_is_log_normal_around_one():
    """A training takes half of a pace and an exponential number of halves beside it: a mean of one pace."""
    logs = [math.log(stragglers._pace(0, f"c{n}")) for n in range(4000)]
    error = stragglers.SPREAD / math.sqrt(len(logs))
    assert abs(fmean(logs)) < 4 * error
    assert abs(math.sqrt(fmean(v * v for v in logs)) - stragglers.SPREAD) < 4 * error / math.sqrt(2)
    assert sum(v > math.log(4) for v in logs) / len(logs) == pytest.approx(1 / 40, abs=0.01)
    paced = [delay(0, "c0", n) / stragglers._pace(0, "c0") for n in range(4000)]
    assert min(paced) >= 0.5 - 1e-12
    assert abs(fmean(paced) - 1) < 4 * 0.5 / math.sqrt(len(paced))
    assert abs(median(paced) - (0.5 + 0.5 * math.log(2))) < 4 * 0.5 / math.sqrt(len(paced))


@pytest.mark.parametrize("number", [0.0, 1 - 2**-53])
def test_the_ends_of_the_draw_are_delays_too(number, monkeypatch):
    monkeypatch.setattr(stragglers, "uniform", lambda *asked: number)
    assert 0 < delay(9, f"never drawn before {number}", 1) < math.inf


def test_draws_go_on_where_they_stopped_and_can_be_copied() -> None:
    one, parts = seeds.Draws(11), seeds.Draws(11)
    whole = one.words(13)
    first = parts.words(6)
    again = parts.copy()
    assert [*first, *parts.words(7)] == [*whole] == [*first, *again.words(7)]


def test_every_draw_is_made_of_words() -> None:
    """By the definitions that the docstrings give, in plain Python."""
    draws = seeds.Draws(5)
    words = [int(w) for w in draws.copy().words(40)]
    even = [(w >> 11) / 2**53 for w in words]
    assert draws.uniform(2, 2).ravel().tolist() == even[:4]
    assert draws.integers(-3, 4, 5).tolist() == [-3 + math.floor(7 * u) for u in even[4:9]]
    assert draws.order(6).tolist() == sorted(range(6), key=lambda i: words[9 + i])
    length = [math.sqrt(-2 * math.log1p(-u)) for u in even[15:18]]
    turn = [2 * math.pi * v for v in even[18:21]]
    circle = list(zip(length, turn, strict=True))
    expected = [r * math.cos(t) for r, t in circle] + [r * math.sin(t) for r, t in circle[:2]]
    assert roundings(draws.normal(5).astype(np.float32), np.array(expected)) <= 2
    assert draws.words(1)[0] == words[21]


def test_normal_draws_are_normal() -> None:
    drawn = seeds.Draws(3).normal(20_000)
    assert abs(drawn.mean()) < 0.03
    assert abs(drawn.std() - 1) < 0.02
    assert abs((drawn < 1).mean() - 0.8413) < 0.01
    assert np.isfinite(seeds.Draws(4).normal(3, 0)).all()
