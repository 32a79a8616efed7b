"""Decides whether a device may train now: a pure function of one reading of the machine, with the reason in words."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from datetime import datetime

from talaria import valid
from talaria.errors import ConfigError
from talaria.foreign import shown


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What the machine tells about itself; None where it does not tell."""

    minute: int
    """Minute of the day, local time, 0..1439."""
    battery: float | None = None
    """Charge in [0, 1]; None where there is no battery."""
    charging: bool | None = None
    celsius: float | None = None
    """The hottest sensor."""
    load: float | None = None
    """Runnable processes per core, over the last minute."""
    idle_s: float | None = None
    """Seconds since the user last touched the device."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """When training is allowed; None sets no rule.

    A rule that the machine gives no reading for holds where its absence tells something (no battery: mains power), and
    else does not bind: heat and load are protections, not permissions. ``min_idle_s`` is a promise to the user, so
    without a reading it forbids.
    """

    min_battery: float | None = 0.3
    """Least charge while not charging."""
    only_charging: bool = False
    max_celsius: float | None = 45.0
    max_load: float | None = None
    min_idle_s: float | None = None
    hours: tuple[int, int] | None = None
    """From minute to minute of the day, (1320, 390) for 22:00 to 06:30; it may pass midnight. The end is outside."""

    def __post_init__(self) -> None:
        for name, low, high in (
            ("min_battery", 0.0, 1.0),
            ("max_celsius", 0.0, 150.0),
            ("max_load", 0.0, 1e6),
            ("min_idle_s", 0.0, 1e9),
        ):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is not None and not (number and math.isfinite(value) and low <= value <= high):
                raise ConfigError(f"guard: {name}={shown(value)} must be a number in [{low:g}, {high:g}], or left out")
        valid.flag("guard", "only_charging", self.only_charging)
        if self.hours is None:
            return
        if not (isinstance(self.hours, tuple) and len(self.hours) == 2 and all(_minute(m) for m in self.hours)):
            raise ConfigError(
                f"guard: hours={shown(self.hours)} must be two minutes of the day in 0..1439, such as (1320, 390) for "
                "22:00 to 06:30"
            )
        if self.hours[0] == self.hours[1]:
            raise ConfigError(f"guard: hours={self.hours!r} begin where they end; leave hours out to allow every hour")


def _minute(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1440


@dataclass(frozen=True)
class Allowed:
    """The decision; true where training may go on."""

    ok: bool
    reason: str

    def __bool__(self) -> bool:
        return self.ok


def allowed(reading: Reading, rules: Rules) -> Allowed:
    """Whether ``rules`` let a device with this ``reading`` train. The first rule that forbids gives the reason."""
    for reason in (
        _power(reading, rules),
        _heat(reading, rules),
        _use(reading, rules),
        _schedule(reading, rules),
    ):
        if reason is not None:
            return Allowed(False, reason)
    return Allowed(True, "every rule allows it")


def hours(text: str) -> tuple[int, int]:
    """``"22:00-06:30"`` as two minutes of the day. Raises :class:`~talaria.errors.ConfigError`."""
    try:
        begin, end = (datetime.strptime(part.strip(), "%H:%M") for part in text.split("-"))
    except ValueError:
        raise ConfigError(f"guard: hours={shown(text)} must read HH:MM-HH:MM, such as 22:00-06:30") from None
    return begin.hour * 60 + begin.minute, end.hour * 60 + end.minute


def read(now: datetime | None = None) -> Reading:
    """This machine, now. ``idle_s`` is not known to a service, so it stays None."""
    from talaria.planning import machine

    moment = now or datetime.now()
    found = machine.load()
    known = {f.name for f in fields(Reading)}
    return Reading(minute=moment.hour * 60 + moment.minute, **{k: v for k, v in found.items() if k in known})


def _power(reading: Reading, rules: Rules) -> str | None:
    if reading.battery is None or reading.charging:
        return None
    if rules.only_charging:
        return "not charging"
    if rules.min_battery is not None and not reading.battery >= rules.min_battery:
        return f"battery at {reading.battery:.0%}, {rules.min_battery:.0%} is asked for"
    return None


def _heat(reading: Reading, rules: Rules) -> str | None:
    if rules.max_celsius is None or reading.celsius is None or reading.celsius <= rules.max_celsius:
        return None
    return f"{reading.celsius:.0f} degrees, at most {rules.max_celsius:.0f} are allowed"


def _use(reading: Reading, rules: Rules) -> str | None:
    if rules.max_load is not None and reading.load is not None and not reading.load <= rules.max_load:
        return f"load of {reading.load:.2f} per core, at most {rules.max_load:.2f} is allowed"
    if rules.min_idle_s is None:
        return None
    if reading.idle_s is None:
        return "cannot tell whether the device is idle"
    if reading.idle_s < rules.min_idle_s:
        return f"in use {reading.idle_s:.0f} s ago, {rules.min_idle_s:.0f} s of rest are asked for"
    return None


def _schedule(reading: Reading, rules: Rules) -> str | None:
    if rules.hours is None:
        return None
    begin, end = rules.hours
    inside = begin <= reading.minute < end if begin < end else reading.minute >= begin or reading.minute < end
    if inside:
        return None
    return f"outside of {begin // 60:02}:{begin % 60:02}-{end // 60:02}:{end % 60:02}"
