"""One frozen configuration of a coordinator, from ``fleet.toml``: docs/reference/settings.md lists its fields."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TypeVar

from sqlalchemy import URL

from talaria import valid
from talaria.config import Section, read_toml
from talaria.errors import ConfigError
from talaria.federated.fedbuff_run import Buffering
from talaria.federated.private_rule import private_rule, require_cohort
from talaria.federated.rounds import check_over, needed, require_travels
from talaria.federated.run import Run
from talaria.federated.run_file import run_of
from talaria.federated.server_rule import aggregator_of, least_of, located, require_enough
from talaria.foreign import shown
from talaria.identity.credentials import require_login, require_no_password
from talaria.wire.chunks import CHUNK, LEAST
from talaria.wire.frames import MAX_PAYLOAD
from talaria.wire.topics import DEVICE_NAME, DEVICE_RULE, FLEET_NAME, FLEET_RULE
from talaria_coordinator.config.api import ApiConfig, api_of
from talaria_coordinator.config.gateways import gateways_of, require_gateways
from talaria_coordinator.config.ingest import require_workers, workers_of
from talaria_coordinator.config.privacy import PrivacyConfig, privacy_of, require_asked, require_secure
from talaria_coordinator.config.store import StoreConfig, store_of
from talaria_coordinator.config.upstream import run_above

MODES = ("synchronous", "asynchronous")
_STEP = ("quorum", "over")
_BUFFER = ("buffer", "max_staleness", "damping")


@dataclass(frozen=True)
class Draw:
    """Whom a fleet's rounds ask. ``least``: the fewest updates that the rule folds; no round has a smaller quorum. The
    others are those of :class:`FleetConfig`."""

    run: Run
    members: tuple[str, ...]
    expected: int
    quorum: float
    over: float
    least: int
    buffering: Buffering | None
    privacy: PrivacyConfig | None = None


@dataclass(frozen=True, kw_only=True)
class Canary:
    """How a run that begins from another's model is tried: by the share ``share`` of the members, for ``rounds``
    rounds; called off where more than ``refused`` of those whose gates answered refuse its model."""

    share: float = 0.2
    refused: float = 0.3
    rounds: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigError(f"canary: share={self.share:g} must be in (0, 1]: of the members, those who try first")
        if not 0 <= self.refused < 1:
            raise ConfigError(f"canary: refused={self.refused:g} must be in [0, 1): of the gates")
        if not 1 <= self.rounds <= 10_000:
            raise ConfigError(f"canary: rounds={self.rounds} must be in 1..10000: learned before the gates are asked")


_Read = TypeVar("_Read")


@dataclass(frozen=True, kw_only=True)
class FleetConfig:
    """Everything that a coordinator needs for one fleet. ``members`` (or, where empty, the first ``devices`` to
    come) are the roster that cohorts are drawn from. Who is shut out gives its place among the first up to the next who
    comes; ``members`` is a list that nobody else gets into."""

    name: str
    run: Run
    state: Path
    devices: int = 0
    members: tuple[str, ...] = ()
    grows: bool = False
    """Whether who comes after the first ``devices`` is a member too, from the next round on."""
    away_days: float = 0.0
    """Days after which a member that is away is not drawn until it comes again; 0: never."""
    broker: str = "auto"
    host: str = "127.0.0.1"
    port: int = 0
    username: str | None = None
    """At a hosted broker, whose certificate a public authority signed; its password is in ``password_file``."""
    password_file: Path | None = None
    identity: Path | None = None
    """The folder of the fleet's keys: devices must be enrolled, all is signed, and the broker's links are TLS."""
    deadline_s: float = 600.0
    quorum: float = 0.5
    over: float = 0.0
    """Share of devices asked beyond those that a round needs; it closes with those who come first."""
    buffering: Buffering | None = None
    """How an asynchronous run folds; None for rounds in step."""
    aggregator: str | None = None
    """A rule instead of the algorithm's own, as :func:`talaria.federated.server_rule.rule_named` reads it."""
    canary: Canary | None = None
    """How a new run is tried first; None: by all at once."""
    privacy: PrivacyConfig | None = None
    """Secure sums and a privacy budget; None: updates are seen as they are."""
    chunk: int = CHUNK
    """Bytes of a chunk of a model or an update; fewer where the broker takes no such messages."""
    retry_s: float = 2.0
    max_update: int = 64 << 20
    kit: Path | None = None
    """What devices without torch learn from, as a file; None: it is made when one of them asks."""
    api: ApiConfig | None = None
    """Where API, metrics and dashboard are served; None: nowhere."""
    store: StoreConfig = field(default_factory=StoreConfig)
    """Which database and which blobs hold the state."""
    workers: int = 0
    """Ingest workers: processes that receive, check and keep the updates of their devices; 0: this process does."""
    gateways: Mapping[str, int] = field(default_factory=dict)
    """Members that send a partial sum of their site's updates, each with the most devices that it may speak for."""
    site: bool = False
    """Whether its rounds and global models come from a fleet above: a gateway serves it."""
    stay: bool = True
    """Serve the final global model to newcomers after the last round, instead of leaving once all members have it."""

    def __post_init__(self) -> None:
        require_no_password(self.broker)
        require_login("broker", self.username, self.password_file)
        if self.username is not None and "://" not in self.broker:
            raise ConfigError(
                f"broker: username={shown(self.username)} is for a broker that runs already; give its url, or leave "
                f"username and password_file out: the one that url={self.broker!r} starts asks for none"
            )
        if not re.fullmatch(FLEET_NAME, self.name):
            raise ConfigError(f"fleet: name={shown(self.name)} must be {FLEET_RULE}")
        for member in self.members:
            if not re.fullmatch(DEVICE_NAME, member):
                raise ConfigError(f"fleet: member {shown(member)} must be {DEVICE_RULE}")
        if not self.members and self.devices < 1:
            raise ConfigError(
                f"fleet: devices={self.devices} must be at least 1: how many to wait for; or name them in members=[...]"
            )
        if self.grows and self.members:
            raise ConfigError(
                f"fleet: grows={self.grows} and members=[...] exclude each other: a list admits nobody else; "
                "leave one of them out"
            )
        if self.canary is not None and self.buffering is not None:
            raise ConfigError(
                "canary: share needs rounds in step, and this fleet has none; leave [canary] out, or set [rounds] "
                'mode = "synchronous"'
            )
        if not 0 <= self.away_days <= 36500:
            raise ConfigError(f"fleet: away_days={self.away_days:g} must be in 0..36500; 0 leaves nobody out")
        if not 0 < self.quorum <= 1:
            raise ConfigError(f"rounds: quorum={self.quorum} must be a share in (0, 1]")
        require_travels(self.run)
        check_over(self.run, self.over)
        require_mode(self.run, self.buffering, self.expected, self.deadline_s)
        rule = aggregator_of(self.run, self.aggregator, self.buffering)
        if not self.grows:
            require_enough(self.run, rule, self.expected)
        require_workers(self.workers, self.privacy is not None and self.privacy.rule.secure, self.broker)
        if self.privacy is not None:
            require_secure(self.privacy, self.run, self.identity is not None, self.expected, self.over)
            if not self.grows:
                require_asked(self.privacy, self.run, self.expected)
            private_rule(self.run, rule, self.privacy.rule, 0)
            if not self.grows:
                require_cohort(self.privacy.rule, needed(self.run, self.expected))
        private, tried = self.privacy is not None, self.canary is not None
        require_gateways(self.gateways, self.members, self.run, rule, private=private, tried=tried)

    @property
    def expected(self) -> int:
        """How many devices are waited for before the first round."""
        return len(self.members) or self.devices

    @cached_property
    def draw(self) -> Draw:
        """Whom its rounds ask."""
        least = least_of(self.run, aggregator_of(self.run, self.aggregator, self.buffering))
        return Draw(self.run, self.members, self.expected, self.quorum, self.over, least, self.buffering, self.privacy)

    @property
    def database(self) -> Path | URL:
        """Where the fleet's database lies: a path (SQLite), or a URL, which does not print its password."""
        return self.store.where(self.state)


