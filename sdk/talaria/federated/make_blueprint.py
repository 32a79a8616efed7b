"""Makes the blueprint of a run, which takes torch: in this process, or in one of its own that ends with it
(``python -m talaria.federated.make_blueprint < RUN.JSON > FILE``).
"""

from __future__ import annotations

import sys

from talaria.federated import own_process, run_model
from talaria.federated.blueprint import encode
from talaria.federated.run import Run


def made(run_json: str) -> bytes:
    """The file of a run, made in a process of its own.

    Raises :class:`~talaria.errors.ConfigError` where the run's model cannot be had.
    """
    return own_process.made("talaria.federated.make_blueprint", run_json, "run: its model cannot be worked out")


def here(run: Run) -> bytes:
    """The file of a run, made in this process; raises as :func:`made`."""
    return encode(run_model.first_shared(run), run_model.layout_of(run.spec), run_model.split_of(run))


if __name__ == "__main__":
    sys.exit(own_process.main(here))
