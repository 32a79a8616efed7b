"""Shamir's sharing is exact, and fewer shares than the threshold say nothing."""

import hashlib
import random
from contextlib import suppress
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from talaria.errors import ConfigError, WireError
from talaria.privacy.shamir import PRIME, SHARE_BYTES, choices, join, split, weights, wrong_ones

secrets = st.binary(min_size=32, max_size=32)


@given(secrets, secrets, st.integers(1, 9), st.integers(0, 5), st.randoms(use_true_random=False))
def test_any_enough_shares_give_the_secret(
    secret: bytes, entropy: bytes, threshold: int, more: int, chance: random.Random
) -> None:
    shares = dict(enumerate(split(secret, threshold, threshold + more, entropy), 1))
    chosen = chance.sample(sorted(shares), chance.randint(threshold, threshold + more))
    assert join({x: shares[x] for x in chosen}) == secret


@given(secrets, secrets, secrets, st.integers(2, 7))
def test_fewer_shares_fit_every_secret(secret: bytes, entropy: bytes, other: bytes, threshold: int) -> None:
    shares = dict(enumerate(split(secret, threshold, threshold, entropy), 1))
    *known, last = shares
    scale = weights([*known, last])
    rest = sum(int.from_bytes(shares[x], "big") * w for x, w in zip(known, scale, strict=False))
    forged = (int.from_bytes(other, "big") - rest) * pow(scale[-1], -1, PRIME) % PRIME
    assert join({**{x: shares[x] for x in known}, last: forged.to_bytes(SHARE_BYTES, "big")}) == other


def test_a_wrong_share_is_another_secret_or_none() -> None:
    secret = bytes(range(32))
    shares = dict(enumerate(split(secret, 3, 3, bytes(32)), 1))
    shares[2] = (int.from_bytes(shares[2], "big") ^ 1).to_bytes(SHARE_BYTES, "big")
    with suppress(WireError):
        assert join(shares) != secret


@pytest.mark.parametrize(("threshold", "holders"), [(3, 3), (3, 4), (5, 9), (14, 20)])
def test_as_many_wrong_shares_as_may_be_are_left_out_wherever_they_stand(threshold: int, holders: int) -> None:
    """Of twenty shares, two wrong ones in the midst were never both left out."""
    tried = dict(choices(range(1, holders + 1), threshold))
    assert all(scale == weights(chosen) for chosen, scale in tried.items())
    most = wrong_ones(threshold, holders)
    assert most == min(2, holders - threshold)
    for wrong in combinations(range(1, holders + 1), most):
        assert any({*chosen}.isdisjoint(wrong) for chosen in tried)


def test_the_format_stays() -> None:
    shares = split(bytes(range(32)), 3, 5, bytes(range(32, 64)))
    assert all(len(share) == SHARE_BYTES for share in shares)
    assert hashlib.sha256(b"".join(shares)).hexdigest()[:16] == "bae2cf06e7e8e432"


def test_the_field_is_of_the_smallest_prime_above_2_to_256() -> None:
    def prime(n: int) -> bool:  # Miller and Rabin, with bases enough for an error below 4^-40
        odd, twos = n - 1, 0
        while odd % 2 == 0:
            odd, twos = odd // 2, twos + 1
        chance = random.Random(0)
        for _ in range(40):
            x = pow(chance.randrange(2, n - 1), odd, n)
            if x in (1, n - 1):
                continue
            if not any((x := x * x % n) == n - 1 for _ in range(twos - 1)):
                return False
        return True

    assert next(n for n in range((1 << 256) + 1, (1 << 256) + 400, 2) if prime(n)) == PRIME


@pytest.mark.parametrize(("threshold", "holders"), [(0, 3), (4, 3), (1, 5000)])
def test_sizes_that_cannot_be_are_refused(threshold: int, holders: int) -> None:
    with pytest.raises(ConfigError, match=f"{threshold} .*{holders}|{holders} .*{threshold}"):
        split(bytes(32), threshold, holders, bytes(32))


def test_what_are_no_shares_is_refused() -> None:
    with pytest.raises(WireError, match="no element"):
        join({1: b"\xff" * SHARE_BYTES})
    with pytest.raises(WireError, match="no element"):
        join({1: bytes(32)})
    with pytest.raises(WireError, match="distinct"):
        weights([1, 1])
    with pytest.raises(WireError, match="distinct"):
        weights([0])
