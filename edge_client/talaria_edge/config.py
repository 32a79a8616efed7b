"""One frozen configuration of a device's agent, from ``device.toml``: docs/reference/settings.md lists its fields."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from talaria import valid
from talaria.config import Section, read_toml
from talaria.errors import ConfigError
from talaria.federated import own_plan, plan_compat
from talaria.federated.run import ENGINES, Engine
from talaria.foreign import shown
from talaria.identity.credentials import require_login, require_no_password
from talaria.planning.budget import Budget
from talaria.planning.plan import Plan
from talaria.plugins import has_torch, require_packages
from talaria.wire.topics import DEVICE_NAME, DEVICE_RULE, FLEET_NAME, FLEET_RULE
from talaria_edge.data import DataSource, NamedSource, NpzSource
from talaria_edge.home_assistant import HomeAssistant
from talaria_edge.recording.folder import FolderSource
from talaria_edge.training_policy import Rules, hours


def usual_engine() -> Engine:
    """Who trains where nobody says it."""
    return "torch" if has_torch() else "onnx"


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """Everything that one agent needs. ``profile`` is told to the coordinator: no private facts in it."""

    device: str
    fleet: str
    broker: str
    state: Path
    source: DataSource = field(repr=False)
    plan: Plan | None = None
    budget: Budget | None = None
    """What the device plans its own widths for, from its run's kit; None: it does not."""
    username: str | None = None
    """At a hosted broker, whose certificate a public authority signed; its password is in ``password_file``."""
    password_file: Path | None = None
    identity: Path | None = None
    """The folder of this device's keys: what it says is signed, and the coordinator must be the fleet's."""
    bundle: Path | None = None
    labels: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    """Forms of the model that the bundle may choose from; empty for all."""
    engine: Engine = field(default_factory=usual_engine)
    """Who trains: torch, or graphs of the same model in ONNX Runtime; torch wherever it is installed."""
    kit: Path | None = None
    """The run's graphs as a file; None: they are made here where torch is, and given by the coordinator elsewhere."""
    allow: tuple[str, ...] = ()
    """Top-level packages beside Talaria whose code the coordinator's run may name."""
    guard: Rules | None = None
    """When this device may train; None for always."""
    guard_every_s: float = 10.0
    secure: bool = False
    """Whether rounds are declined in which the coordinator could see this device's update."""
    least: int = 3
    """Devices, this one among them, that a secure sum must have."""
    least_noise: float = 0.0
    """Noise that the devices of a secure round add to its sum at least, in lengths that their updates are cut to."""
    home_assistant: HomeAssistant | None = None
    """How this device appears in Home Assistant; None: it does not."""
    profile: Mapping[str, Any] = field(default_factory=dict)
    retry_s: float = 2.0
    max_model: int = 512 << 20
    patience_s: float = 0.0
    """Seconds to wait for a broker that does not answer at first; 0 waits for ever."""
    stay: bool = False
    """Go on listening after the last round, instead of leaving."""

    def __post_init__(self) -> None:
        if not re.fullmatch(DEVICE_NAME, self.device):
            raise ConfigError(f"device: id={shown(self.device)} must be {DEVICE_RULE}")
        if not re.fullmatch(FLEET_NAME, self.fleet):
            raise ConfigError(f"fleet: name={shown(self.fleet)} must be {FLEET_RULE}, as the coordinator has it")
        require_packages("code: allow", self.allow)
        valid.different("device: labels", self.labels)
        if self.variants:
            from talaria_export.bundle.manifest import check_names

            check_names(self.variants)
        valid.among("device", "engine", self.engine, ENGINES)
        if self.kit is not None and self.engine != "onnx":
            raise ConfigError(f"device: kit={str(self.kit)!r} serves engine='onnx' alone; set engine = \"onnx\"")
        if self.budget is not None:
            self._require_own_plan(self.budget)
        require_no_password(self.broker)
        require_login("fleet", self.username, self.password_file)
        try:
            parts = urlsplit(self.broker)
            good = parts.scheme in ("mqtt", "mqtts", "ws", "wss") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            good = False
        if not good:
            raise ConfigError(
                f"fleet: broker={shown(self.broker)} is no broker's URL; "
                "write mqtt://host:1883, as the coordinator prints it"
            )
        if self.plan is not None and self.plan.precision == "fp16" and self.variants and "fp16" not in self.variants:
            raise ConfigError(
                f"device: variants={list(self.variants)} leave out 'fp16', which the plan needs to keep its bundle_mb; "
                "add it, or leave variants out"
            )

    @property
    def no_bundle(self) -> str:
        """Why the bundle that is asked for cannot be made here; empty where it can, and where none is asked for."""
        extra, needs = ("export", ("onnx", "onnxscript")) if self.engine == "torch" else ("bundle", ("onnx",))
        lacking = [] if self.bundle is None else [name for name in needs if find_spec(name) is None]
        return f"no bundle is written without {lacking[0]}: pip install 'talaria[{extra}]'" if lacking else ""

    def names_of(self, classes: int) -> tuple[str, ...]:
        """What the classes of a model of so many are called; empty where nobody said. Names beyond them are of classes
        that a later run has. Raises :class:`~talaria.errors.ConfigError` where the bundle that this device makes would
        lack some."""
        if self.bundle is not None and 0 < len(self.labels) < classes:
            raise ConfigError(
                f"device: labels={len(self.labels)} names are not for the {classes} classes of the run, and no bundle "
                "can be made; give one for each class in the fleet's order, or leave labels out, and start again"
            )
        return self.labels[:classes]

    def _require_own_plan(self, budget: Budget) -> None:
        if self.plan is not None:
            raise ConfigError("budget: a plan is given too, which says the widths; leave one of the two out")
        if self.engine != "onnx":
            raise ConfigError(
                f"budget: engine={self.engine!r}, but a device plans for itself from its run's kit; set [device] "
                'engine = "onnx", or write a plan by `talaria plan --json` and name it as [device] plan'
            )
        own_plan.require_answerable(budget)


