"""What a run takes over from the one before it: on the coordinator and on a device, and what it refuses."""

from dataclasses import replace

import numpy as np
import pytest

from talaria.algorithms import ALGORITHMS
from talaria.algorithms.hermes import own_values
from talaria.errors import ConfigError
from talaria.federated import device_task, rounds, run_model, warm_start
from talaria.federated.run import Member, Run
from talaria.model import masks
from talaria.model.masks import ChannelMask
from talaria.model.spec import AdapterSpec, ModelSpec
from talaria.planning.plan import Plan
from talaria.tensors import without
from talaria.training.engine import predict
from talaria.types import Recipe, Samples

SPEC = ModelSpec("imu_cnn", (6, 32), 3)
OTHERS = {"thorki": {"small": "mlp"}, "pfedgm": {"features": 8}}


def run_of(algorithm="fedavg", **changes):
    return Run(spec=SPEC, algorithm=algorithm, rounds=2, recipe=Recipe(epochs=1, batch=8), **changes)


def changed(tensors):
    return {name: value + np.ones_like(value) for name, value in tensors.items()}


def test_the_body_goes_on_and_a_head_grows_by_its_first_rows():
    old = run_of()
    new = warm_start.following(old, replace(old, spec=replace(SPEC, classes=4)))
    shared, first = changed(run_model.first_shared(old)), run_model.first_shared(new)
    found = warm_start.carried(old, new, shared)
    assert found.grown == ("head.weight", "head.bias")
    assert not found.fresh
    for name, value in found.tensors.items():
        assert np.array_equal(value[: len(shared[name])] if name in found.grown else value, shared[name]), name
    assert np.array_equal(found.tensors["head.weight"][3:], first["head.weight"][3:])


def test_adapters_may_be_new_and_what_was_private_is_carried_by_name():
    old = run_of("fedper")
    new = warm_start.following(old, replace(old, spec=replace(SPEC, adapters=AdapterSpec("residual", rank=2))))
    shared = changed(run_model.first_shared(old))
    body = warm_start.carried(old, new, shared).tensors
    assert np.array_equal(body["conv1.base.weight"], shared["conv1.weight"])
    samples = Samples(np.zeros((6, 6, 32), np.float32), np.arange(6) % 3)
    member = Member("anna", samples, samples)
    _, private = rounds.participate(old, member, run_model.first_shared(old), None, 1)
    found = warm_start.private_of(new, member, body, private)
    assert np.array_equal(found.tensors["head.weight"], private["head.weight"])
    assert found.fresh
    assert all("adapter" in name for name in found.fresh), found.fresh
    update, moved = rounds.participate(new, member, body, found.tensors, 3)
    assert update.base_version == 2
    assert moved.keys() == found.tensors.keys()


@pytest.mark.parametrize("engine", ["torch", "onnx"])
@pytest.mark.parametrize("name", sorted(set(ALGORITHMS) - {"local"}))
def test_who_sits_out_a_run_that_follows_is_served_its_model(name, engine):
    """As devices beside a trial are, of whom no round of it asked."""
    spec = ModelSpec("mlp", (8,), 3)
    old = replace(run_of(name), spec=spec)
    new = warm_start.following(old, replace(old, spec=replace(spec, classes=4)))
    draw = np.random.default_rng(0)
    samples = Samples(draw.standard_normal((12, 8)).astype(np.float32), np.arange(12) % 3)
    member, shared = Member("anna", samples, samples, engine=engine), run_model.first_shared(old)
    _, private = rounds.participate(old, member, shared, None, 1)
    body = warm_start.carried(old, new, shared).tensors
    carried = warm_start.private_of(new, member, body, private)
    served = rounds.personalize(new, member, body, carried.tensors)
    assert predict(served, samples.x).shape == (12, 4)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"algorithm": "fedper"}, "algorithm='fedper' must stay 'fedavg'"),
        ({"buffers": "aggregate"}, "buffers='aggregate' must stay 'local'"),
        ({"spec": replace(SPEC, name="mlp")}, "spec.name='mlp' must stay 'imu_cnn'"),
        ({"spec": replace(SPEC, seed=1)}, "spec.seed=1 must stay 0"),
        ({"spec": replace(SPEC, classes=2)}, "classes=2 is below the 3 that were learned"),
    ],
)
def test_what_has_nothing_to_carry_is_refused_by_its_field(changes, said):
    with pytest.raises(ConfigError, match=said):
        warm_start.following(run_of(), replace(run_of(), **changes))


def test_a_body_that_does_not_fit_is_refused_by_the_tensor():
    old = run_of()
    shared = dict(run_model.first_shared(old))
    name = run_model.split_of(old).body[0]
    shared[name] = shared[name][:-1]
    with pytest.raises(ConfigError, match=rf"next: {name} of the body is \(.*\) in the last model and"):
        warm_start.carried(old, old, shared)
    with pytest.raises(ConfigError, match=r"next: lost\.weight of the last model has no place in the new one"):
        warm_start.carried(old, old, {**run_model.first_shared(old), "lost.weight": np.zeros(3, np.float32)})


