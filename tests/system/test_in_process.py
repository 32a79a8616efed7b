"""Coordinator and agents in one event loop, over a link in memory that can lose, double and reorder."""

import asyncio
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from memory_broker import Faults, Hub, Loop

from talaria import tensors
from talaria.errors import ConfigError, StateError
from talaria.federated import global_model, rounds
from talaria.federated.run import Member, Run
from talaria.simulation.run import simulate
from talaria.types import Samples
from talaria.wire.topics import coordinator_filters, device_filters
from talaria_coordinator.config.fleet import FleetConfig
from talaria_coordinator.fleet.aggregation import Learning as CoordinatorLearning
from talaria_coordinator.fleet.operator_commands import Order
from talaria_coordinator.fleet.service import Service
from talaria_coordinator.fleet.tidying import OLD_ALONE_S
from talaria_coordinator.storage.blobs import FolderBlobs
from talaria_coordinator.storage.store import Store
from talaria_edge.agent.agent import Agent
from talaria_edge.agent.rounds import Rounds
from talaria_edge.agent.supervisor import run_agents
from talaria_edge.agent.training import Learner
from talaria_edge.config import DeviceConfig
from talaria_edge.data import DeviceData, Given
from talaria_edge.storage.state import DeviceStore


def samples(seed, classes=3, shape=(6, 32)):
    y = torch.arange(24) % classes
    x = torch.randn(24, *shape, generator=torch.Generator().manual_seed(seed)) + y[:, None, None]
    return DeviceData(Samples.of(x[:18], y[:18]), Samples.of(x[18:], y[18:]))


class House:
    """A fleet in memory, with all that it tells."""

    def __init__(self, folder, run, faults=None, **options):
        self.folder, self.run, self.hub = folder, run, Hub(faults or Faults())
        self.options = {"retry_s": 0.1, "stay": False, **options}
        self.data = {name: samples(i) for i, name in enumerate(("anna", "bela", "carl"))}
        self.told, self.agents, self.services = [], {}, []
        self.store, self.blobs = Store(folder / "db"), FolderBlobs(folder / "blobs")
        self.worker = ThreadPoolExecutor(1)

    def close(self):
        self.worker.shutdown()
        self.store.close()

    async def serve(self):
        options = {"members": tuple(self.data), **self.options}
        config = FleetConfig(name="watch", run=self.run, state=self.folder, **options)

        def over_hub(url, config, will):
            return Loop(self.hub, f"co{len(self.services)}", coordinator_filters("watch"), will)

        service = Service(config, self.store, self.blobs, report=self.told.append, open_transport=over_hub)
        self.services.append(service)
        await service.run("loop")

    async def agent(self, name, data=None, **options):
        config = DeviceConfig(
            device=name, fleet="watch", broker="mqtt://loop", state=self.folder / name, retry_s=0.1,
            source=Given(lambda: data or self.data[name]), **options,
        )  # fmt: skip
        agent = Agent(
            config, worker=self.worker, report=self.told.append,
            open_transport=lambda c, will: Loop(self.hub, c.device, device_filters("watch", c.device), will),
        )  # fmt: skip
        self.agents[name] = agent
        return await agent.run()

    async def told_of(self, event, seconds=60, **facts):
        async with asyncio.timeout(seconds):
            while True:
                for item in self.told:
                    if item["event"] == event and all(item.get(k) == v for k, v in facts.items()):
                        return item
                await asyncio.sleep(0.02)

    def of(self, event):
        return [item for item in self.told if item["event"] == event]

    def shared(self):
        self.store.audit.verify()
        return global_model.decode_model(self.run, self.blobs.get(self.store.fleets.get("watch").model_digest))

    def private(self, name):
        with DeviceStore(self.folder / name, "watch", name) as store:
            found = store.private()
            return None if found is None else found.tensors

    def simulated(self, names=None):
        members = {n: Member(n, self.data[n].train, self.data[n].val) for n in names or self.data}
        return simulate(self.run, members)


