"""What a round tells each device with the request for work."""

from __future__ import annotations

import json
from collections.abc import Mapping

from talaria_coordinator.fleet.aggregation import Learning
from talaria_coordinator.fleet.cohort import Asked
from talaria_coordinator.storage.records import Fleet
from talaria_coordinator.storage.store import Store


def briefing(
    asked: Asked, terms: Mapping[str, str], fleet: Fleet, learning: Learning, store: Store
) -> dict[str, bytes]:
    """By device, the round, what of ``terms`` a secure one has, and, asynchronously, the last round of the device's own
    that counted, so that its private part goes on from there."""
    if asked.stale:
        last = store.updates.counted_rounds(fleet.name)
        return {name: json.dumps({"round": asked.round, "after": last.get(name, 0)}).encode() for name in asked.cohort}
    gate = {"gate": True} if asked.round == fleet.life.canary.get("gate") else {}
    said = {"round": asked.round, **gate, **terms}
    spent = learning.promises(fleet, asked.cohort)
    told = {name: {**said, "privacy": spent[name]} if spent else said for name in asked.cohort}
    return {name: json.dumps(one).encode() for name, one in told.items()}
