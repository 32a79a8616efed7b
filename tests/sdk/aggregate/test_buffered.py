"""FedBuff: closed forms, who may wait in the buffer, and a restart at any point."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tolerance import roundings

from talaria import tree
from talaria.aggregate import entries
from talaria.aggregate.bucketing import Bucketed
from talaria.aggregate.buffered import FedBuff, least, occupied
from talaria.aggregate.clipping import CenteredClip
from talaria.aggregate.coordinatewise import Median, TrimmedMean
from talaria.aggregate.krum import Krum, MultiKrum
from talaria.aggregate.masked import MaskedMean
from talaria.aggregate.mean import Mean
from talaria.aggregate.rfa import RFA
from talaria.aggregate.serveropt import ServerMomentum
from talaria.aggregate.wrap import discount
from talaria.errors import AggregationError, ConfigError, StateError
from talaria.types import ChannelLayout, ChannelMask, Tensors, Update

LINE = ChannelLayout({"g": 3}, {"w": ((("g", 1),),)})


def delta(value: float | list[float], client: str, base: int = 0, weight: float = 1.0) -> Update:
    values = value if isinstance(value, list) else [value]
    return Update({"w": torch.tensor(values)}, weight=weight, client=client, base=base, kind="delta")


def at(version: int, rule: FedBuff, shared: Tensors) -> Tensors:
    return rule.init(shared) | {"version": torch.tensor(version)}


def test_staleness_discounts() -> None:
    assert [discount(t, 0.5) for t in range(4)] == pytest.approx([1, 0.70711, 0.57735, 0.5], abs=1e-5)
    assert [discount(t, 0) for t in range(4)] == [1, 1, 1, 1]


@pytest.mark.parametrize(("normalise", "expected"), [("damped", 1.471405), ("convex", 2.0)])
def test_normalisations_by_hand(normalise: str, expected: float) -> None:
    """Deltas 1, 2, 4 that are 0, 1 and 3 versions late."""
    rule = FedBuff(capacity=3, normalise=normalise)
    shared = {"w": torch.zeros(1)}
    sent = [delta(1.0, "a", 3), delta(2.0, "b", 2), delta(4.0, "c", 0)]
    new, state = rule.apply(shared, at(3, rule, shared), sent)
    assert new["w"].item() == pytest.approx(expected, abs=5e-6)  # six digits on paper
    assert state["version"].item() == 4
    assert occupied(state) == []


def test_a_full_fresh_buffer_is_synchronous_averaging() -> None:
    g = torch.Generator().manual_seed(0)
    shared = {"w": torch.randn(50, generator=g)}
    sent = [delta(torch.randn(50, generator=g).tolist(), c, 0, n) for c, n in (("c", 3), ("a", 1), ("b", 7))]
    rule = FedBuff(capacity=3)
    new, _ = rule.apply(shared, rule.init(shared), sent)
    want, _ = Mean().apply(shared, {}, sorted(sent, key=lambda u: u.client))
    assert tree.equal(new, want)
    values = [u.but(tensors={"w": shared["w"] + u.tensors["w"]}, kind="value") for u in sent]
    new, _ = rule.apply(shared, rule.init(shared), values)
    assert roundings(new["w"], want["w"]) <= 32


def test_arrival_order_changes_nothing() -> None:
    shared = {"w": torch.zeros(1)}
    sent = [delta(0.1 * i, f"c{i}", 0, 1 + i / 7) for i in range(5)]
    rule = FedBuff(capacity=5)
    forward, _ = rule.apply(shared, rule.init(shared), sent)
    backward, _ = rule.apply(shared, rule.init(shared), sent[::-1])
    assert tree.equal(forward, backward)


def test_capacity_one_steps_at_each_arrival() -> None:
    rule = FedBuff(capacity=1, lr=0.5)
    shared = {"w": torch.zeros(1)}
    shared, state = rule.apply(shared, rule.init(shared), [delta(2.0, "a", 0)])
    assert shared["w"].item() == 1.0
    shared, state = rule.apply(shared, state, [delta(2.0, "b", 1), delta(2.0, "a", 2)])
    assert shared["w"].item() == 3.0
    assert state["version"].item() == 3


def test_one_entry_per_client_and_the_newer_counts() -> None:
    rule = FedBuff(capacity=2, a=0)
    shared = {"w": torch.zeros(1)}
    state = at(5, rule, shared)
    shared, state = rule.apply(shared, state, [delta(1.0, "a", 3), delta(7.0, "a", 4), delta(9.0, "a", 2)])
    assert occupied(state) == ["buffer/a/"], "a fast client cannot fill the buffer alone"
    assert shared["w"].item() == 0
    new, state = rule.apply(shared, state, [delta(1.0, "b", 5)])
    assert new["w"].item() == 4.0, "the update of version 4 counts, not the straggler of version 2"
    assert state["dropped/stale"].item() == 1


def test_a_message_that_comes_twice_counts_once() -> None:
    rule = FedBuff(capacity=2)
    shared = {"w": torch.zeros(1)}
    one, two = delta(1.0, "a"), delta(3.0, "b")
    shared, state = rule.apply(shared, rule.init(shared), [one, one, two])
    assert shared["w"].item() == 2.0
    assert state["dropped/repeated"].item() == 1
    again, state = rule.apply(shared, state, [one, two])
    assert tree.equal(again, shared), "also after it was folded"
    assert state["dropped/repeated"].item() == 3
    assert occupied(state) == []
    fresh, state = rule.apply(shared, state, [delta(1.5, "a", 0), delta(1.0, "b", 1)])
    assert fresh["w"].item() != shared["w"].item(), "another update of the same base is no repetition"


def test_digests_that_guard_nothing_are_forgotten() -> None:
    rule = FedBuff(capacity=1, max_staleness=2)
    shared = {"w": torch.zeros(1)}
    state = rule.init(shared)
    for i in range(6):
        shared, state = rule.apply(shared, state, [delta(1.0, f"c{i}", i)])
    assert sorted(k for k in state if k.startswith("seen/")) == ["seen/c4", "seen/c5"]


def test_too_old_updates_are_dropped_and_counted() -> None:
    rule = FedBuff(capacity=1, max_staleness=2)
    shared = {"w": torch.zeros(1)}
    new, state = rule.apply(shared, at(5, rule, shared), [delta(1.0, "a", 2)])
    assert tree.equal(new, shared)
    assert state["dropped/stale"].item() == 1
    new, state = rule.apply(shared, state, [delta(1.0, "a", 3)])
    assert new["w"].item() == pytest.approx(3**-0.5)


@pytest.mark.parametrize("base", [-1, 6])
def test_a_base_that_never_was_is_refused(base: int) -> None:
    rule = FedBuff(capacity=1)
    shared = {"w": torch.zeros(1)}
    with pytest.raises(AggregationError, match=rf"'eve': base={base} must be a version within 0..5"):
        rule.apply(shared, at(5, rule, shared), [delta(1.0, "eve", base)])


def test_old_values_are_refused() -> None:
    """A delta against the current version instead of the downloaded one would undo the others' work."""
    rule = FedBuff(capacity=1)
    shared = {"w": torch.zeros(1)}
    with pytest.raises(AggregationError, match="values of version 4 cannot be compared with version 5"):
        rule.apply(shared, at(5, rule, shared), [delta(1.0, "a", 4).but(kind="value")])


