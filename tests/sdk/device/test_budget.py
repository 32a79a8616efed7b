import pytest

from talaria.device.budget import Budget
from talaria.errors import ConfigError


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


def test_a_truth_value_is_not_a_limit() -> None:
    with pytest.raises(ConfigError, match="finite"):
        Budget(latency_ms=True)
