"""A stranger with a broker and no key says anything for some seconds: real processes, a real Mosquitto."""

import asyncio

from talaria_bench.fleet.stranger import Visit


def test_a_stranger_ends_nobody_shuts_nobody_out_and_stops_no_round(tmp_path):
    found = asyncio.run(Visit(tmp_path / "visit", seconds=4.0, seed=3, devices=2, rate=200.0).run())
    assert found["broken"] == []
    assert found["rounds"] >= 1
    assert found["said"] > 100
    assert found["retained"] > 10
    assert found["refused"] > 10
    assert found["refused_by_devices"] > 10
