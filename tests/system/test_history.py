"""Whole fleets as deterministic histories: seeds that keep all promises, seeds that replay to the byte, and flaws that
are found when they are planted. `talaria bench history` lives through thousands."""

import json
import os
from dataclasses import replace

import pytest

from talaria import time
from talaria.protocol import actions as a
from talaria.protocol import events as e
from talaria_bench.history.bench import live, shortest
from talaria_bench.history.disks import KilledError
from talaria_bench.history.faults import KINDS, LIFE, Fault, Plan, draw, still
from talaria_bench.history.shorten import shortened
from talaria_coordinator.storage.updates import Updates
from talaria_edge.storage import tensor_files


def plan(*faults, devices=("anna", "bela", "carl"), keyed=False, **more):
    return Plan(1, devices, keyed, tuple(replace(fault, number=n) for n, fault in enumerate(faults)), **more)


def fault(at, kind, target, seconds=3.0, strength=0.0, how=""):
    return Fault(0, at, kind, target, seconds, strength, how)


def kept(outcome):
    assert outcome.broken == "", "\n".join((outcome.why, *outcome.last))
    return outcome


# ---- what must be kept ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 3, 31, 47, 66, 103, 150, 171, 225, 811])
def test_a_fleet_keeps_its_promises_whatever_a_seed_draws(seed):
    kept(live(still(seed)))


@pytest.mark.parametrize("seed", [5, 8, 14])
def test_a_fleet_that_lives_keeps_its_promises(seed):
    """Extended, warm-started, paused, joined and left, with whatever else the seed draws."""
    assert draw(seed) != still(seed)
    kept(live(draw(seed)))


def test_a_fleet_whose_settings_name_its_first_run_still_starts_after_many_others():
    orders = [fault(2.0 + 15 * n, "next", "co", 0.0, 1.0) for n in range(5)]
    found = kept(live(plan(*orders, fault(80.0, "stop", "co"), devices=("anna", "bela"), rounds=1), keep=10_000))
    assert sum(" ordered verb=next" in line for line in found.last) == 5


@pytest.mark.parametrize("seed", range(1000, 1040))
def test_many_fleets_keep_their_promises(seed):
    kept(live(draw(seed)))


@pytest.mark.parametrize("seed", [7100029, 7100081, 7100296])
def test_a_fleet_whose_coordinator_is_restored_keeps_its_promises_whatever_comes_then(seed):
    """Its link breaks while it looks whether another one serves; or another one does, on what was its database; or an
    order waits until it has begun."""
    kept(live(draw(seed)))


def test_members_a_called_off_run_and_a_restore_in_one_story_lose_nothing():
    story = (
        fault(8.0, "join", "dora"),
        fault(20.0, "next", "co", 0.0, 4.0, "yes"),
        fault(55.0, "retire", "bela"),
        fault(60.0, "backup", "co"),
        fault(62.0, "next", "co", 0.0, 4.0, "no"),
        fault(110.0, "readmit", "bela"),
        fault(120.0, "restore", "co", 2.0, how="first"),
        fault(135.0, "next", "co", 0.0, 3.0, "yes"),
    )
    lives = plan(*story, devices=("anna", "bela", "carl", "dora"), rounds=200, grows=True, canary=True)
    said = "\n".join(kept(live(lives, keep=100_000)).last)
    for word in ("'dora']", "called_off=False", "called_off=True", "verb=retire", "verb=readmit", " restored "):
        assert word in said, word


def tried(gates, *more, flaw=None, devices=("anna", "bela", "carl")):
    begins = plan(fault(2.0, "next", "co", 0.0, 2.0, gates), *more, devices=devices, rounds=3, canary=True)
    found = kept(live(begins, keep=10_000, flaw=flaw))
    (said,) = [n for n, line in enumerate(found.last) if " canary called_off=" in line]
    assert sum(" round-closed " in line for line in found.last[:said]) == 3  # it is judged at once
    return found.last[said]


@pytest.mark.parametrize(("gates", "off"), [("yes", False), ("no", True)])
def test_a_trial_ends_as_its_gates_say_though_the_coordinator_dies_before_it_has_judged(gates, off):
    lives = [2]

    def dies_once(service):
        judge = service._is_called_off

        def judged():
            fleet = service._conductor.fleet
            if fleet.life.canary and fleet.round >= fleet.life.canary["gate"]:
                lives.pop()
                if lives:
                    raise KilledError("after the round of the gates was committed")
            return judge()

        service._is_called_off = judged

    lives.append(1)
    assert f"called_off={off} asked=2 answered=2" in tried(gates, flaw=dies_once)
    assert not lives


@pytest.mark.parametrize("name", ["anna", "bela"])
def test_a_trial_goes_on_with_others_where_who_tries_is_gone_for_good(name):
    assert "asked=1 answered=1" in tried("yes", fault(11.5, "gone", name, 0.0), devices=("anna", "bela"))


