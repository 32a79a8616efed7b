"""Records what the protocol machine saw of each device in the store, and reports it with round and device."""

from __future__ import annotations

from collections.abc import Callable

from talaria.protocol import actions as a
from talaria.protocol.coordinator.presence import DOUBLED
from talaria_coordinator.storage.records import profile_of
from talaria_coordinator.storage.store import Store


def witness(action: a.Action, fleet: str, store: Store, tell: Callable[..., None]) -> None:
    """Record ``action`` of ``fleet`` where it tells something of a device; any other changes nothing."""
    match action:
        case a.DeviceUp():
            store.see(fleet, action.device, action.boot, profile_of(action.profile))
            tell("device-up", device=action.device, boot=action.boot)
        case a.DeviceDown():
            store.see(fleet, action.device, action.boot, {}, online=False)
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
            store.quarantine(fleet, action.device, action.reason)
            tell("quarantined", device=action.device, reason=action.reason)
        case a.Equivocation():
            store.equivocation(fleet, action.attempt, action.device, action.first.hex(), action.second.hex())
            tell("equivocation", attempt=action.attempt, device=action.device)
