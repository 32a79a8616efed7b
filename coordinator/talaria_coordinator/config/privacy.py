"""The ``[privacy]`` table of ``fleet.toml``: sums that open only as sums, clipping, noise and a budget."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from talaria.config import Section
from talaria.errors import ConfigError
from talaria.federated.private_rule import require_private, with_noise
from talaria.federated.rounds import needed
from talaria.federated.run import Run
from talaria.privacy.accounting import epsilon
from talaria.privacy.rule import Privacy, threshold_of

LEAST = 3
"""Devices of a secure round at least."""


@dataclass(frozen=True, kw_only=True)
class PrivacyConfig:
    """What a fleet promises, and ``step_s``: seconds that its devices have for each step of a secure round, and ten
    times as many for their updates and for the last step."""

    rule: Privacy
    step_s: float = 60.0

    def needed(self, devices: int) -> int:
        """How many of ``devices`` must stay until the end of a round; of one that is not secure, how many must come."""
        threshold = threshold_of(self.rule, devices) if self.rule.secure else self.rule.threshold or 0
        return max(LEAST, threshold, self.rule.holders or 0)


def privacy_of(section: Section, run: Run) -> PrivacyConfig:
    """What a ``[privacy]`` table says, with the noise that its budget needs for all rounds of ``run``."""
    step_s = section.number("step_s", PrivacyConfig.step_s, low=1.0, high=86_400.0)
    found = {field.name: section.raw(field.name, None) for field in fields(Privacy)}
    given: dict[str, Any] = {name: value for name, value in found.items() if name in section.values}
    section.done()
    rule = Privacy(**given)
    require_private(run, rule)
    rule = with_noise(rule, run.rounds)
    if rule.noise:
        epsilon(rule.noise, 1, rule.delta)  # what counts must be there before the first round, not after it
    return PrivacyConfig(rule=rule, step_s=step_s)


def require_secure(privacy: PrivacyConfig, run: Run, keys: bool, devices: int, over: float) -> None:
    """Raise :class:`ConfigError` where a fleet cannot keep what it promises."""
    require_private(run, privacy.rule)
    if devices < LEAST:
        raise ConfigError(
            f"privacy: {devices} devices: of a sum of fewer than {LEAST} each could work out another's; raise [fleet] "
            "devices, or leave privacy out"
        )
    if not privacy.rule.secure:
        return
    if not keys:
        raise ConfigError(
            "privacy: secure=true needs devices with keys, which check each other's; make them with `talaria fleet "
            "init`, and set [identity] folder"
        )
    if over:
        raise ConfigError(
            f"privacy: secure=true adds up all who stay, and [rounds] over={over:g} asks more than are counted; leave "
            "over out"
        )


def require_asked(privacy: PrivacyConfig, run: Run, devices: int) -> None:
    """Raise :class:`ConfigError` where a round asks fewer of ``devices`` than it needs: it would never begin."""
    asked = needed(run, devices)
    if asked < privacy.needed(asked):
        given = [name for name in ("threshold", "holders") if getattr(privacy.rule, name) is not None]
        lower = f", or lower {' and '.join(given)}" if given else ""
        raise ConfigError(
            f"privacy: a round asks {asked} of {devices} devices ([run] fraction={run.fraction:g}), and needs "
            f"{privacy.needed(asked)} until its end; raise fraction or [fleet] devices{lower}"
        )