def load_configs(paths: Sequence[Path]) -> list[DeviceConfig]:
    """The configurations in ``paths``. A fleet's own settings among them, as in ``DIR/*.toml``, are passed over; where
    there is nothing else, they are an error like any other."""
    tops = {path: read_toml(path) for path in paths}
    own = [path for path, top in tops.items() if "device" in top.values or "run" not in top.values]
    return [load_config(path) for path in own or paths]


def load_config(path: str | Path) -> DeviceConfig:
    """The configuration in the device.toml at ``path``; paths in it are relative to its folder.

    Returns:
        The :class:`DeviceConfig`, complete and checked.

    Raises:
        ConfigError: The file cannot be read, or a field is missing, unknown or wrong; it names field, value and mend.

    Example:
        >>> import pathlib, tempfile, talaria_edge
        >>> path = pathlib.Path(tempfile.mkdtemp(), "device.toml")
        >>> text = '[device]\\nid="anna"\\n[fleet]\\nname="watch"\\nbroker="mqtt://127.0.0.1:1883"\\n'
        >>> _ = path.write_text(text + '[data]\\nsource="smartwatch"\\nclient="s01-left"\\n')
        >>> talaria_edge.load_config(path).device
        'anna'
    """
    top = read_toml(valid.path("settings", "path", path))
    if "device" not in top.values and not {"run", "upstream"}.isdisjoint(top.values):
        raise ConfigError(f"{path}: holds a fleet's settings; give the device's, such as device.toml")
    return config_of(top)


