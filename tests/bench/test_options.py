"""Benchmarks refuse numbers that they cannot measure with, before they measure."""

import pytest
from typer.testing import CliRunner

from talaria.cli.main import app


@pytest.mark.parametrize(
    "words",
    [
        "aggregation --clients 0", "aggregation --rounds 0", "aggregation --keep 2", "aggregation --scale 0",
        "engines --rounds 0", "export --keep 0", "export --size 0", "export --seconds 0", "export --epochs -1",
        "privacy --leaving 2", "privacy --leaving -1",
    ],
)  # fmt: skip
def test_a_number_out_of_range_is_named(words: str) -> None:
    given = ["bench", *words.split(), "--json"]
    found = CliRunner().invoke(app(given), given)
    assert found.exit_code == 2, found.exception
    assert f"Invalid value for '{given[2]}'" in found.output