@pytest.mark.parametrize(
    ("name", "engine"), [(name, "torch") for name in sorted(set(ALGORITHMS) - {"local"})] + [("ditto", "onnx")]
)
def test_another_plan_within_a_run_keeps_what_both_keep(name, engine):
    """Narrower, wider again, and none: what is private is cut or grown with the channels, and learning goes on."""
    run = run_of(name, codec="int8")
    samples = Samples(np.random.default_rng(1).standard_normal((9, 6, 32), np.float32), np.arange(9) % 3)
    member = Member("anna", samples, samples, engine=engine)
    shared, private = run_model.first_shared(run), None
    for round, widths in enumerate(({}, {"conv1": 8, "conv2": 8}, {"conv1": 16}, {}), 1):
        member = replace(member, plan=Plan(widths=widths) if widths else None)
        if private is not None:
            before, private = private, warm_start.under_plan(run, member, shared, private)
            assert warm_start.under_plan(run, member, shared, private) is private
            if not ALGORITHMS[name].card.prunes:
                same_where_both_keep(run, before, private)
        update, private = rounds.participate(run, member, shared, private, round)
        if not ALGORITHMS[name].card.prunes:
            kept = (
                run_model.layout_of(SPEC).sizes
                if update.mask is None
                else {g: len(k) for g, k in update.mask.kept.items()}
            )
            assert kept == {**run_model.layout_of(SPEC).sizes, **widths}


def same_where_both_keep(run, before, after):
    layout = run_model.layout_of(SPEC)
    was, now = (device_task.mask_under(run, None, tensors) or layout.full() for tensors in (before, after))
    both = ChannelMask(layout, {g: tuple(c for c in was.kept[g] if c in now.kept[g]) for g in layout.sizes})
    uncut = (masks.PREFIX, *ALGORITHMS[run.algorithm].card.beside)
    for name in before.keys() & after.keys() - {name for name in before if name.startswith(uncut)}:
        key = name.rpartition("/")[2]
        cut = (masks.shrink({key: tensors[name]}, mask, both)[key] for tensors, mask in ((before, was), (after, now)))
        assert np.array_equal(*cut), name


@pytest.mark.parametrize("name", ["thorki", "pfedgm"])
def test_what_no_mask_cuts_stays_under_another_plan_and_in_a_run_that_follows(name):
    """Thorki's small model is all that it keeps for itself."""
    run = run_of(name)
    samples = Samples(np.random.default_rng(1).standard_normal((9, 6, 32), np.float32), np.arange(9) % 3)
    member, shared = Member("anna", samples, samples), run_model.first_shared(run)
    _, private = rounds.participate(run, member, shared, None, 1)
    mine = {key: value for key, value in private.items() if key.startswith(ALGORITHMS[name].card.beside)}
    assert mine
    narrow = replace(member, plan=Plan(widths={"conv1": 8}))
    for options, classes in (({}, 3), (OTHERS[name], 3), ({}, 4)):
        spec = replace(SPEC, classes=classes)
        new = warm_start.following(run, replace(run, spec=spec, hparams=options))
        body = warm_start.carried(run, new, shared).tensors
        found = warm_start.private_of(new, member, body, private)
        assert not found.dropped
        for kept in (found.tensors, warm_start.under_plan(run, narrow, shared, private)):
            assert all(np.array_equal(kept[key], value) for key, value in mine.items())
        rounds.personalize(new, member, body, found.tensors)
        _, after = rounds.participate(new, member, body, found.tensors, 2)
        rounds.personalize(new, member, body, after)
        _, again = rounds.participate(new, narrow, body, warm_start.under_plan(new, narrow, body, after), 3)
        assert again.keys() - {key for key in again if key.startswith(masks.PREFIX)} == after.keys()


def test_what_the_rule_left_alone_is_gone_on_from_in_a_run_that_follows():
    """Hermes' intersection: what others pruned is learned by each device for itself, and is in no global model."""
    run = run_of("hermes", hparams={"mode": "intersection", "threshold": 0.0, "block": 1, "tune_epochs": 0})
    draw = np.random.default_rng(1)
    members = {
        name: Member(name, *(Samples(draw.standard_normal((9, 6, 32), np.float32), np.arange(9) % 3) for _ in range(2)))
        for name in ("anna", "bela")
    }
    (shared, server), private = rounds.start(run), dict.fromkeys(members)
    for round in (1, 2):
        updates = []
        for name, member in members.items():
            update, private[name] = rounds.participate(run, member, shared, private[name], round)
            updates.append(update)
        shared, server = rounds.close(run, shared, server, updates)

    def begun(run, shared, own):
        return own_values.assembled(*device_task.entered(run, members["anna"], shared, own, 3)[1:])

    before = begun(run, shared, private["anna"])
    alone = without(shared, masks.PREFIX)
    _, compact, _ = device_task.entered(run, members["anna"], alone, private["anna"], 3)
    assert any(not np.array_equal(before[name], value) for name, value in compact.items()), "it has values of its own"
    new = warm_start.following(run, replace(run, recipe=replace(run.recipe, lr=0.01)))
    body = warm_start.carried(run, new, shared).tensors
    own = warm_start.private_of(new, members["anna"], body, private["anna"]).tensors
    after = begun(new, body, own)
    assert before.keys() == after.keys()
    assert all(np.array_equal(after[name], value) for name, value in before.items())
    states = (run, members["anna"], shared, private["anna"]), (new, members["anna"], body, own)
    assert np.array_equal(*(predict(rounds.personalize(*one), members["anna"].val.x) for one in states))
    wider = warm_start.following(run, replace(run, spec=replace(SPEC, classes=4)))
    body = warm_start.carried(run, wider, shared).tensors
    own = warm_start.private_of(wider, members["anna"], body, private["anna"]).tensors
    grown = begun(wider, body, own)
    assert np.array_equal(grown["conv1.weight"], before["conv1.weight"])
    assert len(grown["head.bias"]) == 4
    _, moved = rounds.participate(wider, members["anna"], body, own, 3)
    rounds.personalize(wider, members["anna"], body, moved)