@pytest.fixture
def house(tmp_path, a_run, one_thread):
    made = []

    def make(run=None, **options):
        made.append(House(tmp_path, run or a_run(), **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def run_all(*work, seconds=120):
    async def together():
        async with asyncio.timeout(seconds):
            return await asyncio.gather(*work)

    return asyncio.run(together())


@pytest.mark.parametrize(("seed", "codec"), [(1, "raw"), (2, "int8")])
def test_a_link_that_loses_doubles_and_reorders_changes_no_byte(house, a_run, seed, codec, monkeypatch):
    # A lost birth is told again each minute; here each second.
    monkeypatch.setattr("talaria.protocol.coordinator.machine.REPEAT_SECONDS", 1.0)
    run = replace(a_run("fedper"), codec=codec, download=codec)
    one = house(run, faults=Faults(seed, drop=0.1, duplicate=0.2, reorder=0.2))
    run_all(one.serve(), *map(one.agent, one.data))
    simulated = one.simulated()
    assert tensors.equal(one.shared(), simulated.shared)
    for name in one.data:
        assert tensors.equal(one.private(name), simulated.private[name])
    assert [row.failure for row in one.store.attempts.of("watch")] == [None] * 3


def test_bytes_that_come_all_at_once_are_counted_for_the_rounds_they_are_for(house, monkeypatch):
    one = house()
    receive = Loop.receive

    async def in_bursts(link):
        """The receipt, the next global model and the next request stand in line together, as behind a busy process."""
        if link._name in one.data and link._inbox.empty():
            await asyncio.sleep(0.3)
        return await receive(link)

    monkeypatch.setattr(Loop, "receive", in_bursts)
    _, *results = run_all(one.serve(), *map(one.agent, one.data))
    for result in results:
        shared_model = len(one.blobs.get(one.store.fleets.get("watch").model_digest))
        assert list(result["traffic"]) == ["1", "2", "3", "4"]
        first, *later = (round["down"] for round in result["traffic"].values())
        assert first > shared_model
        assert all(down > shared_model / 3 for down in later), "what changed of it"


def test_bytes_down_are_what_was_sent_also_what_was_lost_and_sent_again(house, monkeypatch):
    """So a first round may tell twice the bytes of dense models, and nothing is wrong with its record."""
    one, lost, publish = house(), Counter(), Hub.publish

    def loses_the_first(hub, topic, payload, retain=False):
        """The four pieces of the first model, for each device."""
        device = topic.rpartition("/dn/")[0]
        if device and lost[device] < 4:
            lost[device] += 1
        else:
            publish(hub, topic, payload, retain)

    monkeypatch.setattr(Hub, "publish", loses_the_first)
    run_all(one.serve(), *map(one.agent, one.data))
    first = one.store.attempts.of("watch")[0]
    assert first.down > 1.9 * first.dense * len(one.data)


def test_a_newcomer_gets_the_last_body_and_a_model_of_its_own(house, a_run):
    one = house(a_run("fedper", rounds=1), stay=True)

    async def story():
        serving = asyncio.ensure_future(one.serve())
        await asyncio.gather(*map(one.agent, one.data))
        await one.told_of("done", fleet="watch")
        result = await one.agent("nina", samples(9))
        one.services[0].stop()
        await serving
        return result

    (result,) = run_all(story())
    assert result["private"] is None
    assert result["rounds"] == 0
    assert (one.folder / "nina" / "personal.safetensors").exists()
    assert one.private("nina") is None
    assert "nina" not in one.store.fleets.get("watch").roster


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (samples(0, shape=(6, 31)), r"shape (6, 31), but the model takes (6, 32)"),
        (samples(0, classes=1), "only class 0"),
        (samples(0, classes=5), "labels span 0..4"),
    ],
)
def test_a_device_that_cannot_learn_declines_and_the_others_go_on(house, a_run, data, reason):
    one = house(a_run(rounds=1), stay=True)

    async def story():
        work = [
            asyncio.ensure_future(w) for w in (one.serve(), one.agent("carl", data), *map(one.agent, ("anna", "bela")))
        ]
        await one.told_of("done", fleet="watch")
        await asyncio.gather(*work[2:], work[1])
        one.services[0].stop()
        await work[0]
        return work[1].result()

    (result,) = run_all(story())
    assert reason in result["error"]
    assert any(reason in e["reason"] for e in one.of("progress") if e["phase"] == "declined" and e["device"] == "carl")
    assert one.store.attempts.of("watch")[0].counted == ((1, "anna"), (1, "bela"))
    assert tensors.equal(one.shared(), one.simulated(("anna", "bela")).shared)


