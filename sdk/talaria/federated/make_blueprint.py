"""Makes the blueprint of a run, which takes torch: in this process, or in one of its own that ends with it
(``python -m talaria.federated.make_blueprint < RUN.JSON > FILE``).
"""

from __future__ import annotations

import sys

from talaria.federated import own_process, rounds
from talaria.federated.blueprint import encode
from talaria.federated.run import Run


def made(run_json: str) -> bytes:
    """The file of a run, made in a process of its own.

    Raises :class:`~talaria.errors.ConfigError` where the run's model cannot be had.
    """
    return own_process.made("talaria.federated.make_blueprint", run_json, "run: its model cannot be worked out")


def here(run: Run) -> bytes:
    """The file of a run, made in this process; raises as :func:`made`."""
    return encode(rounds.first_shared(run), rounds.layout_of(run.spec), rounds.split_of(run))


if __name__ == "__main__":
    sys.exit(own_process.main(here))