def masked(client: str, kept: tuple[int, ...], values: list[float], base: int = 0) -> Update:
    return delta(values, client, base).but(mask=ChannelMask(LINE, {"g": kept}))


def test_masked_deltas_by_hand() -> None:
    shared = {"w": torch.tensor([10.0, 10.0, 10.0])}
    sent = [masked("a", (0, 1), [1.0, 1.0], 3), masked("b", (1,), [5.0], 0)]
    damped = FedBuff(capacity=2)
    new, _ = damped.apply(shared, at(3, damped, shared), sent)
    assert new["w"].tolist() == [11.0, 10 + (1 + 0.5 * 5) / 2, 10.0]
    convex = FedBuff(capacity=2, normalise="convex")
    new, _ = convex.apply(shared, at(3, convex, shared), sent)
    assert new["w"].tolist() == pytest.approx([11.0, 10 + (1 + 2.5) / 1.5, 10.0])


RESTARTED = [
    FedBuff(capacity=3, inner=MaskedMean()),
    FedBuff(capacity=3, inner=Median(f=1)),
    FedBuff(capacity=4, inner=CenteredClip(f=1, start="previous")),
    FedBuff(capacity=3, inner=RFA(f=1, weighting="samples"), normalise="convex"),
    FedBuff(capacity=5, inner=Krum(f=1, min_holders=1)),
    FedBuff(capacity=6, inner=Bucketed(inner=TrimmedMean(f=1, min_holders=1), seed=3)),
    FedBuff(capacity=3, inner=ServerMomentum(inner=Mean())),
    ServerMomentum(inner=FedBuff(capacity=3)),
]


