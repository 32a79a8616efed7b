"""A fleet's year in twelve rounds: all that `talaria bench story` tells, and the same bytes."""

import json
import sqlite3

import pytest

from talaria.errors import ConfigError
from talaria_bench.fleet.files import FLEET
from talaria_bench.fleet.replay import Ledger
from talaria_bench.story import audit, plan


@pytest.mark.timeout(400)
def test_a_fleet_lives_through_all_that_happens_in_a_year(command, tmp_path):
    place = tmp_path / "story"
    place.mkdir(mode=0o711)
    status, out, errors = command(
        "bench", "story", "--rounds", 12, "--devices", 4, "--seed", 1, "--folder", place, "--json", seconds=360
    )
    found = json.loads(out)
    assert status == 0, (found["wrong"], errors[-2000:])
    assert (found["rounds"], found["lost"], found["twice"], found["shut_out"]) == (12, 0, 0, 0)
    assert found["models"] == found["models_equal"] == 13  # one was learned again after the restore
    assert found["private_equal"] == 4
    assert found["updates"] > 0
    assert found["receipts"] >= found["updates"]
    assert [start["grown"] != [] for start in found["warm_starts"]] == [False, False, False]  # heads are private
    assert [canary["passed"] for canary in found["canaries"]] == [False, True]
    assert [restore["rounds_lost"] for restore in found["restores"]] == [1]
    assert {len(change["come"]) + len(change["left"]) for change in found["members"]} == {3, 1}
    assert_that_the_audit_sees(place)


def assert_that_the_audit_sees(place):
    """What the bench would say, had a promise been broken."""
    ledger, old = Ledger(), Ledger()
    gone = audit.Record.of(place / "service-gone", FLEET, [], old)
    new = audit.Record.of(place / "service", FLEET, [("edge-00", 999)], ledger)
    assert ledger.lost == 1
    number = next(e["attempt"] for e in new.events if e["kind"] == "round-closed")
    at = next(i for i, event in enumerate(new.events) if event["kind"] == "restored")
    with sqlite3.connect(place / "service" / "coordinator.db") as db:
        db.execute("UPDATE updates SET digest = ? WHERE attempt = ?", ("0" * 64, number))
    db.close()
    changed = audit.Record.of(place / "service", FLEET, [], Ledger())
    receipts = [(name, n) for n, name in new.digests if n == number]
    assert audit.lost_receipts(gone, changed, changed.events[:at], receipts, ledger) == len(receipts)
    assert any("which the backup has committed" in line for line in ledger.wrong)


def test_a_plan_is_its_seeds():
    one, other = plan.draw(3, 8, 200), plan.draw(4, 8, 200)
    assert one == plan.draw(3, 8, 200) != other
    for story in (one, other, plan.draw(0, 4, 12)):
        assert story.acts == tuple(sorted(story.acts, key=lambda act: act.round))
        assert sum(act.rounds for act in story.acts if act.kind in ("next", "extend")) + story.first == story.rounds
        retired = {act.device for act in story.acts if act.kind == "retire"}
        assert retired
        assert retired == {act.device for act in story.acts if act.kind == "readmit"}
    with pytest.raises(ConfigError, match=r"rounds=11 and devices=4 must be at least 12 and 4"):
        plan.draw(1, 4, 11)