def config_of(top: Section, source: DataSource | None = None) -> DeviceConfig:
    """The configuration in the tables of ``top``; with ``source``, where the samples come from, without ``[data]``."""
    device, fleet, data, plan = top.table("device"), top.table("fleet"), top.table("data"), top.table("plan")
    identity, guard, code = top.table("identity"), top.table("guard"), top.table("code")
    home, privacy, budget = top.table("home_assistant"), top.table("privacy"), top.table("budget")
    name = device.text("id")
    made = partial(  # what stands in the wrong place is told before what lacks by that
        DeviceConfig,
        device=name,
        fleet=fleet.text("name"),
        broker=fleet.text("broker"),
        state=device.path("state", f"state/{name}"),
        source=source or _source(data, name, device.names("labels", ()), code.names("allow", ())),
        plan=_plan(device, plan),
        budget=_budget(budget) if "budget" in top.values else None,
        username=fleet.text("username", None),
        password_file=fleet.path("password_file", None),
        identity=identity.path("folder", None),
        bundle=device.path("bundle", None),
        labels=device.names("labels", ()),
        variants=device.names("variants", ()),
        engine=cast(Engine, device.text("engine", usual_engine())),
        kit=device.path("kit", None),
        allow=code.names("allow", ()),
        guard=_rules(guard) if "guard" in top.values else None,
        secure=privacy.flag("secure", False),
        least=privacy.whole("least", 3, low=3, high=1024),
        least_noise=_least_noise(privacy),
        guard_every_s=guard.number("every_s", 10.0, low=0.05, high=3600),
        home_assistant=_home(home) if "home_assistant" in top.values else None,
        profile=dict(top.table("profile").values),
        retry_s=fleet.number("retry_s", 2.0, low=0.05, high=3600),
        max_model=fleet.whole("max_model", 512 << 20, low=1),
        patience_s=fleet.number("patience_s", 0.0),
        stay=device.flag("stay", False),
    )
    for section in (device, fleet, identity, data, plan, budget, guard, code, home, privacy):
        section.done()
    top.done()
    return made()


def _source(data: Section, device: str, labels: tuple[str, ...], allow: tuple[str, ...]) -> DataSource:
    kind = data.text("source")
    if kind == "npz":
        return NpzSource(data.path("path"), data.text("client", device), labels)
    if kind == "folder":
        return FolderSource(
            data.path("path"),
            labels,
            data.whole("most", 10_000, low=1, high=10_000_000),
            None if data.raw("days", None) is None else data.number("days", low=1e-3, high=36_525),
            data.number("megabytes", 128.0, low=0.001, high=4096),
            data.flag("drift", True),
        )
    if "path" in data.values:
        raise data.bad("source", 'reads no path; write "npz" or "folder" for what lies there, or leave path out')
    return NamedSource(kind, data.text("client", device), dict(data.table("options").values), allow)


def _least_noise(privacy: Section) -> float:
    least = privacy.number("least_noise", 0.0, low=0.0, high=1e6)
    if least and not privacy.flag("secure", False):
        raise privacy.bad("least_noise", "is of secure rounds, in which devices add the noise; set secure = true")
    return least


def _plan(device: Section, section: Section) -> Plan | None:
    widths = section.table("widths")
    section.raw("reasons", None)
    values = {group: widths.whole(group, low=1) for group in widths.values}
    path = device.path("plan", None)
    if path is None:
        return Plan(widths=values) if values else None
    if values:
        raise device.bad("plan", "and [plan.widths] are both given; the file holds the widths, leave the table out")
    return plan_compat.read(path)


def _budget(section: Section) -> Budget:
    names = [one.name for one in fields(Budget) if section.raw(one.name, None) is not None]
    if not names:
        section.done()  # a limit whose name is mistyped is named
        raise section.bad("latency_ratio", "is one of the limits of which one must be given, or leave [budget] out")
    return Budget(**{name: section.number(name) for name in names})


def _home(section: Section) -> HomeAssistant:
    return HomeAssistant(
        prefix=section.text("prefix", "homeassistant"),
        name=section.text("name", ""),
        ask=section.flag("ask", False),
    )


def _rules(section: Section) -> Rules:
    given: dict[str, Any] = {}
    for name, high in (("min_battery", 1.0), ("max_celsius", 150.0), ("max_load", 1e6), ("min_idle_s", 1e9)):
        if section.raw(name, None) is not None:
            given[name] = section.number(name, high=high)
    if section.raw("hours", None) is not None:
        given["hours"] = hours(section.text("hours"))
    return Rules(only_charging=section.flag("only_charging", False), **given)
