"""The run's kit, for devices without torch: the file that fleet.toml names, or one that is made when it is first asked
for, by a process of its own, and kept beside the state."""

from __future__ import annotations

from talaria import durable
from talaria.errors import ConfigError, StateError
from talaria.federated import kit as kits
from talaria_coordinator.config.fleet import FleetConfig
from talaria_coordinator.fleet import blueprints


def given(config: FleetConfig) -> None:
    """Raise :class:`~talaria.errors.ConfigError` or :class:`~talaria.errors.StateError` where fleet.toml names a kit
    that is none, or another run's."""
    if config.kit is not None:
        kits.open_kit(config.kit).require(config.run)


def prepared(config: FleetConfig) -> bytes:
    """The kit's file. It may take a minute, the first time.

    Raises :class:`~talaria.errors.ConfigError` where there is none of the run, or nothing here to make it with, and
    :class:`~talaria.errors.StateError` where the disk refuses.
    """
    if config.kit is not None:
        given(config)
        return config.kit.read_bytes()
    path = blueprints.beside(config.state, "kit", config.run)
    try:
        data = durable.read(path, kits.LARGEST + 1)
        kits.decode(data).require(config.run)
        return data
    except (FileNotFoundError, StateError):
        data = _made(config.run.to_json())
        durable.write_as("fleet:", path, data)
        return data
    except OSError as error:
        raise StateError(f"fleet: cannot read {path}: {error.strerror}; mend its rights") from None


def _made(text: str) -> bytes:
    try:
        return kits.made(text)
    except ConfigError as error:
        if not any(kind in str(error) for kind in ("ModuleNotFoundError", "ImportError")):
            raise
        mend = "where torch is, `talaria programs kit FLEET.TOML` makes it; name it here: [fleet] kit"
        raise ConfigError(f"{error}; {mend}") from None