def test_a_round_without_quorum_is_tried_again_to_the_same_bytes(house, a_run, monkeypatch):
    monkeypatch.setattr("talaria_coordinator.fleet.scheduler.AGAIN_S", (0.2, 1.0))
    one = house(a_run("fedper", rounds=2), quorum=1.0, deadline_s=1.5)

    async def story():
        slow = asyncio.Event()
        real = Rounds.learn

        async def learn(rounds, learner, action):
            if rounds.config.device == "carl" and not slow.is_set():
                await one.told_of("received", device="carl", attempt=2)
                slow.set()
            await real(rounds, learner, action)

        monkeypatch.setattr(Rounds, "learn", learn)
        await asyncio.gather(one.serve(), *map(one.agent, one.data))

    run_all(story())
    rows = one.store.attempts.of("watch")
    assert rows[0].failure is not None
    assert [row.round for row in rows if row.failure is None] == [1, 2]
    told = {(item["attempt"], item["round"]) for item in one.of("received")}
    assert told == {(row.attempt, row.round) for row in rows}, "in the journals of devices, as it is in the record"
    simulated = one.simulated()
    assert tensors.equal(one.shared(), simulated.shared)
    for name in one.data:
        assert tensors.equal(one.private(name), simulated.private[name])


def played(one):
    """One coordinator and all devices, until the run is over."""

    async def story():
        work = [asyncio.ensure_future(w) for w in (one.serve(), *map(one.agent, one.data))]
        await one.told_of("done", fleet="watch")
        one.services[0].stop()
        await work[0]
        for task in work[1:]:
            task.cancel()
        await asyncio.gather(*work[1:], return_exceptions=True)

    run_all(story())


@pytest.fixture
def carl_is_off(monkeypatch):
    """Whatever carl learns leaves him 1e30 times as large."""
    from talaria.wire import codec

    honest = codec.encode_update

    def poisoned(update, *args, **kwargs):
        if update.client == "carl":
            update = update.but(tensors={k: np.asarray(v * 1e30) for k, v in update.tensors.items()})
        return honest(update, *args, **kwargs)

    monkeypatch.setattr("talaria_edge.agent.training.codec.encode_update", poisoned)


@pytest.mark.usefixtures("carl_is_off")
def test_a_device_whose_training_went_astray_declines_and_keeps_its_place(house, a_run):
    one = house(a_run(rounds=1), stay=True)
    played(one)
    assert not one.of("quarantined")
    (declined,) = (item for item in one.of("progress") if item["phase"] == "declined")
    assert declined["device"] == "carl"
    assert "cannot be sent" in declined["reason"]
    assert one.store.attempts.of("watch")[0].counted == ((1, "anna"), (1, "bela"))


@pytest.mark.usefixtures("carl_is_off")
def test_an_update_that_is_not_finite_is_refused_and_its_device_shut_out(house, a_run, monkeypatch):
    one = house(a_run(rounds=1), stay=True)
    monkeypatch.setattr("talaria_edge.agent.training.Learner._require_sound", lambda *_: None)  # nobody checks a liar
    played(one)
    (quarantined,) = one.of("quarantined")
    assert quarantined["device"] == "carl"
    assert {d.device: d.quarantine is not None for d in one.store.devices.of("watch")}["carl"]
    assert [(u.device, u.status) for u in one.store.updates.of("watch", 1)] == [
        ("anna", "counted"), ("bela", "counted"), ("carl", "rejected"),
    ]  # fmt: skip
    assert one.store.attempts.of("watch")[0].counted == ((1, "anna"), (1, "bela"))