def test_a_fleet_that_nothing_happens_to_learns():
    found = kept(live(plan()))
    assert found.rounds >= 4
    assert found.recovered < 30


@pytest.mark.parametrize("number", [1, 2, 3, 5, 8])
def test_a_write_that_fails_costs_a_device_no_more_than_that_round(number):
    """Each write of a round in turn: the model's chunk, its flush, the private state, the update, the protocol."""
    kept(live(plan(fault(8.0, "failed-write", "anna", strength=float(number)))))


# ---- the same again ------------------------------------------------------------------------------------


def test_a_seed_replays_to_the_byte_in_any_process(command, monkeypatch):
    here = live(draw(3))
    assert here.trace == live(draw(3)).trace
    assert here.trace != live(draw(3).only(frozenset({0}))).trace
    monkeypatch.setenv("PYTHONHASHSEED", "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2")
    _, out, errors = command("bench", "history", "--seed", 3, "--json")
    assert json.loads(out)["trace"] == here.trace, errors


def test_how_a_history_is_ended_is_no_part_of_its_trace():
    """Programs that still run are ended in the order of a set; of this one, some accept work while they are."""
    assert len({live(draw(13)).trace for _ in range(5)}) == 1


def test_every_kind_of_fault_is_drawn_and_can_be_told():
    faults = [fault for seed in range(300) for fault in draw(seed).faults]
    assert {fault.kind for fault in faults} == {*KINDS, *LIFE, "readmit"}
    assert all(str(fault) for fault in faults)
    assert draw(5) == draw(5)
    times = [[fault.at for fault in draw(seed).faults] for seed in range(50)]
    assert times == [sorted(some) for some in times]


# ---- flaws that are planted are found ------------------------------------------------------------------


def change(service, **methods):
    """Methods of the service's learning, which is frozen."""
    for name, method in methods.items():
        object.__setattr__(service._learning, name, method)


def folds_one_update_twice(service):
    close = service._learning._close

    def twice(shared, server, updates):
        updates = list(updates)
        return close(shared, server, [*updates, updates[-1]])

    change(service, _close=twice)


def takes_what_was_made_for_another_round(service):
    checked = service._learning.checked
    change(service, checked=lambda data, device, round, base_digest: checked(data, device, None, base_digest))


def gives_receipts_for_what_it_did_not_keep(service):
    class Forgetful(Updates):
        def keep(self, fleet, attempt, device, **facts):
            row = super().keep(fleet, attempt, device, **facts)
            with service.store.database.engine.begin() as tx:
                tx.exec_driver_sql("DELETE FROM findings WHERE attempt = ? AND device = ?", (attempt, device))
                tx.exec_driver_sql("DELETE FROM updates WHERE attempt = ? AND device = ?", (attempt, device))
            return row

    service.store.updates = Forgetful(service.store.database)


def never_opens_again_after_a_round(service):
    advance = service._conductor.advance

    def hardly(state):
        if service._conductor.fleet.round < 3:
            advance(state)

    service._conductor.advance = hardly


def shuts_out_who_was_away(service):
    carry_out = service._carry_out

    def blamed(action):
        carry_out(action)
        if isinstance(action, a.DeviceDown):
            service._feed(e.Revoke(time.monotonic(), action.device, "it was away"))

    service._carry_out = blamed


@pytest.mark.parametrize(
    ("flaw", "faults", "broken"),
    [
        (folds_one_update_twice, [], "model"),
        (takes_what_was_made_for_another_round, [fault(5.0, "lie", "anna", how="replay")], "twice"),
        (gives_receipts_for_what_it_did_not_keep, [], "lost"),
        (never_opens_again_after_a_round, [], "stuck"),
        (shuts_out_who_was_away, [fault(5.0, "cut", "anna"), fault(9.0, "weather", "all", strength=0.1)], "shut-out"),
    ],
)
def test_a_flaw_that_is_planted_is_found_and_its_history_shortened(flaw, faults, broken):
    given = plan(*faults)
    kept(live(given))
    found = live(given, flaw=flaw)
    assert found.broken == broken, found.why
    short = shortest(given, broken, flaw=flaw)
    assert len(short.faults) == (0 if not faults else 1)


def test_a_private_state_that_is_not_flushed_is_missed_after_a_power_cut(monkeypatch):
    def unflushed(path, data):
        beside = path.with_name(f".{path.name}.part")
        beside.write_bytes(data)
        beside.replace(path)

    cuts = plan(*(fault(10.0 + 12 * n, "power", "anna") for n in range(4)))
    kept(live(cuts))
    monkeypatch.setattr(tensor_files, "write", unflushed)
    assert live(cuts).broken


def test_the_shortest_history_needs_all_of_its_faults():
    tried = []

    def fails(some):
        tried.append(list(some))
        return {2, 5, 11} <= set(some)

    assert shortened(range(16), fails) == [2, 5, 11]
    assert len(tried) < 80
    assert shortened([1, 2, 3], lambda some: True) == []
