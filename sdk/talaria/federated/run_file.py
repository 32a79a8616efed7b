"""The run that a fleet's settings describe: the ``[run]`` table of a fleet.toml."""

from __future__ import annotations

from pathlib import Path

from talaria.config import Section, read_toml
from talaria.data import presets
from talaria.errors import ConfigError
from talaria.federated.run import Run


def run_of(section: Section, *, asynchronous: bool) -> Run:
    """The run that a ``[run]`` table describes, in rounds or as ``[rounds] mode`` says."""
    if "asynchronous" in section.values:
        raise section.bad("asynchronous", 'is said by [rounds] mode = "asynchronous"; leave it out here')
    values = {name: value for name, value in section.values.items() if name != "defaults"}
    try:
        named = section.values.get("defaults")
        dataset = None if named is None else presets.require(named)
        return Run.of({**presets.completed(values, dataset), "asynchronous": asynchronous})
    except ConfigError as error:
        raise ConfigError(f"{section.file}: [run] {str(error).removeprefix('run: ')}") from None


def run_in(path: Path) -> Run:
    """The run of the fleet.toml at ``path``.

    Raises :class:`~talaria.errors.ConfigError` where the file cannot be read or describes no run.
    """
    top = read_toml(path)
    return run_of(top.table("run"), asynchronous=top.table("rounds").text("mode", "synchronous") == "asynchronous")