def test_a_second_coordinator_takes_over_and_the_first_stops(house, a_run):
    one = house(a_run(rounds=1), stay=True)

    async def story():
        first = asyncio.ensure_future(one.serve())
        await one.told_of("connected", fleet="watch")
        second = asyncio.ensure_future(one.serve())
        with pytest.raises(StateError, match="took over"):
            await first
        await asyncio.gather(*map(one.agent, one.data))
        one.services[1].stop()
        await second

    run_all(story())
    first, second = (service._conductor.fleet.epoch for service in one.services)
    assert first < second == one.store.fleets.get("watch").epoch


def test_private_state_of_another_run_is_not_used(house, a_run):
    one = house(a_run("fedper", rounds=1))
    run_all(one.serve(), *map(one.agent, one.data))
    before = one.private("anna")
    one.hub = Hub()
    one.run = replace(one.run, seed=6)
    one.store.close()
    one.store, one.blobs = Store(one.folder / "db2"), FolderBlobs(one.folder / "blobs2")

    async def story():
        serving = asyncio.ensure_future(one.serve())
        found = await asyncio.gather(*map(one.agent, one.data), return_exceptions=True)
        one.services[-1].stop()
        await serving
        return found

    (found,) = run_all(story())
    assert [type(error) for error in found] == [StateError] * 3
    assert "belongs to another run" in str(found[0])
    assert tensors.equal(one.private("anna"), before)


def test_old_blobs_are_freed_beside_the_rounds_and_a_bucket_that_does_not_answer_ends_no_fleet(house, monkeypatch):
    one = house()
    asked, rounds = threading.Event(), threading.get_ident()

    def mute(keep, older_s):
        assert threading.get_ident() != rounds
        assert older_s == OLD_ALONE_S
        asked.set()
        raise StateError("blobs: the bucket does not answer")

    monkeypatch.setattr(one.blobs, "gc", mute)
    run_all(one.serve(), *map(one.agent, one.data))
    assert asked.is_set()
    assert "the bucket does not answer" in one.of("error")[0]["error"]
    assert tensors.equal(one.shared(), one.simulated().shared)


# -- what a device cannot do, and what the disk lost, end neither an agent nor a round


@pytest.mark.parametrize("trouble", [RuntimeError("no kernel"), MemoryError(), AttributeError("gone"), KeyError("x")])
def test_whatever_goes_wrong_while_it_learns_costs_a_device_the_round_and_not_its_agent(
    house, a_run, monkeypatch, trouble
):
    one = house(a_run(rounds=2))
    learned = Learner._trained

    def sometimes(self, round, shared_model, own):
        if self.config.device == "carl" and round == 1:
            raise trouble
        return learned(self, round, shared_model, own)

    monkeypatch.setattr(Learner, "_trained", sometimes)

    async def story():
        await asyncio.gather(one.serve(), *map(one.agent, one.data))

    run_all(story())
    (declined,) = (item for item in one.of("progress") if item["phase"] == "declined")
    assert (declined["device"], type(trouble).__name__ in declined["reason"]) == ("carl", True)
    assert [r.counted for r in one.store.attempts.of("watch")] == [
        ((1, "anna"), (1, "bela")), ((2, "anna"), (2, "bela"), (2, "carl")),
    ]  # fmt: skip


def test_whatever_goes_wrong_while_it_personalizes_is_said_and_ends_no_agent(house, a_run, monkeypatch):
    one = house(a_run(rounds=1))
    finished = Learner.finish

    def sometimes(self, shared_model):
        if self.config.device == "carl":
            raise RuntimeError("no kernel")
        return finished(self, shared_model)

    monkeypatch.setattr(Learner, "finish", sometimes)
    results = {}

    async def agent(name):
        results[name] = await one.agent(name)

    async def story():
        await asyncio.gather(one.serve(), *map(agent, one.data))

    run_all(story())
    assert "no kernel" in results["carl"]["error"]
    assert "error" not in results["anna"]


