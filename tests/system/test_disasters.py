"""State that is lost, old, or there twice, on either side, while all others live on: learning goes on by itself, or
the operator is told what to do, and just that works."""

import asyncio
import shutil
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from talaria import tensors
from talaria.errors import StateError
from talaria.time import Clocks, told_by
from talaria_coordinator.maintenance.backup import back_up
from talaria_coordinator.maintenance.fsck import check
from talaria_coordinator.maintenance.restore import restore
from talaria_coordinator.storage.blobs import FolderBlobs
from talaria_coordinator.storage.store import Store
from talaria_edge.agent.rounds import Rounds

sys.path.insert(0, str(Path(__file__).parent))
from test_in_process import House, run_all

NEVER_SET = Clocks(wall=lambda: 0.0)
"""The clocks of a machine that has no battery for them, and has not asked anybody yet."""


class Site(House):
    """A house where disasters happen."""

    def __init__(self, folder, run, **options):
        super().__init__(folder, run, **options)
        self.tasks, self.stores = {}, 1

    def begin(self, *names):
        """Devices are switched on."""
        for name in names or self.data:
            self.tasks[name] = asyncio.ensure_future(self.agent(name))

    def coordinator(self):
        self.tasks["co"] = asyncio.ensure_future(self.serve())

    async def kill(self, name):
        """From one moment to the next: nothing more is saved, and no goodbye is said."""
        if name != "co":
            self.hub.cut(name)
        task = self.tasks.pop(name)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        # The thread that learns goes on, which that of a killed process would not: its writes end before others begin.
        await asyncio.get_running_loop().run_in_executor(self.worker, lambda: None)

    async def stop(self):
        """The coordinator is stopped in good order."""
        self.services[-1].stop()
        await self.tasks.pop("co")

    async def over(self):
        """Everybody has learned to the end."""
        await asyncio.gather(*self.tasks.values())
        self.store.audit.verify()
        assert check(self.store, self.blobs).damage == ()
        assert self.of("quarantined") == []
        assert self.store.fleets.get("watch").round == self.run.rounds

    async def closed(self, round, seconds=60):
        """Learning round ``round`` is closed, from now on."""
        self.told.clear()
        return await self.told_of("round-closed", seconds, round=round)

    def another_store(self):
        self.store.close()
        self.stores += 1
        path, self.blobs = self.folder / f"db{self.stores}", FolderBlobs(self.folder / f"blobs{self.stores}")
        return path

    def restore(self, source):
        path = self.another_store()
        restore(path, self.blobs, source)
        self.store = Store(path)
        assert check(self.store, self.blobs).damage == ()

    def lose(self):
        self.store = Store(self.another_store())

    def counted(self):
        """By round, who counted in what was committed."""
        rows = [row for row in self.store.attempts.of("watch") if row.counted is not None]
        return {row.round: [device for _, device in row.counted] for row in rows}


@pytest.fixture
def site(tmp_path, a_run, monkeypatch):
    monkeypatch.setattr("talaria_coordinator.fleet.vacancy.ANSWER_S", 0.5)
    monkeypatch.setattr("talaria_coordinator.fleet.scheduler.AGAIN_S", (0.2, 1.0))
    made, before = [], torch.get_num_threads()
    torch.set_num_threads(1)

    def make(rounds=4, algorithm="fedper", **options):
        made.append(Site(tmp_path, a_run(algorithm, rounds=rounds), **options))
        return made[-1]

    yield make
    torch.set_num_threads(before)
    for one in made:
        one.close()


def waits_in_round(monkeypatch, name, round, until):
    """The device trains in round ``round`` until the event is set."""
    real = Rounds.learn

    async def learn(rounds, learner, action):
        if rounds.config.device == name and rounds.config and b'"round": %d' % round in action.spec:
            await until.wait()
        await real(rounds, learner, action)

    monkeypatch.setattr(Rounds, "learn", learn)


EVERYBODY = ["anna", "bela", "carl"]


