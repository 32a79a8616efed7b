"""A fleet with secure rounds whose coordinator goes back in time, restored from a backup or meaning harm."""

import asyncio
import shutil

from tests.system.test_secure_fleet import FOUR, SECURE

from talaria_coordinator.maintenance.backup import back_up
from talaria_coordinator.maintenance.restore import restore
from talaria_coordinator.storage.blobs import FolderBlobs
from talaria_edge.agent.rounds import Rounds


def test_no_device_helps_to_open_a_round_once_more_and_a_restored_fleet_goes_on(keyed, monkeypatch):
    """Not the last round that it opened, nor one before: two sums of one round over almost the same devices differ by
    what one of them sent."""
    fleet, learn, backed_up = keyed(rounds=5, members=FOUR, privacy=SECURE), Rounds.learn, []

    async def waits(rounds, learner, action):
        if backed_up or b'"round": 2' not in action.spec:
            await learn(rounds, learner, action)

    monkeypatch.setattr(Rounds, "learn", waits)

    async def until(event, **facts):
        fleet.told.clear()
        async with fleet.running(*FOUR):
            await fleet.told_of(event, **facts)

    asyncio.run(until("round-opened", round=2))
    blobs = fleet.state / "blobs"
    with fleet.store as store:
        back_up(store, FolderBlobs(blobs), fleet.folder / "monday")
    backed_up.append(True)
    asyncio.run(until("round-closed", round=3))
    for path in (blobs, *fleet.state.glob("coordinator.db*")):
        shutil.move(path, fleet.folder / f"lost-{path.name}")
    restore(fleet.state / "coordinator.db", FolderBlobs(blobs), fleet.folder / "monday")
    asyncio.run(until("round-closed", round=3))
    assert "declined (secure: this device has helped to open a sum of round 2" in fleet.of("round-passed")[0]["reason"]
    with fleet.store as store:
        counted = {row.round: row.counted for row in store.attempts.of("watch") if row.counted is not None}
    assert [len(counted[round]) for round in (1, 2, 3)] == [4, 0, 4]
