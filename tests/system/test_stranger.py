"""A stranger with a broker and no key says anything for some seconds: real processes, a real Mosquitto."""

import asyncio

import pytest

from talaria.errors import StateError
from talaria_bench.fleet import stranger
from talaria_bench.fleet.stranger import Visit


def test_a_stranger_ends_nobody_shuts_nobody_out_and_stops_no_round(tmp_path):
    found = asyncio.run(Visit(tmp_path / "visit", seconds=4.0, seed=3, devices=2, rate=200.0).run())
    assert found["broken"] == []
    assert found["rounds"] >= 1
    assert found["said"] > 100
    assert found["retained"] > 10
    assert found["refused"] > 10
    assert found["refused_by_devices"] > 10


def test_a_stranger_who_says_nothing_shows_nothing(tmp_path):
    visit = Visit(tmp_path, seconds=4.0, seed=3, devices=2, rate=200.0)
    rows = {"coordinator": {"starts": 1, "middle_mib": 200.0, "end_mib": 200.0}}
    assert visit._found(rows, 5)["broken"] == ["the stranger could say nothing"]


def test_a_fleet_that_does_not_begin_is_told_in_words(tmp_path, monkeypatch):
    monkeypatch.setattr(stranger, "START_S", 0.5)
    with pytest.raises(StateError, match=r"no round was closed in the first 0\.5 s"):
        asyncio.run(Visit(tmp_path / "visit", seconds=1.0, seed=3, devices=2, rate=200.0).run())