def load_config(path: str | Path) -> FleetConfig:
    """The configuration in the fleet.toml at ``path``; paths in it are relative to its folder.

    Returns:
        The :class:`FleetConfig`, complete and checked.

    Raises:
        ConfigError: The file cannot be read, or a field is missing, unknown or wrong; it names field, value and mend.

    Example:
        >>> import pathlib, tempfile, talaria_coordinator
        >>> path = pathlib.Path(tempfile.mkdtemp(), "fleet.toml")
        >>> text = '[fleet]\\nname="watch"\\ndevices=2\\n[run]\\nalgorithm="fedper"\\ndefaults="smartwatch"\\n'
        >>> _ = path.write_text(text + '[run.spec]\\ninput_shape=[6,100]\\nclasses=7\\n')
        >>> talaria_coordinator.load_config(path).run.algorithm
        'fedper'
    """
    top = read_toml(valid.path("settings", "path", path))
    if "device" in top.values:
        raise ConfigError(f"{path}: holds a device's settings, [device]; give the fleet's, such as fleet.toml")
    if top.raw("upstream", None) is not None:
        return site_of(top, run_above(top.table("fleet").path("state", "state")))
    buffering = buffering_of(top.table("rounds"))
    return config_of(top, run_of(top.table("run"), asynchronous=buffering is not None))