def test_an_agent_that_nobody_foresaw_to_fail_is_not_the_end_of_the_others(house, a_run, monkeypatch):
    one = house(a_run(rounds=1))
    fleet, failures = Agent._feed, []

    def sometimes(self, event):
        if self.config.device == "carl" and self.was_up and not failures:
            failures.append(event)
            raise AttributeError("nobody foresaw this")
        return fleet(self, event)

    monkeypatch.setattr(Agent, "_feed", sometimes)
    monkeypatch.setattr("talaria_edge.agent.supervisor.AGAIN_S", (0.1, 0.1))
    found = {}

    async def agents():
        configs = [
            DeviceConfig(
                device=name, fleet="watch", broker="mqtt://127.0.0.1", state=one.folder / name, retry_s=0.1,
                source=Given(lambda name=name: one.data[name]),
            )
            for name in one.data
        ]  # fmt: skip
        found.update(
            await run_agents(
                configs, one.told.append,
                open_transport=lambda c, will: Loop(one.hub, c.device, device_filters("watch", c.device), will),
            )
        )  # fmt: skip

    async def story():
        await asyncio.gather(one.serve(), agents())

    run_all(story())
    assert not any("error" in result for result in found.values())
    (failed,) = one.of("failed")
    assert (failed["device"], failed["error"]) == ("carl", "AttributeError: nobody foresaw this")
    assert one.store.attempts.of("watch")[-1].counted == tuple((1, name) for name in one.data)


def test_a_device_that_cannot_learn_the_run_declines_at_once(house, a_run, monkeypatch):
    one = house(a_run(rounds=1), deadline_s=600.0)
    read = Run.from_json

    def older(text, allow=None):
        raise ConfigError("algorithm 'fedavg' is unknown")

    async def old_device():
        monkeypatch.setattr("talaria_edge.agent.agent.Run.from_json", older)
        carl = asyncio.ensure_future(one.agent("carl"))
        await one.told_of("error", device="carl")
        monkeypatch.setattr("talaria_edge.agent.agent.Run.from_json", read)
        return carl

    async def story():
        serving = asyncio.ensure_future(one.serve())
        await one.told_of("connected", fleet="watch")
        carl = await old_device()
        agents = [asyncio.ensure_future(one.agent(name)) for name in ("anna", "bela")]
        await one.told_of("round-closed")  # and not after ten minutes
        one.services[0].stop()
        for task in (carl, *agents):
            task.cancel()
        await asyncio.gather(serving, carl, *agents, return_exceptions=True)

    run_all(story())
    (declined,) = (item for item in one.of("progress") if item["phase"] == "declined")
    assert declined["device"] == "carl"
    assert "cannot be learned here: algorithm 'fedavg' is unknown" in declined["reason"]


def damaged(one, device):
    """The bytes of this device's stored update are no longer what they were."""
    (row,) = (u for u in one.store.updates.of("watch", 1) if u.device == device)
    path = one.blobs.folder / row.digest[:2] / row.digest[2:]
    path.write_bytes(path.read_bytes()[:-1] + b"?")


def damaging(one, monkeypatch, *devices):
    """Their updates are spoiled on disk, behind the coordinator's back, before the round is folded."""
    fold = CoordinatorLearning.fold

    def spoiled(self, fleet, counted):
        for device in devices:
            damaged(one, device)
        return fold(self, fleet, counted)

    monkeypatch.setattr(CoordinatorLearning, "fold", spoiled)


def test_an_update_that_the_disk_lost_is_left_out_and_its_device_is_not_blamed(house, a_run, monkeypatch):
    one = house(a_run(rounds=1), stay=True)
    damaging(one, monkeypatch, "bela")
    played(one)
    (left,) = one.of("left-out")
    assert (left["device"], "damaged" in left["reason"]) == ("bela", True)
    assert not one.of("quarantined")
    assert one.store.attempts.of("watch")[0].counted == ((1, "anna"), (1, "carl"))
    assert {u.device: u.status for u in one.store.updates.of("watch", 1)}["bela"] == "rejected"


