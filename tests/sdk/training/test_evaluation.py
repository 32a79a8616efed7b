"""Metrics and their summary against values worked out by hand."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from talaria.errors import DataError
from talaria.tensors import Array
from talaria.training.evaluation import Metrics, evaluate, metrics_of, report, summarize
from talaria.types import Samples


def scores(predicted: list[int], classes: int = 3) -> Array:
    return np.eye(classes, dtype=np.float32)[predicted]


def test_accuracy_and_macro_recall_by_hand() -> None:
    # label 0: 3 of 4 found, label 2: 0 of 1 found, label 1 does not occur and does not count.
    got = metrics_of(scores([0, 0, 0, 1, 0]), np.array([0, 0, 0, 0, 2]))
    assert got == Metrics(accuracy=0.6, macro_recall=0.375, samples=5)


def test_a_diverged_model_does_not_score() -> None:
    got = metrics_of(np.full((4, 3), np.nan), np.zeros(4, np.int64))
    assert got.accuracy == got.macro_recall == 0.0


def test_evaluate_uses_eval_mode_restores_modes_and_keeps_no_gradient() -> None:
    model = nn.Sequential(nn.Dropout(0.99), nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[1].eval()
    with torch.no_grad():
        model[2].weight.copy_(torch.eye(2))
        model[2].bias.zero_()
    model.train()
    model[1].eval()
    x = np.tile(np.eye(2, dtype=np.float32), (300, 1))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    got = evaluate(model, Samples(x, np.tile([0, 1], 300)), batch=7)
    assert got == Metrics(1.0, 1.0, 600)
    assert [m.training for m in (model, *model)] == [True, True, False, True]
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_evaluate_refuses_no_samples() -> None:
    with pytest.raises(DataError, match="no sample"):
        evaluate(nn.Linear(2, 2), Samples(np.zeros((0, 2), np.float32), np.zeros(0, np.int64)))


def test_summary_by_hand() -> None:
    got = summarize([0.5, 1.0, 0.0, 0.5], [1, 1, 1, 5])
    assert got.weighted == pytest.approx(4.0 / 8)
    assert got.mean == 0.5
    assert got.std == pytest.approx(0.125**0.5)
    assert (got.worst, got.worst_tenth) == (0.0, 0.0)


def test_worst_tenth_is_over_all_clients_rounded_up() -> None:
    values = [i / 100 for i in range(21)]
    assert summarize(values[::-1]).worst_tenth == pytest.approx((0 + 0.01 + 0.02) / 3)
    assert summarize(values[:20]).worst_tenth == pytest.approx(0.005)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40))
def test_summary_is_ordered(values: list[float]) -> None:
    got = summarize(values)
    assert got.worst <= got.worst_tenth + 1e-12
    assert got.worst_tenth <= got.mean + 1e-12
    assert got.mean <= max(values) + 1e-12
    assert got.std <= 0.5 + 1e-12
    assert got.weighted == pytest.approx(got.mean)


def test_report_orders_clients_and_round_trips_json() -> None:
    got = report({"b": Metrics(1.0, 1.0, 30), "a": Metrics(0.5, 0.25, 10)})
    assert list(got.clients) == ["a", "b"]
    assert got.accuracy.weighted == 0.875
    assert got.accuracy.mean == 0.75
    assert got.macro_recall.worst == 0.25
    data = json.loads(got.to_json())
    assert data["clients"]["a"] == {"accuracy": 0.5, "macro_recall": 0.25, "samples": 10}
    assert data["accuracy"]["worst_tenth"] == 0.5


def test_report_refuses_no_client() -> None:
    with pytest.raises(DataError, match="no client"):
        report({})