def test_devices_follow_a_fleet_that_was_restored_from_a_backup_twice(site):
    one = site(rounds=4)

    async def story():
        one.coordinator()
        one.begin()
        await one.closed(1)
        await one.stop()
        back_up(one.store, one.blobs, one.folder / "monday")
        one.coordinator()
        await one.closed(3)
        await one.stop()
        for _ in range(2):  # devices have been further both times
            one.restore(one.folder / "monday")
            one.coordinator()
            await one.closed(3)
            await one.stop()
        one.coordinator()
        await one.over()

    run_all(story())
    assert one.counted() == dict.fromkeys((1, 2, 3, 4), EVERYBODY)
    epochs = [service._conductor.fleet.epoch for service in one.services]
    assert sorted(set(epochs)) == epochs


def test_devices_follow_a_fleet_whose_backup_was_taken_in_the_midst_of_a_round(site, monkeypatch):
    one = site(rounds=3)

    async def story():
        go_on = asyncio.Event()
        waits_in_round(monkeypatch, "carl", 2, go_on)
        one.coordinator()
        one.begin()
        await one.closed(1)
        while len(one.store.updates.of("watch", 2)) < 2:  # anna's and bela's are here
            await asyncio.sleep(0.02)
        back_up(one.store, one.blobs, one.folder / "midst")
        go_on.set()
        await one.closed(2)
        await one.kill("co")
        one.restore(one.folder / "midst")
        one.coordinator()
        await one.over()

    run_all(story())
    assert one.counted() == dict.fromkeys((1, 2, 3), EVERYBODY)


def test_devices_follow_a_coordinator_whose_disk_is_an_old_copy(site):
    """As a virtual machine that goes back to a snapshot: nobody ran `restore`."""
    one = site(rounds=3)

    async def story():
        one.coordinator()
        one.begin()
        await one.closed(1)
        await one.stop()
        one.store.close()
        shutil.copy(one.folder / "db", one.folder / "db2")
        shutil.copytree(one.folder / "blobs", one.folder / "blobs2")
        one.store = Store(one.folder / "db")
        one.coordinator()
        await one.closed(2)
        await one.stop()
        one.store = Store(one.another_store())
        assert one.of("record-older") == []
        one.coordinator()
        await one.over()

    run_all(story())
    assert one.counted() == dict.fromkeys((1, 2, 3), EVERYBODY)
    (said,) = one.of("record-older")
    assert "where another state folder or [store] has it, stop this one, and start with that" in said["reason"]


@pytest.mark.parametrize("clock", ["right", "never set"])
@pytest.mark.parametrize("lost", ["all", "protocol.bin"])
def test_a_device_that_lost_its_memory_takes_part_again_in_the_same_run(site, lost, clock):
    one = site(rounds=3, quorum=0.5)

    async def story():
        one.coordinator()
        one.begin()
        await one.closed(1)
        await one.kill("carl")
        if lost == "all":
            shutil.rmtree(one.folder / "carl")
        else:
            (one.folder / "carl" / lost).unlink()
        with told_by(NEVER_SET if clock == "never set" else Clocks()):
            one.begin("carl")
        await one.over()

    run_all(story())
    assert one.counted()[3] == EVERYBODY
    forgot = [item["device"] for item in one.of("device-forgot")]
    assert set(forgot) == ({"carl"} if clock == "never set" else set())


def test_a_device_that_was_restored_from_its_own_old_backup_takes_part_again(site):
    one = site(rounds=4, quorum=0.5)

    async def story():
        one.coordinator()
        one.begin()
        await one.closed(1)
        await one.kill("carl")
        shutil.copytree(one.folder / "carl", one.folder / "carl's backup")
        one.begin("carl")
        await one.closed(2)
        await one.kill("carl")
        shutil.rmtree(one.folder / "carl")
        (one.folder / "carl's backup").rename(one.folder / "carl")
        one.begin("carl")
        await one.over()

    run_all(story())
    assert one.counted()[4] == EVERYBODY
    assert {item["device"] for item in one.of("device-forgot")} == {"carl"}


