"""What privacy asks of a run, simulated or in a fleet: refusals with their reason, and the run's rule made private."""

from __future__ import annotations

from dataclasses import replace

from talaria.aggregate.base import Aggregator
from talaria.errors import ConfigError
from talaria.federated import rounds, run_model
from talaria.federated.run import Run
from talaria.privacy.accounting import noise_for
from talaria.privacy.coordinates import Coordinates
from talaria.privacy.fixed_point import Grid
from talaria.privacy.rule import Privacy, private, threshold_of
from talaria.privacy.terms import MOST_DEVICES


def require_private(run: Run, privacy: Privacy) -> None:
    """Raise :class:`ConfigError` where ``privacy`` asks for nothing, or ``run`` cannot keep to it."""
    if not privacy.secure and privacy.clip is None:
        raise ConfigError("privacy: neither secure nor clip is set; set one of them, or leave privacy out")
    if privacy.noise_by == "devices" and not privacy.secure:
        raise ConfigError(
            "privacy: noise_by='devices' and secure=false: a device's part of the noise does not hide it alone; set "
            "secure=true"
        )
    if privacy.metrics and not privacy.secure:
        raise ConfigError(
            f"privacy: metrics={list(privacy.metrics)} and secure=false: each update tells its own anyhow; leave "
            "metrics out"
        )
    if run_model.algorithm_of(run).card.shares == "nothing":
        raise ConfigError(
            f"privacy: {run.algorithm} shares nothing, so that there is nothing to hide; leave privacy out"
        )
    if run.asynchronous:
        raise ConfigError(
            "privacy: an asynchronous run takes updates one by one, and no cohort adds them up together; "
            "learn in rounds, or leave privacy out"
        )
    rounds.require_still(run)  # few holders are never opened
    if run.codec != "raw":
        raise ConfigError(
            f"privacy: codec={run.codec!r} rounds each update alone; whole numbers of privacy's bits travel instead; "
            "set codec to 'raw', and bits=16 for updates as small as fp16"
        )


def with_noise(privacy: Privacy, often: int) -> Privacy:
    """With the least noise that keeps the budget for a device that is counted ``often``, unless noise is given."""
    if privacy.epsilon is None or privacy.noise is not None:
        return privacy
    return replace(privacy, noise=noise_for(privacy.epsilon, often, privacy.delta))


def private_rule(run: Run, rule: Aggregator | None, privacy: Privacy | None, seed: int) -> Aggregator | None:
    """The run's rule as ``privacy`` has it, its noise drawn from ``seed``; ``rule`` itself where there is none."""
    return rule if privacy is None else private(rounds.rule_of(run, rule), privacy, seed)


def require_cohort(privacy: Privacy, devices: int) -> None:
    """Raise :class:`ConfigError` where no round that asks so many ``devices`` could be opened, whoever stays."""
    threshold, holders = threshold_of(privacy, devices), privacy.holders or 0
    if devices > MOST_DEVICES:
        raise ConfigError(f"privacy: a round asks {devices} devices, and may ask {MOST_DEVICES}; lower fraction")
    if holders > devices:
        raise ConfigError(
            f"privacy: holders={holders} must hold a coordinate, and a round asks {devices} devices, so that none "
            "would open; lower it"
        )
    if privacy.secure and 2 * threshold <= devices:
        raise ConfigError(
            f"privacy: threshold={threshold} must be more than half of the {devices} devices that a round asks; raise "
            "it, or leave it out"
        )
    Grid(privacy.bits, devices)


def coordinates_of(run: Run) -> Coordinates:
    """What the updates of a run hold, as device and coordinator of a secure round must agree on it."""
    return Coordinates.of_schema(run_model.update_schema(run), run_model.layout_of(run.spec))
