"""The settings of a gateway, from its ``site.toml``: those of a ``fleet.toml`` without ``[run]``, which comes from
above, and below ``[upstream]`` those of a ``device.toml``, without samples::

[fleet]
name = "site-a"
devices = 3                 # or members = ["carl", ...]
[broker]
url = "auto"                # the site's own
[rounds]                    # the site's; they end at the latest after four fifths of what the fleet above leaves
quorum = 0.5

[upstream.device]
id = "site-a"               # this gateway's name in the fleet above, which has it in its [gateways]
[upstream.fleet]
name = "watch"
broker = "mqtts://fleet.example:8883"
[upstream.identity]
folder = "identity"         # made by `talaria edge join`
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from talaria.config import Section, read_toml
from talaria.errors import ConfigError, DataError
from talaria.federated.run import Run
from talaria.model.spec import ModelSpec
from talaria_coordinator.config import fleet
from talaria_coordinator.config.fleet import FleetConfig
from talaria_coordinator.config.gateways import require_summable_run
from talaria_edge import config as device
from talaria_edge.config import DeviceConfig
from talaria_edge.data import DeviceData

ELSEWHERE = {
    "run": "it comes from the fleet above",
    "gateways": "the devices of a site stand at its gateway",
    "canary": "new runs are tried by the fleet above",
    "privacy": "a partial sum is made of updates that the gateway sees",
    "ingest": "a site's coordinator takes up all updates itself",
}
"""Tables of a fleet.toml that a site has not, and why."""
_ANY = Run(spec=ModelSpec("imu_cnn", (6, 100), 2), algorithm="fedavg")
"""What the settings are read with before the run is known."""


class NoSamples:
    """Where a gateway's samples come from: it has none."""

    def load(self) -> DeviceData:
        """Raises :class:`~talaria.errors.DataError`."""
        raise DataError("a gateway has no samples; its devices have")


@dataclass(frozen=True)
class GatewayConfig:
    """``upstream`` is the member that the site is of the fleet above; the rest of the file waits for the run."""

    upstream: DeviceConfig
    top: Section
    state: Path
    """The site's folder, in which it is kept what the fleet above learns."""

    def site(self, run: Run) -> FleetConfig:
        """The site's fleet, which learns ``run``. Raises :class:`~talaria.errors.ConfigError` where the two do not fit,
        or partial sums do not serve the run."""
        require_summable_run(run)
        return fleet.site_of(self.top, run)


def load_config(path: str | Path) -> GatewayConfig:
    """The settings in the file at ``path``; paths in it are relative to its folder.

    Raises:
        ConfigError: The file cannot be read, or a field is missing, unknown or wrong; it names field, value and mend.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "site.toml")
        >>> text = '[fleet]\\nname="site-a"\\ndevices=3\\n'
        >>> _ = path.write_text(text + '[upstream]\\ndevice.id="site-a"\\n[upstream.fleet]\\nname="watch"\\nbroker="mqtt://127.0.0.1:1883"\\n')
        >>> load_config(path).upstream.device
        'site-a'
    """
    top = read_toml(Path(path))
    for name, why in ELSEWHERE.items():
        if name in top.values:
            raise top.bad(name, f"is no part of a site's settings: {why}; leave it out")
    rounds = top.table("rounds")
    for name, usual in (("mode", "synchronous"), ("aggregator", None), ("over", 0)):
        if rounds.raw(name, usual) != usual:
            raise rounds.bad(name, "is for the fleet above to say; leave it out")
    below = top.table("upstream")
    upstream = device.config_of(below, NoSamples())
    if "stay" not in below.table("device").values:  # whoever serves on hears on: the fleet above may be extended
        upstream = replace(upstream, stay=top.table("fleet").flag("stay", True))
    below.done()
    _require_no_learner(below, upstream)
    state = top.table("fleet").path("state", "state")
    config = GatewayConfig(replace(upstream, engine="torch"), top, state)  # it learns nothing: no kit is asked for
    config.site(_ANY)
    top.done()
    return config


def _require_no_learner(section: Section, upstream: DeviceConfig) -> None:
    """What is for a device that learns makes no sense here."""
    usual = DeviceConfig(device="a", fleet="a", broker="mqtt://a", state=upstream.state, source=upstream.source)
    for name in ("plan", "budget", "bundle", "kit", "guard", "secure", "home_assistant"):
        if getattr(upstream, name) != getattr(usual, name):
            raise ConfigError(
                f"{section.file}: [upstream] {name} is for a device that learns, and a gateway does not; leave it out"
            )