@pytest.mark.parametrize("rule", RESTARTED, ids=lambda r: f"{type(r).__name__}-{type(r.inner).__name__}")
def test_a_restart_between_any_two_arrivals_changes_no_byte(rule: FedBuff | ServerMomentum, tmp_path: Path) -> None:
    g = torch.Generator().manual_seed(4)
    kept = [(0, 1, 2), (0, 1), (1, 2), (0, 1, 2), (0, 2), (0, 1, 2), (1, 2)]
    log = [masked(f"c/{i % 7}", k, torch.randn(len(k), generator=g).tolist()) for i, k in enumerate(kept * 2)]
    start = {"w": torch.zeros(3)}
    shared, state = start, rule.init(start)
    other, restored = start, rule.init(start)
    for i, update in enumerate(log):
        shared, state = rule.apply(shared, state, [update])
        other, restored = rule.apply(other, restored, [update])
        save_file(restored, tmp_path / f"{i}.safetensors")
        restored = load_file(tmp_path / f"{i}.safetensors")
        assert tree.equal(shared, other)
        assert tree.equal(state, restored)
    assert not torch.equal(shared["w"], start["w"])


def test_all_arrivals_at_once_are_as_one_by_one() -> None:
    rule = FedBuff(capacity=2)
    start = {"w": torch.zeros(3)}
    log = [masked(f"c{i}", (0, 1 + i % 2), [1.0, float(i)], 0) for i in range(5)]
    at_once = rule.apply(start, rule.init(start), log)
    shared, state = start, rule.init(start)
    for update in log:
        shared, state = rule.apply(shared, state, [update])
    assert tree.equal(at_once[0], shared)
    assert tree.equal(at_once[1], state)


def test_flush_folds_what_is_there() -> None:
    rule = FedBuff(capacity=10)
    shared = {"w": torch.zeros(1)}
    same, state = rule.flush(shared, rule.init(shared))
    assert tree.equal(same, shared)
    assert state["version"].item() == 0
    shared, state = rule.apply(shared, state, [delta(1.0, "b"), delta(3.0, "a")])
    assert shared["w"].item() == 0
    new, state = rule.flush(shared, state)
    assert new["w"].item() == 2.0
    assert state["version"].item() == 1
    assert occupied(state) == []


@pytest.mark.parametrize("normalise", ["damped", "convex"])
@pytest.mark.parametrize("inner", [Mean(), MaskedMean(), RFA(f=1, weighting="samples"), ServerMomentum(inner=Mean())])
def test_a_fold_is_a_buffer_that_fills_at_once(inner: object, normalise: str) -> None:
    """For a coordinator that keeps the updates itself: the same step, to the bit, over several versions."""
    g = torch.Generator().manual_seed(6)
    rule = FedBuff(capacity=3, inner=inner, normalise=normalise, lr=0.7)  # type: ignore[arg-type]
    one = two = {"w": torch.randn(3, generator=g)}
    waiting, kept = rule.init(one), rule.init(two)
    for version in range(4):
        sent = [
            masked(c, (0, 1 + i % 2), torch.randn(2, generator=g).tolist(), max(0, version - i))
            for i, c in enumerate("abc")
        ]
        one, waiting = rule.apply(one, waiting, sent[::-1])
        two, kept = rule.fold(two, kept, iter(sent))
        assert tree.equal(one, two)
    assert tree.equal(kept, {k: v for k, v in waiting.items() if not k.startswith(("seen/", "layout"))})
    assert int(kept["version"]) == 4


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ([], "no update to fold"),
        ([delta(1.0, "b", 5), delta(1.0, "a", 5)], "'a' came after 'b'"),
        ([delta(1.0, "a", 4), delta(1.0, "a", 5)], "'a' came after 'a'; sort them, one of each client"),
        ([delta(1.0, "a", 2)], "'a': 3 versions behind; at most 2 count"),
        ([delta(1.0, "a", 6)], "base=6 must be a version within 0..5"),
        ([delta(1.0, "a", 4).but(kind="value")], "values of version 4 cannot be compared"),
    ],
)
def test_a_fold_refuses_what_no_buffer_would_hold(sent: list[Update], message: str) -> None:
    rule, shared = FedBuff(max_staleness=2), {"w": torch.zeros(1)}
    with pytest.raises(AggregationError, match=message):
        rule.fold(shared, at(5, rule, shared), sent)


