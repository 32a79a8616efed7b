import json

from talaria_export.bench import import_cost, measure


def test_figures_are_complete_plain_data():
    """One model, untrained and hardly timed: what is tested is that every figure is there and adds up."""
    figures = measure(["imu_cnn"], epochs=0, seconds=0.02)
    row = json.loads(json.dumps(figures))["models"]["imu_cnn"]
    assert row["verified"]
    assert row["max_abs_diff"] <= 1e-4
    assert row["file_to_raw"] <= 1.03
    assert row["size_ratio"] <= 0.5
    assert {one["name"] for one in row["variants"]} == {"fp32", "fp16", "int8", "int8-linear"}
    chosen = next(one for one in row["variants"] if one["name"] == row["default"])
    assert chosen["latency_ratio"] == row["latency_ratio"] > 0


def test_import_cost_counts_both():
    cost = import_cost(repeats=1)
    assert set(cost) == {"onnxruntime", "predictor"}
    assert min(cost.values()) > 0
