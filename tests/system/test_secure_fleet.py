"""Secure rounds of a real fleet: Mosquitto with TLS, and what the coordinator keeps of it."""

import asyncio
import json
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest
from tests.keyed import FLEET, Keyed, data_of

from talaria import tensors
from talaria.errors import StateError
from talaria.federated import global_model, rounds
from talaria.federated.private_rule import private_rule
from talaria.federated.run import Member
from talaria.privacy.accounting import epsilon, noise_for
from talaria.privacy.clipping import clip_in
from talaria.privacy.forms import FORMS
from talaria.privacy.messages import decode
from talaria.privacy.rule import Privacy
from talaria.protocol import words
from talaria.protocol.events import Received
from talaria.simulation.run import simulate
from talaria.wire import codec
from talaria_coordinator.config.privacy import PrivacyConfig
from talaria_coordinator.fleet.operator_commands import Order
from talaria_coordinator.fleet.service import Service
from talaria_coordinator.storage.attempts import Attempts
from talaria_coordinator.storage.blobs import FolderBlobs
from talaria_coordinator.web.queries import Views
from talaria_edge.agent.agent import Agent
from talaria_edge.agent.secure import Part
from talaria_edge.storage import tensor_files

FOUR = ("anna", "bela", "carl", "dora")
SECURE = PrivacyConfig(rule=Privacy(secure=True, most_weight=64), step_s=30.0)


def shared_of(fleet):
    with fleet.store as store:
        data = FolderBlobs(fleet.state / "blobs").get(store.fleets.get(FLEET).model_digest)
    return global_model.decode_model(fleet.run, data)


def simulated(fleet, **but):
    """What the run comes to, of the same whole numbers added up in the open."""
    data = {name: data_of(i) for i, name in enumerate(fleet.members)}
    members = {name: Member(name, own.train, own.val) for name, own in data.items()}
    rule = private_rule(fleet.run, None, replace(fleet.options["privacy"].rule, secure=False), 0)
    return simulate(fleet.run, members, aggregator=rule).shared


async def nothing():
    """Nothing more."""


def ordering(monkeypatch):
    """What gives an order to the coordinator that serves now."""
    services, serving = [], Service.__init__
    monkeypatch.setattr(Service, "__init__", lambda self, *a, **k: (services.append(self), serving(self, *a, **k))[1])

    async def order(verb):
        made = Order(verb)
        await services[-1].order(made)
        return await asyncio.wrap_future(made.answer)

    return order


@pytest.mark.parametrize("algorithm", ["fedavg", "pfedgm"])
def test_a_secure_fleet_learns_what_is_simulated_and_its_coordinator_keeps_no_update(keyed, algorithm):
    fleet = keyed(rounds=2, members=FOUR, privacy=SECURE, algorithm=algorithm)
    fleet.live(nothing)
    assert fleet.counted() == {1: list(FOUR), 2: list(FOUR)}
    assert tensors.equal(shared_of(fleet), simulated(fleet))
    assert [len(fleet.of("step", step=step)) for step in range(1, 6)] == [2] * 5
    kept = b"".join(path.read_bytes() for path in fleet.state.rglob("*") if path.is_file())
    for name in FOUR:
        update = (fleet.folder / name / "update.bin").read_bytes()
        body = update[-2000:]  # the last tensor of a plain update, as it would travel
        assert body not in kept, name


def test_a_device_that_falls_silent_in_any_step_is_done_without(keyed, monkeypatch):
    """In round n from step n on, without a last will, and back in the next."""
    fleet = keyed(rounds=4, members=FOUR, privacy=replace(SECURE, step_s=1.0))
    real = Agent._feed

    def feed(agent, event):
        rounds = len(fleet.of("round-opened"))
        silent = fleet.of("step", attempt=rounds, step=rounds) and not fleet.of("round-closed", attempt=rounds)
        if not (silent and agent.config.device == "dora" and isinstance(event, Received)):
            real(agent, event)

    monkeypatch.setattr(Agent, "_feed", feed)
    fleet.live(nothing)
    # In the last two its masked update had come: it counts, and needs its device no more.
    assert fleet.counted() == {1: list(FOUR[:3]), 2: list(FOUR[:3]), 3: list(FOUR), 4: list(FOUR)}
    assert not fleet.of("quarantined")
    assert not fleet.of("round-failed")


