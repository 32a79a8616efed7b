"""What else each round would say of a device and a run that do not fit, said at once."""

from __future__ import annotations

from collections.abc import Iterator

from talaria.errors import TalariaError
from talaria.federated import device_task, run_model
from talaria.federated.run import Run
from talaria_edge.config import DeviceConfig
from talaria_edge.data import DeviceData, checked


def misfits(config: DeviceConfig, run: Run, looked: DeviceData | None) -> Iterator[tuple[str, dict[str, str]]]:
    """Events with their facts: a plan, an engine or names of classes that are not for this run, a bundle that cannot be
    made here, and samples (``looked``, where they were read) that are not for its model."""
    if config.no_bundle:
        yield "error", {"error": config.no_bundle}
    try:
        device_task.require_engine(run, config.engine)
        if config.plan is not None:
            device_task.require_plan(run, config.plan)
        config.names_of(run.spec.classes)
    except TalariaError as error:
        yield "error", {"error": str(error)}
    try:
        if looked is not None:
            parts = None if config.kit else run_model.named_inputs(run)  # a kit spares even a device that has torch
            checked(looked, run.spec.input_shape, run.spec.classes, run.task, parts)
    except TalariaError as error:
        yield "data", {"error": str(error), "mend": "rounds are declined until then"}