def site_of(top: Section, run: Run) -> FleetConfig:
    """The configuration of a site whose fleet above learns ``run``; ``[upstream]`` is the gateway's own."""
    return replace(config_of(top, run), site=True)


def config_of(top: Section, run: Run) -> FleetConfig:
    """The configuration of a fleet that learns ``run``, from all tables of ``top`` but ``[run]``."""
    fleet, broker, rounds = top.table("fleet"), top.table("broker"), top.table("rounds")
    identity = top.table("identity")
    rule = rounds.text("aggregator", None)
    buffering = buffering_of(rounds)

    def table(name: str, read: Callable[[Section], _Read]) -> _Read | None:
        section = top.table(name)
        return read(section) if name in top.values else None

    made = partial(  # what stands in the wrong place is told before what lacks by that
        FleetConfig,
        name=fleet.text("name"),
        run=run,
        state=fleet.path("state", "state"),
        devices=fleet.whole("devices", 0),
        members=fleet.names("members", ()),
        grows=fleet.flag("grows", False),
        away_days=fleet.number("away_days", 0.0, high=36500.0),
        stay=fleet.flag("stay", True),
        kit=fleet.path("kit", None),
        broker=broker.text("url", "auto"),
        host=broker.text("host", "127.0.0.1"),
        port=broker.whole("port", 0, high=65535),
        chunk=broker.whole("chunk_kib", CHUNK >> 10, low=LEAST >> 10, high=MAX_PAYLOAD >> 10) << 10,
        username=broker.text("username", None),
        password_file=broker.path("password_file", None),
        identity=identity.path("folder", None),
        deadline_s=rounds.number("deadline_s", 600.0),
        quorum=rounds.number("quorum", 0.5, high=1.0),
        over=rounds.number("over", 0.0, high=10.0),
        buffering=buffering,
        retry_s=rounds.number("retry_s", 2.0, low=0.05, high=3600),
        aggregator=None if rule is None else located(rule, Path(top.file).parent),
        max_update=rounds.whole("max_update", 64 << 20, low=1024, high=2**32),
        canary=table("canary", canary_of),
        privacy=table("privacy", lambda section: privacy_of(section, run)),
        store=store_of(top.table("store")),
        workers=table("ingest", workers_of) or 0,
        gateways=gateways_of(top.table("gateways")),
        api=table("api", api_of),
    )
    for section in (fleet, broker, identity, rounds):
        section.done()
    top.done()
    return made()


def canary_of(section: Section) -> Canary:
    """What a ``[canary]`` table says."""
    found = Canary(
        share=section.number("share", Canary.share, high=1.0),
        refused=section.number("refused", Canary.refused, high=1.0),
        rounds=section.whole("rounds", Canary.rounds),
    )
    section.done()
    return found


def buffering_of(section: Section) -> Buffering | None:
    """The buffer that a ``[rounds]`` table asks for; None for rounds in step. Raises :class:`ConfigError` for an option
    of the other mode."""
    mode = section.text("mode", "synchronous")
    if mode not in MODES:
        raise section.bad("mode", f"must be one of {', '.join(MODES)}")
    for name in _STEP if mode == "asynchronous" else _BUFFER:
        if name in section.values:
            other = "synchronous" if mode == "asynchronous" else "asynchronous"
            raise section.bad(name, f'needs mode = "{other}"; leave it out, or change the mode')
    if mode == "synchronous":
        return None
    return Buffering(
        buffer=section.whole("buffer", Buffering.buffer, low=1),
        max_staleness=section.whole("max_staleness", Buffering.max_staleness),
        damping=section.number("damping", Buffering.damping, high=10.0),
    )


def require_mode(run: Run, buffering: Buffering | None, members: int, deadline_s: float) -> None:
    """Raise :class:`ConfigError` where run, buffer and fleet do not fit."""
    if run.asynchronous != (buffering is not None):
        raise ConfigError("rounds: an asynchronous run has a buffer, and one in step has none; give both or neither")
    if buffering is None:
        return
    buffering.require(members)
    if deadline_s == 0:
        raise ConfigError(
            "rounds: deadline_s=0 never asks those again who could not take part; give the seconds after which a "
            "buffer that is not full asks everybody idle once more"
        )