async def ended(tasks):
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def masked_updates(monkeypatch):
    """By device and terms, all masked updates that a device ever says."""
    said, begin, answer = {}, Part._begin, Part._answer

    def seen(part, word):
        if word is not None and word.step == words.UPLOAD:
            message = decode(word.data)
            said.setdefault((message.device, message.terms), set()).add(word.data)
        return word

    monkeypatch.setattr(Part, "_begin", lambda part, *more: seen(part, begin(part, *more)))
    monkeypatch.setattr(Part, "_answer", lambda part, *more: seen(part, answer(part, *more)))
    return said


def test_either_side_may_die_in_any_step_and_goes_on_from_there(keyed, monkeypatch):
    """In round n step n - 1 ends both the coordinator and three of the devices. Nobody masks twice."""
    masked = masked_updates(monkeypatch)
    fleet = keyed(rounds=5, members=FOUR, privacy=SECURE, retry_s=2.0)  # who lost the broker has time to find it again

    async def scenario():
        fleet.options["stay"] = True
        serving = asyncio.ensure_future(fleet.serve())
        await fleet.told_of("ready")
        agents = {name: asyncio.ensure_future(fleet.agent(name).run()) for name in FOUR}
        for round in range(1, 6):
            await fleet.told_of("round-opened", round=round)
            if round > 1:
                await fleet.told_of("step", attempt=round, step=round - 1)
            await ended([serving, *(agents[name] for name in FOUR[1:])])
            fleet.options["stay"] = round < 5
            serving = asyncio.ensure_future(fleet.serve())
            agents |= {name: asyncio.ensure_future(fleet.agent(name).run()) for name in FOUR[1:]}
        await asyncio.gather(serving, *agents.values())

    asyncio.run(asyncio.wait_for(scenario(), 200))
    assert fleet.counted() == {round: list(FOUR) for round in range(1, 6)}
    assert tensors.equal(shared_of(fleet), simulated(fleet))
    assert not fleet.of("round-failed")
    assert len(masked) == 5 * len(FOUR)
    assert all(len(said) == 1 for said in masked.values())


def test_a_device_that_lost_its_part_masks_nothing_more_in_that_round_and_takes_part_in_the_next(keyed, monkeypatch):
    """It has new keys then, which are no offence and of no use to a round that knows its old ones."""
    masked = masked_updates(monkeypatch)
    fleet = keyed(rounds=2, members=FOUR, privacy=replace(SECURE, step_s=2.0))

    async def scenario():
        async with fleet.running(*FOUR) as tasks:
            await fleet.told_of("step", attempt=1, step=1)
            await ended([tasks["dora"]])
            (fleet.folder / "dora" / "secure.bin").unlink()
            tasks["dora"] = asyncio.ensure_future(fleet.agent("dora").run())
            await fleet.told_of("round-closed", round=2)

    asyncio.run(asyncio.wait_for(scenario(), 100))
    assert fleet.counted()[2] == list(FOUR)
    assert not fleet.of("quarantined")
    assert all(len(said) == 1 for said in masked.values())


@pytest.mark.parametrize("step", [1, 2])
def test_a_device_that_dies_in_the_last_round_comes_back_to_a_run_that_is_over_and_finishes_it(keyed, step):
    """Its word was heard then, and nobody says another."""
    fleet = keyed(rounds=1, members=FOUR, privacy=replace(SECURE, step_s=1.0))

    async def scenario():
        async with fleet.running(*FOUR) as tasks:
            await fleet.told_of("step", attempt=1, step=step)
            await ended([tasks["dora"]])
            await fleet.told_of("round-closed", round=1)
            tasks["dora"] = asyncio.ensure_future(fleet.agent("dora").run())
            await tasks["dora"]

    asyncio.run(asyncio.wait_for(scenario(), 60))
    assert fleet.counted() == {1: list(FOUR[:3])}
    assert fleet.of("received", device="dora", outcome="late")
    assert (fleet.folder / "dora" / "result.json").exists()


