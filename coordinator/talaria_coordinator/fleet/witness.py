"""Records what the protocol machine saw of each device in the store, and reports it with round and device."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from talaria.protocol import actions as a
from talaria.protocol.coordinator.machine import CoordinatorState
from talaria.protocol.coordinator.presence import DOUBLED
from talaria.wire.validity import day_of
from talaria_coordinator.storage.devices import Sight
from talaria_coordinator.storage.records import Fleet, profile_of
from talaria_coordinator.storage.store import Store

LAST_DAY_MS = 4e12
"""Epochs beyond it, of the year 2096, are no day that anybody's clock says."""


def sights(actions: Iterable[a.Action]) -> list[Sight]:
    """Who came and who went, for the record."""
    found = list[Sight]()
    for action in actions:
        match action:
            case a.DeviceUp():
                found.append(Sight(action.device, action.boot, profile_of(action.profile)))
            case a.DeviceDown():
                found.append(Sight(action.device, action.boot, {}, online=False))
    return found


def witness(action: a.Action, fleet: Fleet, store: Store, tell: Callable[..., None]) -> None:
    """Record ``action`` of ``fleet`` where it tells something of a device; any other changes nothing. That one came or
    went is in the record already (:func:`sights`)."""
    match action:
        case a.DeviceUp():
            tell("device-up", device=action.device, boot=action.boot)
            if reason := _outrun(action, fleet.epoch):
                tell("outrun", device=action.device, reason=reason)
        case a.DeviceDown():
            tell("device-down", device=action.device, boot=action.boot)
        case a.Forgot():
            tell(
                "device-forgot", device=action.device, boot=action.boot, newest=action.newest,
                reason="it has lost its memory or been given an older one, and is told to go on from where it was; if "
                "this comes again and again, two devices have this name: enrol one of them under its own",
            )  # fmt: skip
        case a.Progressed():
            tell("progress", attempt=action.attempt, device=action.device, phase=action.phase, reason=action.reason)
        case a.Doubled():
            tell("doubled", device=action.device, reason=DOUBLED)
        case a.Quarantined():
            store.devices.quarantine(fleet.name, action.device, action.reason)
            tell("quarantined", device=action.device, reason=action.reason)
        case a.Equivocation():
            store.updates.equivocation(
                fleet.name, action.attempt, action.device, action.first.hex(), action.second.hex()
            )
            tell("equivocation", attempt=action.attempt, device=action.device)


def agree(state: CoordinatorState, fleet: str, store: Store) -> None:
    """Let the record of ``fleet`` say who is shut out as its machine has it, which is kept first: a crash may come
    between."""
    out = state.quarantined()
    known = {device.device for device in store.devices.of(fleet) if device.quarantine is not None}
    for device in sorted(known ^ out.keys()):
        store.devices.quarantine(fleet, device, out.get(device))


def _outrun(device: a.DeviceUp, epoch: int) -> str:
    """Why ``device`` does not hear a coordinator of ``epoch``, with the mend; empty where it does, or has not said."""
    follows = profile_of(device.profile).get("follows")
    if type(follows) is not int or not epoch < follows < LAST_DAY_MS:
        return ""
    return (
        f"it follows a coordinator that began at {day_of(follows / 1000)} by its clock, and hears none that began "
        "before: stop that one; or, where it is gone, start this one once with its clock set ahead of that"
    )
