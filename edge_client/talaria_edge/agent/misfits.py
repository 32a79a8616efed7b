"""What else each round would say of a device and a run that do not fit, said at once."""

from __future__ import annotations

from collections.abc import Iterator

from talaria.errors import ConfigError, TalariaError
from talaria.federated import rounds
from talaria.federated.run import Run
from talaria_edge.config import DeviceConfig
from talaria_edge.data import DeviceData, checked


def misfits(config: DeviceConfig, run: Run, looked: DeviceData | None) -> Iterator[tuple[str, dict[str, str]]]:
    """Events with their facts: a plan, an engine or names of classes that are not for this run, and samples
    (``looked``, where they were read) that are not for its model."""
    try:
        rounds.require_engine(run, config.engine)
        if config.plan is not None:
            rounds.require_plan(run, config.plan)
        require_names(config, run)
    except TalariaError as error:
        yield "error", {"error": str(error)}
    try:
        if looked is not None:
            checked(looked, run.spec.input_shape, run.spec.classes, run.task)
    except TalariaError as error:
        yield "data", {"error": str(error), "mend": "rounds are declined until then"}


def require_names(config: DeviceConfig, run: Run) -> None:
    """Raise :class:`~talaria.errors.ConfigError` where the bundle that this device makes at the end of ``run`` would
    have more names than classes, or fewer."""
    if config.bundle is not None and config.labels and len(config.labels) != run.spec.classes:
        raise ConfigError(
            f"device: labels={len(config.labels)} names are not for the {run.spec.classes} classes of the run, and no "
            "bundle can be made; give one for each class in the fleet's order, or leave labels out, and start again"
        )
