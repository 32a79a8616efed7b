import pytest

from talaria.errors import ConfigError
from talaria.planning.budget import AccuracyCheck, Budget
from talaria.planning.cost import predicted


def test_units_stand_in_the_names() -> None:
    budget = Budget.parse(["latency_ms=5,upload_kb=200", "bundle_bytes=1500000"])
    assert budget.limits() == {"latency_ms": 5, "upload_mb": pytest.approx(0.2), "bundle_mb": pytest.approx(1.5)}
    assert Budget.from_json(budget.to_json()) == budget
    assert Budget.parse([]).limits() == {}


@pytest.mark.parametrize(
    ("texts", "word"),
    [
        (["latency=5"], "latency"),
        (["latency_ms"], "NAME=NUMBER"),
        (["latency_ms=fast"], "NAME=NUMBER"),
        (["latency_ms=0"], "above 0"),
        (["latency_ms=-1"], "above 0"),
        (["latency_ms=nan"], "finite"),
        (["latency_ms=inf"], "finite"),
        (["latency_ratio=1.5"], "unpruned"),
        (["accuracy_drop=1"], "accuracy_drop"),
        (["upload_mb=1", "upload_kb=1"], "twice"),
        (["run_memory_mb=5", "train_memory_mb=4"], "nearest possible: train_memory_mb=5"),
    ],
)
def test_what_no_device_could_mean_is_refused_with_the_field(texts: list[str], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        Budget.parse(texts)


def test_a_limit_is_kept_by_what_is_just_as_much_and_broken_by_more() -> None:
    budget = Budget(upload_mb=0.3, latency_ratio=0.5)
    assert budget.broken({"upload_mb": 0.1 + 0.2, "bundle_mb": 9.0}) == {}
    assert budget.broken({"upload_mb": 0.301, "latency_ratio": 0.5}) == {"upload_mb": 0.301}


def test_a_plan_tells_latencies_without_what_is_kept_in_hand() -> None:
    found = {"latency_ms": 11.0, "latency_ratio": 0.55, "upload_mb": 1.23456}
    assert predicted(found, 0.1) == {"latency_ms": 10.0, "latency_ratio": 0.5, "upload_mb": 1.235}


def test_a_truth_value_is_not_a_limit() -> None:
    with pytest.raises(ConfigError, match="finite"):
        Budget(latency_ms=True)


@pytest.mark.parametrize(
    ("planned", "dense", "allowed", "samples", "kept"),
    [
        (0.90, 0.91, 0.01, 100, True),
        (0.89, 0.91, 0.01, 100, False),
        (0.62, 0.91, 0.29, 100, True),
        (297 / 300, 1.0, 0.01, 300, True),
        (296 / 300, 1.0, 0.01, 300, False),
        (0.95, 0.91, 0.0, 100, True),
        (0.0, 0.0, 0.01, 0, None),
        (0.80, 0.84, 0.01, 10, False),  # R², of which no sample has a share
        (0.8499, 0.85001, 0.01, 10, True),
    ],
)
def test_an_accuracy_limit_is_kept_broken_or_unknown(
    planned: float, dense: float, allowed: float, samples: int, kept: bool | None
) -> None:
    check = AccuracyCheck(planned, dense, allowed, samples)
    assert check.kept is kept
    assert check.left >= 0
    assert check.to_json()["kept"] is kept
    word = {True: "kept", False: "broken", None: "cannot be checked"}[kept]
    assert word in check.reason