@pytest.mark.parametrize("noise_by", FORMS)
def test_a_budget_is_kept_told_and_ends_the_fleet(keyed, monkeypatch, noise_by):
    """Noise for four rounds, of a run that has five. Another start and an order to go on open no fifth."""
    order = ordering(monkeypatch)
    epsilon = 6.0
    rule = Privacy(secure=True, clip=1.0, epsilon=epsilon, noise=noise_for(epsilon, 4, 1e-5), noise_by=noise_by)
    fleet = keyed(rounds=5, members=FOUR, privacy=replace(SECURE, rule=rule))

    async def scenario():
        async with fleet.running(*FOUR):
            await fleet.told_of("budget-spent")
        async with fleet.running(*FOUR):
            await fleet.told_of("ready", count=2)
            assert await order("resume") == "running"
            await fleet.told_of("budget-spent", count=2)

    asyncio.run(asyncio.wait_for(scenario(), 100))
    assert list(fleet.counted()) == [1, 2, 3, 4]
    with fleet.store as store:
        record = store.fleets.get(FLEET)
    assert record.status == "paused"
    assert record.spent.rounds == dict.fromkeys(FOUR, 4)
    assert epsilon - 1e-6 < record.spent.epsilon <= epsilon
    views = Views(fleet.state / "coordinator.db")
    told = views.fleet(FLEET).privacy
    views.close()
    assert (told.epsilon, told.budget, told.rounds) == (record.spent.epsilon, epsilon, 4)
    assert told.form == FORMS[noise_by]
    for name in FOUR:
        own = json.loads((fleet.folder / name / "privacy.json").read_text())
        assert own == {"epsilon": record.spent.epsilon, "delta": 1e-5, "form": FORMS[noise_by]}
    fleet.options["privacy"] = replace(SECURE, rule=replace(rule, noise=0.0, epsilon=None))
    assert not tensors.equal(shared_of(fleet), simulated(fleet)), "there is noise"


@pytest.mark.parametrize("secure", [True, False])
def test_a_length_that_follows_the_devices_goes_where_simulation_sends_it(keyed, secure):
    """Without noise, so that both can be told apart by nothing else."""
    rule = Privacy(secure=secure, clip=0.05, quantile=0.5, clip_rate=1.0)
    fleet = keyed(rounds=3, members=FOUR, privacy=replace(SECURE, rule=rule))
    fleet.live(nothing)
    assert tensors.equal(shared_of(fleet), simulated(fleet))
    with fleet.store as store:
        record = store.fleets.get(FLEET)
        assert [one.means for one in store.attempts.of(FLEET)] == [{}, {}, {}]
        server = codec.decode_tensors(FolderBlobs(fleet.state / "blobs").get(record.server), schema=None)
    clip = clip_in(server)
    assert clip > 0.05, "all are longer than the first length"


def test_a_length_that_follows_with_a_budget_is_told(keyed):
    # Noise may send the length up in one round and down in the next; by this quantile it does not come back to 1.
    rule = Privacy(secure=True, clip=1.0, quantile=0.3, epsilon=8.0, noise=2.0, noise_by="devices")
    fleet = keyed(rounds=2, members=FOUR, privacy=replace(SECURE, rule=rule))
    fleet.live(nothing)
    views = Views(fleet.state / "coordinator.db")
    told = views.fleet(FLEET).privacy
    views.close()
    with fleet.store as store:
        record = store.fleets.get(FLEET)
        assert [one.means for one in store.attempts.of(FLEET)] == [{}, {}]
    for name in FOUR:  # and the card of what each device has made for itself
        own = fleet.folder / name / "personal.safetensors"
        _, facts = tensor_files.unpack(own.read_bytes(), own, "train again")
        assert facts["card"]["privacy"] == {"epsilon": told.epsilon, "delta": 1e-5, "form": FORMS["devices"]}
    assert told.clip == record.spent.clip != 1.0
    assert record.spent.epsilon == pytest.approx(epsilon(2.0, 2, 1e-5))


def test_an_owner_who_insists_takes_part_in_no_open_round(keyed):
    fleet = keyed(rounds=1, members=FOUR, deadline_s=5.0)
    device = Keyed.device
    fleet.device = lambda name: replace(device(fleet, name), secure=name == "dora")

    async def scenario():
        async with fleet.running(*FOUR):
            await fleet.told_of("round-closed", round=1)

    asyncio.run(asyncio.wait_for(scenario(), 100))
    assert fleet.counted() == {1: list(FOUR[:3])}
    assert "wants secure rounds" in fleet.of("progress", device="dora", phase="declined")[0]["reason"]


