"""Links with TLS that break without end, and two devices that put each other out with one name: learning goes on, the
operator hears of what only a hand can mend, and each update counts once."""

import asyncio
from dataclasses import replace

import pytest
from keyed import Cutter, data_of

from talaria.protocol.coordinator.presence import DOUBLED
from talaria.protocol.coordinator.state import Rules
from talaria.wire.backoff import Backoff
from talaria_edge.agent.rounds import Rounds
from talaria_edge.agent.supervisor import run_agents
from talaria_edge.data import Given

ROUNDS = 3
LIVED_S = 0.3
CUTS = 15
"""So often each link breaks within the second round."""


@pytest.fixture
def impatient(monkeypatch):
    """Links are tried again at once: with pauses of up to 8 seconds the same takes minutes."""
    monkeypatch.setattr("talaria.wire.mqtt.Backoff", lambda shortest, longest: Backoff(0.05, 1.0))


@pytest.mark.usefixtures("impatient")
def test_links_that_break_every_third_of_a_second_lose_no_update_and_shut_nobody_out(keyed, monkeypatch):
    fleet, often = keyed(ROUNDS, quorum=1.0, deadline_s=0.0), asyncio.Event()
    # More births than are acted on: 3 in 5 seconds, instead of 30 in 60.
    monkeypatch.setattr("talaria.protocol.coordinator.presence.FLAP_SECONDS", 5.0)
    monkeypatch.setitem(Rules.__init__.__kwdefaults__, "flaps", 3)
    real = Rounds.learn

    async def learn(rounds, learner, action):
        if b'"round": 2' in action.spec:
            await often.wait()
        await real(rounds, learner, action)

    monkeypatch.setattr(Rounds, "learn", learn)

    async def breaking(device, way):
        while True:
            ups = len(fleet.of("connected", device=device))
            await asyncio.sleep(LIVED_S)
            way.cut()
            if way.cuts == CUTS:
                often.set()
            await fleet.told_of("connected", device=device, count=ups + 1, seconds=120)

    async def story():
        async with Cutter(fleet.port) as annas, Cutter(fleet.port) as belas:
            fleet.through = {"anna": annas.port, "bela": belas.port}
            async with fleet.running("anna", "bela") as tasks:
                await fleet.told_of("connected", device="anna")
                await fleet.told_of("connected", device="bela")
                cutting = [asyncio.ensure_future(breaking(*x)) for x in (("anna", annas), ("bela", belas))]
                await asyncio.wait([tasks["anna"], tasks["bela"], tasks["co"], *cutting], return_when="FIRST_COMPLETED")
                await asyncio.gather(tasks["anna"], tasks["bela"])
                for task in cutting:
                    task.cancel()
                await asyncio.gather(*cutting, return_exceptions=True)

    asyncio.run(story())
    assert fleet.counted() == {round: ["anna", "bela"] for round in range(1, ROUNDS + 1)}
    assert fleet.learned_what_simulation_learns()
    assert fleet.of("quarantined") == []
    assert fleet.of("refused", device="anna") != []  # for its births


@pytest.mark.usefixtures("impatient")
def test_two_devices_with_one_name_are_told_so_and_hold_up_nobody(keyed, monkeypatch):
    """Each has samples and a memory of its own. The broker lets one of them in at a time, and both come back."""
    monkeypatch.setattr("talaria_coordinator.fleet.scheduler.AGAIN_S", (0.2, 1.0))
    fleet = keyed(1000, members=("anna", "bela", "carl"), quorum=0.6, deadline_s=4.0)

    def twin(number):
        state, data = fleet.folder / f"twin-{number}", Given(lambda: data_of(10 + number))
        config = replace(fleet.device("carl"), state=state, source=data)
        return asyncio.ensure_future(run_agents([config], lambda told: fleet.told.append({**told, "twin": number})))

    async def story():
        async with fleet.running("anna", "bela", seconds=280):
            twins = [twin(1)]
            try:
                await fleet.told_of("round-closed")
                twins.append(twin(2))
                await fleet.told_of("doubled", device="carl")
                for number in (1, 2):  # what came for the other one may be told of too
                    await fleet.told_of("error", twin=number, error=DOUBLED)
                await fleet.told_of("round-closed", count=len(fleet.of("round-closed")) + 2)
                twins[0].cancel()
                counted = {"event": "received", "outcome": "stored", "twin": 2}
                # What was lost while they put each other out, a device says again within a minute.
                await fleet.told_of(**counted, count=len(fleet.of(**counted)) + 2, seconds=200)
                await fleet.told_of("round-closed", count=len(fleet.of("round-closed")) + 1)
            finally:
                for one in twins:
                    one.cancel()
                await asyncio.gather(*twins, return_exceptions=True)

    asyncio.run(story())
    rounds = list(fleet.counted().values())
    assert all(one in (["anna", "bela"], ["anna", "bela", "carl"]) for one in rounds)
    assert "carl" in rounds[-1] or "carl" in rounds[-2]
    assert {x["device"] for x in fleet.of("doubled")} == {"carl"}
    assert fleet.of("quarantined") == []