def test_a_robust_inner_sees_through_an_attacker_in_the_buffer() -> None:
    shared = {"w": torch.zeros(1)}
    sent = [delta(1.0, "a"), delta(1.1, "b"), delta(0.9, "c"), delta(1e6, "x"), delta(1.05, "d")]
    for inner in (Median(f=1), TrimmedMean(f=1), MultiKrum(f=1, m=3), CenteredClip(f=1)):
        rule = FedBuff(capacity=5, inner=inner)
        new, _ = rule.apply(shared, rule.init(shared), sent)
        assert 0.9 <= new["w"].item() <= 1.2


def test_masks_of_another_model_are_refused() -> None:
    other = ChannelLayout({"h": 3}, {"w": ((("h", 1),),)})
    rule, shared = FedBuff(), {"w": torch.zeros(3)}
    _, state = rule.apply(shared, rule.init(shared), [masked("a", (0,), [1.0])])
    with pytest.raises(AggregationError, match="'b': its mask belongs to another model"):
        rule.apply(shared, state, [delta([1.0], "b").but(mask=ChannelMask(other, {"h": (0,)}))])


def test_a_damaged_buffer_is_refused() -> None:
    rule, shared = FedBuff(), {"w": torch.zeros(3)}
    _, state = rule.apply(shared, rule.init(shared), [masked("a", (0,), [1.0])])
    with pytest.raises(StateError, match="damaged"):
        rule.flush(shared, state | {"buffer/a/who": torch.tensor([1, 2], dtype=torch.uint8)})
    with pytest.raises(StateError, match="layout"):
        rule.flush(shared, {k: v for k, v in state.items() if k != "layout"})


def test_entries_round_trip() -> None:
    update = masked("ann/a ü", (0, 2), [1.0, -0.0], 7).but(weight=0.1)
    layout = entries.unpack_layout(entries.pack_layout(LINE))
    assert layout == LINE
    back = entries.unpack(entries.pack(update), layout)
    assert (back.client, back.base, back.weight, back.kind) == ("ann/a ü", 7, 0.1, "delta")
    assert back.mask == update.mask
    assert tree.equal(back.tensors, update.tensors)
    assert entries.digest(back) == entries.digest(update)
    assert entries.digest(back) != entries.digest(update.but(base=8))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FedBuff(capacity=0), "capacity=0"),
        (lambda: FedBuff(a=-0.1), "a=-0.1"),
        (lambda: FedBuff(lr=0), "lr=0"),
        (lambda: FedBuff(max_staleness=-1), "max_staleness=-1"),
        (lambda: FedBuff(normalise="sum"), "normalise='sum'"),
        (lambda: FedBuff(capacity=6, inner=Krum(f=2)), "capacity=6 must be at least 7"),
        (lambda: FedBuff(capacity=4, inner=Bucketed(inner=Median(f=1))), "capacity=4 must be at least 5"),
        (lambda: FedBuff(capacity=2, inner=ServerMomentum(inner=Median(f=1))), "capacity=2 must be at least 3"),
        (lambda: FedBuff(inner=TrimmedMean(), normalise="convex"), "TrimmedMean ignores weights"),
    ],
)
def test_options_out_of_range_are_refused(make: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()  # type: ignore[operator]


def test_least() -> None:
    assert [least(r) for r in (Mean(), Median(f=2), Krum(f=2), FedBuff())] == [1, 5, 7, 1]