def test_metrics_are_told_as_means_alone(keyed):
    rule = replace(SECURE.rule, metrics=("val_accuracy", "pruned"), metric_bound=1.0)
    fleet = keyed(rounds=2, members=FOUR, algorithm="hermes", privacy=replace(SECURE, rule=rule))
    fleet.live(nothing)
    own = [one["metrics"] for one in fleet.of("trained")]
    assert len(own) == 8
    with fleet.store as store:
        told = [attempt.means for attempt in store.attempts.of(FLEET)]
    for means, devices in zip(told, (own[:4], own[4:]), strict=True):
        for name in rule.metrics:
            # Each of four is rounded to a step of one over (2^31 - 1) / 4.
            assert abs(means[name] - fmean(one[name] for one in devices)) < 2 / 2**31 + 1e-12
    views = Views(fleet.state / "coordinator.db")
    newest = views.attempts(FLEET)[0]
    assert newest.means == told[-1]
    assert newest.accuracy is None, "no device's own"
    assert all(not one.metrics for one in views.attempt(FLEET, 2).updates)
    views.close()
    assert tensors.equal(shared_of(fleet), simulated(fleet))


def test_who_cannot_tell_what_all_tell_takes_no_part_and_says_why(keyed):
    rule = replace(SECURE.rule, metrics=("drift.labels",))
    fleet = keyed(rounds=1, members=FOUR, privacy=replace(SECURE, rule=rule))

    async def scenario():
        async with fleet.running(*FOUR):
            await fleet.told_of("progress", phase="declined", count=4)

    asyncio.run(asyncio.wait_for(scenario(), 100))
    reasons = {one["device"]: one["reason"] for one in fleet.of("progress", phase="declined")}
    assert sorted(reasons) == sorted(FOUR)
    assert all("does not tell drift.labels" in reason for reason in reasons.values())


@pytest.mark.parametrize(("least", "takes_part"), [(1.0, True), (1.1, False)])
def test_an_owner_who_wants_noise_of_devices_takes_part_where_there_is_so_much(keyed, least, takes_part):
    rule = Privacy(secure=True, clip=1.0, noise=1.0, noise_by="devices", threshold=3)
    fleet = keyed(rounds=1, members=FOUR, privacy=replace(SECURE, rule=rule))
    device = Keyed.device
    own = {"secure": True, "least_noise": least}
    fleet.device = lambda name: replace(device(fleet, name), **(own if name == "dora" else {}))

    async def scenario():
        async with fleet.running(*FOUR):
            await fleet.told_of("round-closed", round=1)

    asyncio.run(asyncio.wait_for(scenario(), 100))
    assert fleet.counted() == {1: list(FOUR if takes_part else FOUR[:3])}
    declined = fleet.of("progress", device="dora", phase="declined")
    assert bool(declined) is not takes_part
    assert takes_part or "wants noise of 1.1 by devices" in declined[0]["reason"]
    trained = [event["device"] for event in fleet.told if event["event"] == "trained"]
    assert ("dora" in trained) is takes_part  # nobody trains for a round in which they take no part


def test_an_owner_who_wants_more_company_while_a_round_is_on_says_no_further_word_in_it(keyed, monkeypatch):
    fleet, begin = keyed(rounds=1, members=FOUR, privacy=SECURE), Part.begin

    def begun(part, *asked):
        said = begin(part, *asked)
        if part.config.device == "dora":  # as after a start with another device.toml
            part.config = replace(part.config, least=4)
        return said

    monkeypatch.setattr(Part, "begin", begun)

    async def scenario():
        async with fleet.running(*FOUR):
            await fleet.told_of("round-closed", round=1)

    asyncio.run(asyncio.wait_for(scenario(), 100))
    assert fleet.counted() == {1: list(FOUR[:3])}
    (declined,) = fleet.of("progress", device="dora", phase="declined")
    assert "fewer than the 4 that its owner asks for" in declined["reason"]
    mine = fleet.device("anna")
    assert Part(mine).upload(1)
    assert Part(replace(mine, least=4)).upload(1) == b""


def spoiling(monkeypatch, step, spoilt, liar="dora"):
    """``liar`` says ``spoilt(what it would say)`` as its word of a step, signed as it should be."""
    real = Part.answer

    def answer(part, run, attempt, data):
        said = real(part, run, attempt, data)
        if part.config.device != liar or said.step != step:
            return said
        return replace(said, data=spoilt(decode(said.data)).signed(part._identity().signer).encode())

    monkeypatch.setattr(Part, "answer", answer)


