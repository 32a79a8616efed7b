"""What of a site's settings lies with the fleet above: which run it learns. ``talaria gateway`` keeps it in the site's
state folder, so that the other commands know it too."""

from __future__ import annotations

from pathlib import Path

from talaria import durable
from talaria.errors import ConfigError, StateError, so_that_it_can_be_written
from talaria.federated.run import Run

RUN = "run.json"


def kept_run(state: Path) -> Run | None:
    """The run of the fleet above, as it was heard last; None before it was. Raises
    :class:`~talaria.errors.StateError` where it cannot be read."""
    path = state / RUN
    try:
        return Run.from_json(durable.read(path).decode(), allow=None)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, ConfigError) as error:
        raise StateError(f"gateway: {path} cannot be read ({error}); delete it, and start the gateway") from None


def keep_run(state: Path, run: Run) -> None:
    """Keep the run. Raises :class:`~talaria.errors.StateError` where the disk refuses."""
    path = state / RUN
    try:
        state.mkdir(parents=True, exist_ok=True)
        durable.write(path, run.to_json().encode())
    except OSError as error:
        raise StateError(
            f"gateway: {path} could not be written: {error.strerror}; {so_that_it_can_be_written(error)}"
        ) from None


def run_above(state: Path) -> Run:
    """As :func:`kept_run`. Raises :class:`~talaria.errors.ConfigError` before it was heard."""
    run = kept_run(state)
    if run is None:
        raise ConfigError(
            f"gateway: the fleet above has not said yet what is learned ({state / RUN} is not there); start it by "
            "`talaria gateway run`"
        )
    return run