def test_a_round_of_which_the_disk_lost_everything_fails_and_is_tried_again(house, a_run, monkeypatch):
    one = house(a_run(rounds=1), stay=True)
    fold, folds = CoordinatorLearning.fold, []

    def spoiled(self, fleet, counted):
        if not folds:
            for device in one.data:
                damaged(one, device)
        folds.append(fleet)
        return fold(self, fleet, counted)

    monkeypatch.setattr(CoordinatorLearning, "fold", spoiled)
    played(one)
    first, second = one.store.attempts.of("watch")
    assert "0 of 3 updates" in first.failure
    assert second.counted == ((2, "anna"), (2, "bela"), (2, "carl"))
    assert not one.of("quarantined")


def test_a_rule_that_fails_shuts_nobody_out_and_shows_its_author_where(house, a_run, monkeypatch, caplog):
    """As one of another package does after an upgrade; with the next one the fleet goes on."""
    monkeypatch.setattr("talaria_coordinator.fleet.scheduler.AGAIN_S", (0.05, 0.1))
    one, close = house(a_run(rounds=1)), rounds.close

    def cannot_take_three(run, shared, state, updates, aggregator=None):
        kept = list(updates)
        if len(kept) == 3 and not one.of("round-failed"):
            return {}["weights of the version before"]
        return close(run, shared, state, kept, aggregator)

    monkeypatch.setattr(rounds, "close", cannot_take_three)
    run_all(one.serve(), *map(one.agent, one.data))
    monkeypatch.setattr(rounds, "close", close)
    assert one.of("round-failed")[0]["reason"] == "KeyError: 'weights of the version before'"
    assert not one.of("quarantined")
    assert any("cannot_take_three" in caplog.handler.format(record) for record in caplog.records)
    assert tensors.equal(one.shared(), one.simulated().shared)


def test_a_round_that_is_closed_and_cannot_be_committed_can_be_called_off(house, a_run, monkeypatch):
    one = house(a_run(rounds=1), stay=True)
    fold, broken = CoordinatorLearning.fold, [True]

    def refused(self, fleet, counted):
        if broken:
            raise StateError("the disk is gone")
        return fold(self, fleet, counted)

    monkeypatch.setattr(CoordinatorLearning, "fold", refused)
    monkeypatch.setattr("talaria_coordinator.fleet.scheduler.AGAIN_S", (0.05, 0.1))

    async def order(verb):
        made = Order(verb)
        await one.services[0].order(made)
        return await asyncio.wrap_future(made.answer)

    async def story():
        work = [asyncio.ensure_future(w) for w in (one.serve(), *map(one.agent, one.data))]
        await one.told_of("error", error="the disk is gone")
        assert await order("abort") == "aborted"
        await one.told_of("round-failed", attempt=1)
        broken.clear()
        assert await order("resume") == "running"
        await one.told_of("done", fleet="watch")
        one.services[0].stop()
        await work[0]
        for task in work[1:]:
            task.cancel()
        await asyncio.gather(*work[1:], return_exceptions=True)

    run_all(story())
    first, second = one.store.attempts.of("watch")
    assert first.failure == "called off by the operator"
    assert second.counted == ((2, "anna"), (2, "bela"), (2, "carl"))


def test_a_wrong_device_does_not_hold_its_place_for_good_and_who_is_not_asked_is_told_why(house, a_run):
    one = house(a_run(rounds=2), members=(), devices=2, deadline_s=600.0)

    async def order(verb, device):
        made = Order(verb, device)
        await one.services[0].order(made)
        await asyncio.wrap_future(made.answer)

    async def story():
        serving = asyncio.ensure_future(one.serve())
        await one.told_of("connected", fleet="watch")
        none = samples(9).train.take(np.arange(0))
        wrong = asyncio.ensure_future(one.agent("carl", data=DeviceData(none, none)))
        await one.told_of("device-up", device="carl")
        anna = asyncio.ensure_future(one.agent("anna"))
        await one.told_of("roster", devices=["anna", "carl"])
        bela = asyncio.ensure_future(one.agent("bela"))
        assert "quarantine" in (await one.told_of("notice", device="bela"))["reason"]
        assert (await one.told_of("not-asked", device="bela"))["reason"] == one.of("notice")[0]["reason"]
        await order("quarantine", "carl")
        assert "shut out by the operator" in (await one.told_of("notice", device="carl"))["reason"]
        await one.told_of("roster", devices=["anna", "bela"])
        await asyncio.gather(serving, anna, bela)
        wrong.cancel()
        await asyncio.gather(wrong, return_exceptions=True)

    run_all(story())
    assert "bela" in {device for _, device in one.store.attempts.of("watch")[-1].counted}


