"""The bench of folds holds all results to the reference before it measures one, and says how far it is."""

import json
from collections.abc import Callable

import numpy as np
import pytest
from typer.testing import CliRunner

from talaria.aggregate.masked import MaskedMean
from talaria.cli.main import app
from talaria.tensors import Tensors
from talaria_bench.aggregation import measure


def nan(model: Tensors) -> Tensors:
    return {**model, "fc.bias": np.full_like(model["fc.bias"], np.nan)}


def short(model: Tensors) -> Tensors:
    return {name: value for name, value in model.items() if name != "fc.bias"}


def shifted(model: Tensors) -> Tensors:
    return {**model, "s0.0.weight": np.roll(model["s0.0.weight"], 1, 0)}


@pytest.mark.parametrize("flaw", [nan, short, shifted])
def test_a_fold_that_is_wrong_is_not_measured(
    flaw: Callable[[Tensors], Tensors], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is no number is never larger than a bound, and a tensor that is not there differs from nothing."""
    right = MaskedMean.apply

    def apply(*given: object) -> tuple[Tensors, Tensors]:
        model, state = right(*given)  # type: ignore[arg-type]
        return flaw(model), state

    monkeypatch.setattr(MaskedMean, "apply", apply)
    with pytest.raises(AssertionError, match="results differ from the dense float64 reference"):
        measure(3, 3, 0.05, 1, 0.5)


def test_how_far_it_is_stands_beside_its_figures() -> None:
    given = ["bench", "aggregation", "--clients", "5", "--rounds", "1", "--scale", "0.05", "--json"]
    found = CliRunner().invoke(app(given), given)
    assert [one["masks"] for one in json.loads(found.stdout)["settings"]] == [5, 4]
    assert found.stderr.splitlines() == ["5 clients, 5 masks, rounds: 1", "5 clients, 4 masks, rounds: 1"]
