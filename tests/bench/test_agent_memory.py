"""The bench of an agent's memory tells what went wrong, and leaves nothing behind."""

from pathlib import Path

import pytest

from talaria.errors import StateError
from talaria_bench.fleet.agent_memory import measured


def test_a_coordinator_that_does_not_serve_is_told_in_words(tmp_path: Path) -> None:
    """It was a StopIteration with its traceback."""
    with pytest.raises(StateError, match="the coordinator ended before it was ready"):
        measured(tmp_path, 0, 1)  # which no coordinator takes
