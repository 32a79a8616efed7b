import json

import pytest

from talaria_bench.export import _missed, import_cost, measure


def test_figures_are_complete_plain_data():
    """One model, untrained and hardly timed: what is tested is that every figure is there and adds up."""
    figures = measure(["imu_cnn"], epochs=0, seconds=0.02)
    row = json.loads(json.dumps(figures))["models"]["imu_cnn"]
    assert row["verified"]
    assert row["max_abs_diff"] <= 1e-4
    assert row["file_to_raw"] <= 1.03
    assert row["size_ratio"] <= 0.5
    assert row["accuracy_lost"] == pytest.approx(row["accuracy_dense"] - row["accuracy"])
    assert min(row["samples"].values()) > 0
    assert isinstance(row["missed"], list)
    assert {one["name"] for one in row["variants"]} == {"fp32", "fp16", "int8", "int8-linear"}
    chosen = next(one for one in row["variants"] if one["name"] == row["default"])
    assert chosen["latency_ratio"] == row["latency_ratio"] > 0


@pytest.mark.parametrize(
    ("change", "word"),
    [({"latency_ratio": 0.3}, "latency"), ({"size_ratio": 0.21}, "size"), ({"accuracy_lost": 0.02}, "accuracy")],
)
def test_missed_aims_are_named(change, word):
    row = {"latency_ratio": 0.28, "size_ratio": 0.2, "accuracy_lost": 0.01, "dense_variants": []}
    assert _missed("imu_cnn", row) == []
    (words,) = _missed("imu_cnn", row | change)
    assert words.startswith(word)
    careless = {"name": "int8", "passed": True, "agreement": 0.97}
    assert "0.970" in _missed("imu_cnn", row | {"dense_variants": [careless]})[0]


def test_import_cost_counts_both():
    cost = import_cost(repeats=1)
    assert set(cost) == {"onnxruntime", "predictor"}
    assert min(cost.values()) > 0
