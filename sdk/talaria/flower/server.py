"""The server's half of a Flower app in one call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from talaria import durable, valid
from talaria.algorithms.base import Algorithm
from talaria.data.federated import Federated
from talaria.errors import ConfigError, StateError
from talaria.federated.global_model import encode_model
from talaria.flower.settings import nested
from talaria.flower.strategy import TalariaStrategy
from talaria.simulation.experiment import Experiment, prepare

# flwr is imported after the strategy, which says what to install where it is missing.
from flwr.app import Context  # isort: skip
from flwr.serverapp import Grid, ServerApp  # isort: skip

_ASKED = (
    "model", "rounds", "seed", "task", "options", "recipe", "aggregator", "adapters", "pretrained", "fraction",
    "buffers", "codec", "download", "data_options", "evaluate_every",
)  # fmt: skip
"""What of :func:`talaria.simulate` a Flower app takes."""


def server_app(
    algorithm: str | Algorithm | None = None,
    data: str | Federated | None = None,
    *,
    nodes: int = 2,
    save: str | Path | None = None,
    **asked: Any,
) -> ServerApp:
    """The ServerApp that lets the nodes of :func:`~talaria.flower.client_app` learn.

    Args:
        algorithm: A name, or an object; None: ``talaria.algorithm`` of the app's config, else ``"fedavg"``.
        data: The dataset, by name or as an object, for its shape, its labels and what suits it; nothing is trained on
            it here. None: ``talaria.data`` of the app's config.
        nodes: As in :class:`~talaria.flower.TalariaStrategy`.
        save: A file for the global model (safetensors) after the last round.
        **asked: ``model``, ``rounds``, ``seed``, ``recipe``, ``codec`` ... as in :func:`talaria.simulate`.

    The app's config may say all of these, too, as plain values below ``talaria`` (``[tool.flwr.app.config.talaria]``,
    ``flwr run . --run-config 'talaria.rounds=5'``); it comes before what is said here. Raises
    :class:`~talaria.errors.ConfigError` for what a Flower app does not take.
    """
    valid.only("flower", asked, _ASKED)
    app = ServerApp()

    def main(grid: Grid, context: Context) -> None:
        given = {"algorithm": algorithm, "data": data, "nodes": nodes, "save": save, **asked}
        given |= nested(context.run_config)
        least, file = given.pop("nodes"), given.pop("save")
        if file is not None:
            file = valid.path("flower", "save", file)
        experiment = experiment_of(given)
        strategy = TalariaStrategy(
            experiment.run, aggregator=experiment.rule, nodes=least, evaluate_every=experiment.evaluate_every
        )
        strategy.start(grid)
        if file is not None:
            _keep(file, encode_model(strategy.shared, experiment.run.download))

    app.main()(main)
    return app


def experiment_of(given: dict[str, Any]) -> Experiment:
    """The experiment of the arguments ``given``. Raises :class:`ConfigError` for what a Flower app does not take."""
    valid.only("flower", given, ("algorithm", "data", *_ASKED))
    asked = dict(given)
    algorithm, data = asked.pop("algorithm", None), asked.pop("data", None)
    if data is None:
        raise ConfigError(
            "flower: no data; name it in server_app(algorithm, data), or as talaria.data under [tool.flwr.app.config]"
        )
    return prepare("fedavg" if algorithm is None else algorithm, data, **{"rounds": 30, **asked})


def _keep(path: Path, data: bytes) -> None:
    try:
        durable.write(path, data, mode=0o644)
    except OSError as error:
        raise StateError(f"{path}: cannot be written ({error.strerror}); name a file in a folder of yours") from error