def test_who_gives_wrong_shares_is_found_out_and_the_sum_opens_by_the_others(keyed, monkeypatch):
    five = (*FOUR, "elsa")  # four give every secret, so that one of them may be wrong
    fleet = keyed(rounds=2, members=five, privacy=SECURE)
    wrong = lambda said: replace(said, seeds=tuple((name, bytes(len(s) - 1) + b"\7") for name, s in said.seeds))
    spoiling(monkeypatch, 4, wrong, liar="anna")

    async def scenario():
        async with fleet.running(*five):
            await fleet.told_of("round-closed", round=2)

    asyncio.run(asyncio.wait_for(scenario(), 100))
    assert fleet.counted() == {1: list(five), 2: list(five[1:])}
    assert [one["device"] for one in fleet.of("quarantined")] == ["anna"]
    assert "wrong shares of 5 of 5 devices" in fleet.of("quarantined")[0]["reason"]


def test_who_shares_what_is_no_secret_ends_one_round_and_takes_part_in_no_other(keyed, monkeypatch):
    fleet = keyed(rounds=2, members=FOUR, privacy=SECURE)
    spoiling(monkeypatch, 1, lambda said: replace(said, boxes=tuple((n, bytes(len(b))) for n, b in said.boxes)))

    async def scenario():
        async with fleet.running(*FOUR):
            await fleet.told_of("round-closed", round=2)

    asyncio.run(asyncio.wait_for(scenario(), 100))
    assert fleet.counted() == {1: [], 2: list(FOUR[:3])}
    assert "do not give its secret" in fleet.of("round-passed")[0]["reason"]
    assert [one["device"] for one in fleet.of("quarantined")] == ["dora"]


def test_a_run_whose_last_round_is_passed_over_ends_and_its_devices_have_its_model(keyed, monkeypatch):
    """They waited for a version that was never announced, until the coordinator was started again."""
    fleet = keyed(rounds=1, members=FOUR, privacy=SECURE)
    spoiling(monkeypatch, 1, lambda said: replace(said, boxes=tuple((n, bytes(len(b))) for n, b in said.boxes)))

    async def scenario():
        async with fleet.running(*FOUR):
            await fleet.told_of("round-passed")
            assert (await fleet.told_of("done", fleet=FLEET))["round"] == 1
            for name in FOUR[:3]:
                await fleet.told_of("done", device=name)

    asyncio.run(asyncio.wait_for(scenario(), 100))


def test_a_sum_with_garbage_in_it_is_not_used_and_nobody_is_blamed(keyed, monkeypatch):
    fleet = keyed(rounds=1, members=FOUR, privacy=SECURE)
    noise = np.random.default_rng(0)
    spoiling(monkeypatch, 2, lambda said: replace(said, values=noise.bytes(len(said.values))))
    fleet.live(nothing)
    assert fleet.counted() == {1: []}
    assert {one["device"] for one in fleet.of("left-out")} == set(FOUR)
    assert "one of them sent garbage" in fleet.of("left-out")[0]["reason"]
    assert not fleet.of("quarantined")
    assert tensors.equal(shared_of(fleet), rounds.start(fleet.run)[0])


@pytest.mark.parametrize("spoilt", ["shares", "update"])
def test_a_round_whose_sum_was_to_open_is_paid_for_whatever_comes_of_it(keyed, monkeypatch, spoilt):
    """Who holds the sum, though nobody uses it, has seen it: another round of the same devices is not free."""
    rule = Privacy(secure=True, clip=1.0, noise=2.0, epsilon=50.0, noise_by="devices")
    fleet = keyed(rounds=1, members=FOUR, privacy=replace(SECURE, rule=rule))
    noise = np.random.default_rng(0)
    if spoilt == "shares":  # the sum does not open
        spoiling(monkeypatch, 1, lambda said: replace(said, boxes=tuple((n, bytes(len(b))) for n, b in said.boxes)))
    else:  # it opens, and is of no use
        spoiling(monkeypatch, 2, lambda said: replace(said, values=noise.bytes(len(said.values))))

    async def scenario():
        async with fleet.running(*FOUR):
            await fleet.told_of("round-passed" if spoilt == "shares" else "left-out")

    asyncio.run(asyncio.wait_for(scenario(), 100))
    assert fleet.counted() == {1: []}
    with fleet.store as store:
        spent = store.fleets.get(FLEET).spent
    assert (spent.rounds, spent.version) == (dict.fromkeys(FOUR, 1), 1)
    assert spent.epsilon == pytest.approx(epsilon(2.0, 1, 1e-5))


