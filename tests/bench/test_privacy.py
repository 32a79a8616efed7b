"""The benchmark of secure rounds measures a round whose sum is exact."""

from talaria_bench.privacy import measure


def test_a_small_round_is_measured() -> None:
    found = measure(8, 0.05, 0, 0.25)
    assert found["left"] == 2
    assert found["neighbours"] == 7
    assert 0 < found["opened_share"] <= 1
    assert found["device"]["values_ratio"] <= 1
    assert found["device"]["extra_per_neighbour"] < 2048
    assert found["coordinator"]["secure_s"] > 0
