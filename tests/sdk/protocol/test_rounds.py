def test_a_round_counts_each_device_once(world):
    w = world(3, world_faults())
    w.begin()
    w.open(1)
    w.run(10)
    assert [c.dev for c in w.closed[0].counted] == w.names
    assert w.receipts == {(n, 1): ["stored"] for n in w.names}


def world_faults(**kw):
    from talaria.wire.loop import Faults

    return Faults(**kw)