def test_a_round_that_a_full_disk_kept_from_being_passed_over_is_so_at_the_next_start(keyed, monkeypatch):
    """It failed there as any other, which is paid by nobody, and was tried again."""
    rule = Privacy(secure=True, clip=1.0, noise=2.0, epsilon=50.0, noise_by="devices")
    fleet = keyed(rounds=1, members=FOUR, privacy=replace(SECURE, rule=rule))
    spoiling(monkeypatch, 1, lambda said: replace(said, boxes=tuple((n, bytes(len(b))) for n, b in said.boxes)))
    commit, full = Attempts.commit, [True]

    def refused(*args, **facts):
        if full:
            raise StateError("the disk is full")
        commit(*args, **facts)

    monkeypatch.setattr(Attempts, "commit", refused)

    async def until(true):
        async with fleet.running(*FOUR) as tasks:
            await true(tasks)

    with pytest.raises(StateError, match="full"):
        asyncio.run(asyncio.wait_for(until(lambda tasks: asyncio.wait([tasks["co"]])), 100))
    full.clear()
    fleet.told.clear()
    asyncio.run(asyncio.wait_for(until(lambda _: fleet.told_of("done", fleet=FLEET)), 100))
    assert fleet.of("round-passed", attempt=1)
    assert fleet.counted() == {1: []}
    with fleet.store as store:
        assert store.fleets.get(FLEET).spent.rounds == dict.fromkeys(FOUR, 1)


def test_a_round_that_is_called_off_while_it_opens_is_paid_for_and_not_made_again(keyed, monkeypatch):
    rule = Privacy(secure=True, clip=1.0, noise=2.0, epsilon=50.0, noise_by="devices")
    fleet = keyed(rounds=2, members=FOUR, privacy=replace(SECURE, rule=rule))
    real, held = Part.answer, []

    def answer(part, run, attempt, data):
        said = real(part, run, attempt, data)
        held.append(said.step == 4 and attempt == 1)
        return None if held[-1] else said  # nobody opens the first sum

    monkeypatch.setattr(Part, "answer", answer)
    order = ordering(monkeypatch)

    async def scenario():
        async with fleet.running(*FOUR):
            await fleet.told_of("step", attempt=1, step=4)
            assert await order("abort") == "aborted"
            await fleet.told_of("round-passed", attempt=1)
            assert await order("resume") == "running"
            await fleet.told_of("round-closed", round=2)

    asyncio.run(asyncio.wait_for(scenario(), 100))
    assert fleet.counted() == {1: [], 2: list(FOUR)}
    with fleet.store as store:
        assert store.fleets.get(FLEET).spent.rounds == dict.fromkeys(FOUR, 2)


LIES = {
    "another's name": lambda said: replace(said, device="anna"),
    "no signature": lambda said: replace(said, signature=bytes(64)),
    "another round": lambda said: replace(said, members=bytes(32)),
}


@pytest.mark.parametrize(
    ("step", "lie"), [*((3, lie) for lie in LIES), (1, "another's name"), (4, "no signature"), (4, "another round")]
)
def test_who_lies_in_a_secure_round_is_shut_out_and_the_others_go_on(keyed, monkeypatch, step, lie):
    fleet = keyed(rounds=1, members=FOUR, privacy=SECURE)
    real = Part.answer

    def answer(part, run, attempt, data):
        said = real(part, run, attempt, data)
        if part.config.device != "dora" or said.step != step:
            return said
        return replace(said, data=LIES[lie](decode(said.data)).encode())

    monkeypatch.setattr(Part, "answer", answer)

    async def scenario():
        async with fleet.running(*FOUR):
            await fleet.told_of("round-closed", round=1)

    asyncio.run(asyncio.wait_for(scenario(), 100))
    assert [one["device"] for one in fleet.of("quarantined")] == ["dora"]
    # Where its update had come before it lied, the sum of all opens without its word.
    assert fleet.counted() == {1: list(FOUR if step > words.UPLOAD else FOUR[:3])}