@pytest.mark.parametrize("ended", ["stopped", "killed"])
@pytest.mark.parametrize("clock", ["right", "never set"])
def test_a_coordinator_that_lost_its_state_serves_its_fleet_again(site, ended, clock):
    one = site(rounds=2)

    async def story():
        one.coordinator()
        one.begin()
        await one.closed(1)
        await (one.stop() if ended == "stopped" else one.kill("co"))
        one.lose()
        with told_by(NEVER_SET if clock == "never set" else Clocks()):
            one.coordinator()
        await one.over()

    run_all(story())
    assert one.counted() == dict.fromkeys((1, 2), EVERYBODY)


def test_a_coordinator_of_another_run_that_was_started_by_mistake_ends_no_device(site):
    """Its state lost, or that of another fleet; once the right one is started, all goes on."""
    one = site(rounds=3)

    async def story():
        one.coordinator()
        one.begin()
        await one.closed(1)
        await one.stop()
        right = one.run, one.store, one.blobs
        one.run, one.store = replace(one.run, recipe=replace(one.run.recipe, batch=4)), Store(one.folder / "other")
        one.blobs = FolderBlobs(one.folder / "others")
        one.coordinator()
        for name in EVERYBODY:
            await one.told_of("error", device=name)
        await one.stop()
        one.store.close()
        one.run, one.store, one.blobs = right
        one.coordinator()
        await one.over()

    run_all(story())
    assert one.counted() == dict.fromkeys((1, 2, 3), EVERYBODY)
    assert {said["error"].split("; ")[0].partition("safetensors ")[2] for said in one.of("error")} == {
        "belongs to another run of this fleet"
    }


def test_an_empty_database_beside_the_blobs_of_a_fleet_is_refused_and_what_is_said_works(site):
    one = site(rounds=2)

    async def story():
        one.coordinator()
        one.begin()
        await one.closed(1)
        await one.stop()
        back_up(one.store, one.blobs, one.folder / "monday")
        one.store.close()
        (one.folder / "db").write_bytes(b"")
        one.store = Store(one.folder / "db")
        with pytest.raises(StateError, match=r"its blobs are those of one that has learned.*restore a backup"):
            await one.serve()
        one.store.close()
        (one.folder / "db").unlink()
        restore(one.folder / "db", one.blobs, one.folder / "monday")
        one.store = Store(one.folder / "db")
        one.coordinator()
        await one.over()

    run_all(story())
    assert one.counted() == dict.fromkeys((1, 2), EVERYBODY)


def test_a_start_that_was_cut_off_before_the_first_commit_is_no_lost_database(site):
    one = site(rounds=1)
    from talaria_coordinator.fleet.aggregation import Learning

    Learning(one.run, one.blobs).first()

    async def story():
        one.coordinator()
        one.begin()
        await one.over()

    run_all(story())


@pytest.mark.parametrize("mistake", ["another folder", "wrong blobs"])
def test_a_second_coordinator_started_by_mistake_leaves_the_healthy_one_alone(site, mistake):
    one = site(rounds=2)

    async def story():
        one.coordinator()
        one.begin()
        await one.closed(1)
        right = one.store, one.blobs
        if mistake == "another folder":
            one.store, one.blobs = Store(one.folder / "elsewhere"), FolderBlobs(one.folder / "elsewhere blobs")
            reason = "another coordinator serves it"
        else:
            one.blobs, reason = FolderBlobs(one.folder / "empty"), "cannot be read from"
        with pytest.raises(StateError, match=reason):
            await one.serve()
        if mistake == "another folder":
            one.store.close()
        one.store, one.blobs = right
        await one.over()

    run_all(story())
    assert one.counted() == dict.fromkeys((1, 2), EVERYBODY)
    assert tensors.equal(one.shared(), one.simulated().shared)