@pytest.mark.parametrize("harm", [Path.unlink, lambda model: model.write_bytes(model.read_bytes()[:-1])])
def test_a_global_model_that_is_gone_from_flash_is_fetched_again_and_no_round_fails_for_it(house, monkeypatch, harm):
    one, harmed = house(quorum=1.0), set()

    def first_harmed(real):
        def work(learner, *given):
            if learner.config.device == "carl" and real not in harmed:
                harmed.add(real)
                harm(learner.store.folder / "model.bin")
            return real(learner, *given)

        return work

    for name in ("learn", "finish"):
        monkeypatch.setattr(Learner, name, first_harmed(getattr(Learner, name)))
    run_all(one.serve(), *map(one.agent, one.data))
    assert len(harmed) == 2
    assert not [event for event in one.told if event["event"] in ("declined", "error")]
    assert [row.round for row in one.store.attempts.of("watch")] == [1, 2, 3], "no round was tried twice"
    simulated = one.simulated()
    assert tensors.equal(one.shared(), simulated.shared)
    assert all(tensors.equal(one.private(name), simulated.private[name]) for name in one.data)


def test_a_device_that_left_does_not_hold_a_round_to_its_deadline(house, a_run):
    one = house(a_run(rounds=2), deadline_s=600.0)

    async def story():
        serving = asyncio.ensure_future(one.serve())
        agents = {name: asyncio.ensure_future(one.agent(name)) for name in one.data}
        await one.told_of("trained", device="carl", round=1)
        one.hub.cut("carl")  # its link is gone, and its will is said
        agents.pop("carl").cancel()
        await asyncio.gather(serving, *agents.values())  # and not after twenty minutes

    run_all(story())
    assert {(2, "anna"), (2, "bela")} <= set(one.store.attempts.of("watch")[-1].counted)


def test_a_fleet_that_waits_names_who_is_missing(house, monkeypatch):
    monkeypatch.setattr("talaria_coordinator.fleet.waiting.AFTER_S", 0.2)
    one = house()

    async def late():
        told = await one.told_of("waiting", missing=["carl"])
        assert (told["here"], told["needed"]) == (2, 3)
        await one.agent("carl")

    run_all(one.serve(), one.agent("anna"), one.agent("bela"), late())
    assert len([item for item in one.told if item["event"] == "waiting"]) == 1


def test_samples_that_are_not_for_the_runs_model_are_told_before_a_round_is_asked(house, a_run, monkeypatch):
    """The fleet waits for a device that never comes, so no round is ever asked. A bundle that cannot be made is told
    then, too: the log said so after the last round."""
    monkeypatch.setitem(sys.modules, "onnx", None)  # as where it is not installed
    one = house(a_run(rounds=1), quorum=1.0, members=("anna", "zoe"))
    config = DeviceConfig(
        device="anna", fleet="watch", broker="mqtt://127.0.0.1", state=one.folder / "anna", retry_s=0.1,
        source=Given(lambda: samples(1, shape=(6, 16))), bundle=one.folder / "me.talaria",
    )  # fmt: skip

    async def story():
        serving = asyncio.ensure_future(one.serve())
        running = asyncio.ensure_future(
            run_agents(
                [config], one.told.append,
                open_transport=lambda c, will: Loop(one.hub, c.device, device_filters("watch", c.device), will),
            )
        )  # fmt: skip
        await one.told_of("data", device="anna")
        running.cancel()
        one.services[0].stop()
        await asyncio.gather(serving, running, return_exceptions=True)

    run_all(story())
    (found,) = one.of("data")
    assert "train samples have shape (6, 16), but the model takes (6, 32)" in found["error"]
    assert not one.of("round-opened")
    (told,) = one.of("error")
    assert told["error"] == "no bundle is written without onnx: pip install 'talaria[export]'"
