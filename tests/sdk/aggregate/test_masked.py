"""The mean under masks: the hand table, against a dense reference, and what it refuses."""

import math
import tracemalloc
from collections.abc import Iterable
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from tolerance import roundings

from talaria import tensors
from talaria.aggregate import masked_sum
from talaria.aggregate.loops import loops_for
from talaria.aggregate.masked import MaskedMean
from talaria.aggregate.row_sums import Plain
from talaria.aggregate.validation import is_finite, positions
from talaria.errors import AggregationError, ConfigError
from talaria.model.masks import ChannelLayout, ChannelMask, compact_shape
from talaria.tensors import Array, Tensors
from talaria.types import Update


def array(values: object) -> Array:
    return np.array(values, np.float32)


# The hand example: n = (10, 20, 30), previous (1, 1, 1, 5, 1).
OLD = [1.0, 1.0, 1.0, 5.0, 1.0]
KEPT = {"a": ((0, 1, 4), [1.0, 4.0, 0.0], 10), "b": ((0, 1), [2.0, 1.0], 20), "c": ((0, 2, 4), [3.0, 6.0, 4.0], 30)}


def table(line: ChannelLayout) -> tuple[Tensors, list[Update]]:
    updates = [
        Update({"w": array(v)}, weight=n, client=c, mask=ChannelMask(line, {"g": k})) for c, (k, v, n) in KEPT.items()
    ]
    return {"w": array(OLD)}, updates


def gathered(dense: Tensors, mask: ChannelMask | None) -> Tensors:
    out = {}
    for name, value in dense.items():
        part = value.copy()
        for d, index in enumerate(positions(name, mask) or ()):
            part = part if index is None else part.take(index, d)
        out[name] = part
    return out


def seen(dense: Tensors, mask: ChannelMask | None) -> Tensors:
    """1 where the mask keeps, by plain indexing."""
    out = {}
    for name, value in dense.items():
        m = np.ones(value.shape)
        for d, index in enumerate(positions(name, mask) or ()):
            if index is not None:
                gone = [i for i in range(value.shape[d]) if i not in set(index.tolist())]
                m.swapaxes(0, d)[gone] = 0.0
        out[name] = m
    return out


def clients(net: tuple[Tensors, ChannelLayout], masks: list[ChannelMask | None]) -> tuple[list[Tensors], list[Update]]:
    dense, updates = [], []
    for i, mask in enumerate(masks):
        g = np.random.default_rng(100 + i)
        full = {k: g.standard_normal(v.shape, np.float32) for k, v in net[0].items()}
        full["bn.running_var"] = np.abs(full["bn.running_var"])
        dense.append(full)
        updates.append(Update(gathered(full, mask), weight=3.0 * i + 1, client=f"c{i}", mask=mask))
    return dense, updates


@pytest.mark.parametrize(
    ("weighting", "expected"), [("samples", [7 / 3, 2.0, 6.0, 5.0, 3.0]), ("uniform", [2.0, 2.5, 6.0, 5.0, 2.0])]
)
def test_hand_table_holders(line: ChannelLayout, weighting: str, expected: list[float]) -> None:
    shared, updates = table(line)
    new, _ = MaskedMean(weighting=weighting).apply(shared, {}, updates)
    assert np.array_equal(new["w"], array(expected))
    assert np.array_equal(MaskedMean(weighting=weighting).apply(shared, {}, updates)[0]["w"], new["w"])


def test_hand_table_intersection_leaves_each_client_its_own(line: ChannelLayout) -> None:
    shared, updates = table(line)
    new, _ = MaskedMean(mode="intersection").apply(shared, {}, updates)
    assert np.array_equal(new["w"], array([7 / 3, 1.0, 1.0, 5.0, 1.0]))
    assert np.array_equal(new["mask/g"], np.array([1, 0, 0, 0, 0], np.uint8))
    want = {
        "a": [7 / 3, 4, math.nan, math.nan, 0],
        "b": [7 / 3, 1] + [math.nan] * 3,
        "c": [7 / 3, math.nan, 6, math.nan, 4],
    }
    common = new["mask/g"].astype(bool)
    for update in updates:
        own = np.full(5, math.nan, np.float32)
        assert update.mask is not None
        own[list(update.mask.kept["g"])] = update.tensors["w"]
        after = np.where(common, new["w"], own)
        assert np.array_equal(after, array(want[update.client]), equal_nan=True)


def test_the_mask_decides_not_the_value(line: ChannelLayout) -> None:
    """The mean that ignores masks would give 2.3333, 1, 3, 0, 2: none of its last four may appear."""
    shared, updates = table(line)
    new, _ = MaskedMean().apply(shared, {}, updates)
    wrong = array([1.0, 3.0, 0.0, 2.0])
    assert not (new["w"][1:] == wrong).any()


def test_masked_mean_equals_the_dense_reference(net: tuple[Tensors, ChannelLayout], masks: list[ChannelMask]) -> None:
    shared, _ = net
    dense, updates = clients(net, masks)
    new, _ = MaskedMean().apply(shared, {}, updates)
    for name, old in shared.items():
        m = np.stack([seen(shared, u.mask)[name] * u.weight for u in updates])
        x = np.stack([d[name].astype(np.float64) for d in dense])
        want = np.where(m.sum(0) > 0, (m * x).sum(0) / np.maximum(m.sum(0), 1e-9), old)
        assert roundings(new[name], want) <= 16, name


def test_intersection_equals_the_dense_reference(net: tuple[Tensors, ChannelLayout], masks: list[ChannelMask]) -> None:
    shared, _ = net
    dense, updates = clients(net, masks)
    new, _ = MaskedMean(mode="intersection").apply(shared, {}, updates)
    for name, old in shared.items():
        common = np.stack([seen(shared, u.mask)[name] for u in updates]).prod(0).astype(bool)
        w = np.array([u.weight for u in updates]).reshape(-1, *[1] * old.ndim)
        mean = (np.stack([d[name].astype(np.float64) for d in dense]) * w).sum(0) / w.sum()
        assert roundings(new[name][common], mean[common]) <= 16
        assert np.array_equal(new[name][~common], old[~common]), "outside the intersection the server's value stays"
    assert new["mask/a"].tolist() == [0, 0, 1, 0, 0, 0]
    assert new["mask/b"].tolist() == [0, 1, 0, 0]


def test_an_empty_intersection_changes_no_masked_coordinate(line: ChannelLayout) -> None:
    shared, updates = table(line)
    apart = [*updates[1:], updates[0].but(tensors={"w": np.ones(1, np.float32)}, mask=ChannelMask(line, {"g": (3,)}))]
    new, _ = MaskedMean(mode="intersection").apply(shared, {}, apart)
    assert np.array_equal(new["w"], shared["w"])
    assert not new["mask/g"].any()


def test_order_of_clients_changes_nothing_for_whole_weights(line: ChannelLayout) -> None:
    shared, updates = table(line)
    results = [MaskedMean().apply(shared, {}, order)[0]["w"] for order in permutations(updates)]
    assert all(np.array_equal(results[0], r) for r in results)


def test_scaling_all_weights_changes_nothing(net: tuple[Tensors, ChannelLayout], masks: list[ChannelMask]) -> None:
    shared, _ = net
    _, updates = clients(net, masks)
    base, _ = MaskedMean().apply(shared, {}, updates)
    for scale, apart in ((0.25, 0), (1024.0, 0), (1e-3, 16)):  # a power of two changes no digit
        scaled, _ = MaskedMean().apply(shared, {}, [u.but(weight=u.weight * scale) for u in updates])
        assert roundings(scaled, base) <= apart, scale


@pytest.mark.parametrize("rule", [MaskedMean(), MaskedMean(mode="intersection"), MaskedMean(blend=True)])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_clients_who_agree_give_their_bits_back(rule: MaskedMean, count: int) -> None:
    g = np.random.default_rng(count)
    odd = np.concatenate([g.standard_normal(500, np.float32), array([0.0, -0.0, 1e-45, 3e38, -1e-30])])
    shared = {"w": np.zeros(505, np.float32)}
    new, _ = rule.apply(shared, {}, [Update({"w": odd}, weight=0.1 + i / 3, client=str(i)) for i in range(count)])
    assert tensors.equal({"w": new["w"]}, {"w": odd})


def test_a_coordinate_nobody_holds_stays_bit_for_bit(net: tuple[Tensors, ChannelLayout]) -> None:
    shared, layout = net
    shared = {**shared, "c1.bias": array([0.1, -0.0, 1e-42, 3.3, -2.0, 0.7])}
    mask = ChannelMask(layout, {"a": (0, 5), "b": (2,)})
    new, _ = MaskedMean().apply(shared, {}, [Update(gathered(shared, mask), weight=7, mask=mask)])
    assert tensors.equal(new, shared)
    ones = {k: np.ones_like(v) for k, v in gathered(shared, mask).items()}
    new, _ = MaskedMean().apply(shared, {}, [Update(ones, weight=7, mask=mask)])
    keep = [1, 2, 3, 4]
    assert tensors.equal({"b": new["c1.bias"][keep]}, {"b": shared["c1.bias"][keep]})


def test_no_update_changes_nothing(net: tuple[Tensors, ChannelLayout]) -> None:
    shared, _ = net
    for rule in (MaskedMean(), MaskedMean(mode="intersection")):
        new, state = rule.apply(shared, rule.init(shared), [])
        assert tensors.equal(new, shared)
        assert state == {}
        assert not any(np.shares_memory(new[k], shared[k]) for k in shared)


def test_deltas_are_added(line: ChannelLayout) -> None:
    shared, updates = table(line)
    deltas = [
        u.but(tensors={"w": u.tensors["w"] - shared["w"][list(u.mask.kept["g"])]}, kind="delta")  # type: ignore[union-attr]
        for u in updates
    ]
    new, _ = MaskedMean().apply(shared, {}, deltas)
    assert roundings(new["w"], array([7 / 3, 2.0, 6.0, 5.0, 3.0])) <= 16


def test_blend_moves_by_the_holders_share(line: ChannelLayout) -> None:
    shared, updates = table(line)
    new, _ = MaskedMean(blend=True).apply(shared, {}, updates)
    # Holders' shares of the weight: 60/60, 30/60, 30/60, 0, 40/60.
    assert roundings(new["w"], array([7 / 3, 1.5, 3.5, 5.0, 1 + 2 * 2 / 3])) <= 16


def test_min_holders_keeps_rare_coordinates(line: ChannelLayout) -> None:
    shared, updates = table(line)
    new, _ = MaskedMean(min_holders=2).apply(shared, {}, updates)
    assert roundings(new["w"], array([7 / 3, 2.0, 1.0, 5.0, 3.0])) <= 16


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_too_few_holders_of_a_scalar_and_of_whole_tensors(dtype: type[np.floating[Any]]) -> None:
    shared = {"s": np.array(2.0, dtype), "m": np.ones((2, 3), dtype)}
    sent = [Update({k: np.asarray(v + 1, dtype) for k, v in shared.items()}, weight=2, client="a")]
    assert tensors.equal(MaskedMean(min_holders=2).apply(shared, {}, sent)[0], shared)
    assert tensors.equal(MaskedMean().apply(shared, {}, sent)[0], sent[0].tensors)


def test_masks_over_any_dimensions_scatter_to_the_right_place() -> None:
    """Last dimension alone, first and last, the middle one: against plain indexing."""
    sizes = {"a": 4, "b": 3, "c": 5}
    lines = [(("a", 1),), (("b", 1),), (("c", 1),)]
    g = np.random.default_rng(0)
    kept = {"a": (1, 3), "b": (0, 2), "c": (0, 1, 4)}
    for chosen in [(2,), (0, 2), (1,), (0, 1), (0, 1, 2), (1, 2)]:
        layout = ChannelLayout(sizes, {"w": tuple(lines[d] if d in chosen else () for d in range(3))})
        old, dense = g.standard_normal((4, 3, 5), np.float32), g.standard_normal((4, 3, 5), np.float32)
        mask = ChannelMask(layout, kept)
        part = gathered({"w": dense}, mask)
        new, _ = MaskedMean().apply({"w": old}, {}, [Update(part, weight=0.3, mask=mask)])
        want = np.where(seen({"w": old}, mask)["w"].astype(bool), dense, old)
        assert tensors.equal(new, {"w": want})


def test_tensors_without_values_are_folded_beside_others() -> None:
    """As the weight (16, 0) of a layer that reads none of a sample's numbers."""
    shared = {"none": np.zeros((16, 0), np.float32), "empty": np.zeros(0, np.float32), "w": array([1.0, 2.0])}
    for rule in (MaskedMean(), MaskedMean(mode="intersection"), MaskedMean(blend=True)):
        new, _ = rule.apply(shared, {}, [Update(shared | {"w": array([3.0, n])}, 1.0, str(n)) for n in (4, 6)])
        assert new["w"].tolist() == [3.0, 5.0]
        assert tensors.equal({k: v for k, v in new.items() if k != "w"}, {k: v for k, v in shared.items() if k != "w"})


def test_counters_take_the_largest() -> None:
    shared = {"w": np.zeros(2, np.float32), "seen": np.array(7)}
    sent = [Update({"w": np.ones(2, np.float32), "seen": np.array(n)}, weight=1, client=str(n)) for n in (3, 11, 9)]
    new, _ = MaskedMean().apply(shared, {}, sent)
    assert new["seen"].item() == 11
    assert new["seen"].dtype == np.int64
    assert MaskedMean().apply(shared, {}, [sent[0].but(tensors={"w": np.ones(2, np.float32)})])[0]["seen"].item() == 7


def test_reserved_names_stay_and_may_not_be_sent() -> None:
    shared = {"w": np.zeros(2, np.float32), "frozen/head": np.ones(3, np.float32), "stats/n": np.ones(1, np.float32)}
    new, _ = MaskedMean().apply(shared, {}, [Update({"w": np.ones(2, np.float32)}, weight=1)])
    assert tensors.equal(new, {**shared, "w": np.ones(2, np.float32)})
    with pytest.raises(AggregationError, match="'frozen/head' is reserved"):
        MaskedMean().apply(
            shared,
            {},
            [Update({"w": np.ones(2, np.float32), "frozen/head": np.ones(3, np.float32)}, weight=1, client="x")],
        )


def test_more_masks_than_are_held_back(net: tuple[Tensors, ChannelLayout]) -> None:
    shared, layout = net
    masks = [ChannelMask(layout, {"a": (i % 6,), "b": (i % 4,)}) for i in range(24)]
    dense, updates = clients(net, list(masks))
    new, _ = MaskedMean().apply(shared, {}, updates)
    for name, old in shared.items():
        m = np.stack([seen(shared, u.mask)[name] * u.weight for u in updates])
        total = (m * np.stack([d[name] for d in dense])).sum(0)
        want = np.where(m.sum(0) > 0, total / np.maximum(m.sum(0), 1e-9), old)
        assert roundings(new[name], want) <= 16, name


def test_sums_of_whole_models_and_waiting_updates_give_the_same(
    net: tuple[Tensors, ChannelLayout], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing may wait, each client is added to sums of the whole model; tiles are as small as one row."""
    shared, layout = net
    masks = [None, *(ChannelMask(layout, {"a": (i % 6, *range(i % 6 + 1, 6)), "b": (i % 4,)}) for i in range(12))]
    _, updates = clients(net, masks)
    for rule in (MaskedMean(), MaskedMean(min_holders=3), MaskedMean(blend=True), MaskedMean(mode="intersection")):
        waiting, _ = rule.apply(shared, {}, updates)
        with monkeypatch.context() as small:
            small.setattr(masked_sum, "_WAITING", 0)
            small.setattr(masked_sum, "_TILE", 1)
            added, _ = rule.apply(shared, {}, updates)
        assert tensors.equal(tensors.under(waiting, "mask/"), tensors.under(added, "mask/"))
        # Sums agree to some roundings of float64: at most one of float32 in what they give.
        assert all(roundings(added[k], waiting[k]) <= 1 for k in shared)
        agreed = [Update(gathered(updates[0].tensors, u.mask), u.weight, u.client, mask=u.mask) for u in updates]
        with monkeypatch.context() as small:
            small.setattr(masked_sum, "_WAITING", 0)
            new, _ = MaskedMean().apply(shared, {}, agreed)
        assert tensors.equal(new, updates[0].tensors), "the first client keeps everything"


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_compiled_loops_take_the_same_steps_to_the_bit(dtype: type[np.floating[Any]], delta: bool) -> None:
    pytest.importorskip("numba", reason="comes with talaria[fast]")
    from talaria.aggregate.compiled import Compiled

    g = np.random.default_rng(3)
    for width, rows in ((1, 40_000), (9, 5000), (700, 60)):
        values, old = (g.standard_normal((rows, width)).astype(dtype) for _ in range(2))
        values.setflags(write=False)
        first, second, stays = np.sort(g.choice(rows, rows // 2, False)), np.arange(1), g.random(rows) < 0.2
        results = []
        for loops in (Plain(), Compiled()):
            total, weight = np.full((rows, 1, width), -0.0), np.full(rows, 0.3)
            loops.add(total.reshape(-1), values.reshape(-1), 0.3)
            loops.add_grid(total, first, second, values[: len(first), None], 1 / 3)
            weight[first] += 1 / 3
            out = np.empty_like(old)
            loops.mean_rows(total.reshape(rows, width).copy(), weight, old, stays, delta, out)
            results.append({"sum": total, "mean": out})
        assert tensors.equal(*results), (width, rows)


def test_weights_are_added_in_the_clients_order_by_both_loops() -> None:
    g = np.random.default_rng(5)
    lines, kept = g.random((30, 40)) * (g.random((30, 40)) < 0.5), (g.random((40, 7)) < 0.5).astype(np.float32)
    want = np.zeros((30, 7))
    for line, columns in zip(lines.T, kept, strict=True):
        want += np.outer(line, columns)
    out = np.full((30, 7), np.nan)
    Plain().weigh(lines, kept, out)
    assert np.array_equal(out, want)
    whole = np.rint(lines * 1000)
    Plain().weigh(whole, kept, out)
    assert np.array_equal(out, whole @ kept)
    pytest.importorskip("numba", reason="comes with talaria[fast]")
    from talaria.aggregate.compiled import Compiled

    out = np.full((30, 7), np.nan)
    Compiled().weigh(lines, kept, out)
    assert np.array_equal(out, want)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("width", [1, 2, 3, 5, 7, 8, 9, 15, 27])
def test_columns_side_by_side_or_apart_are_added_with_the_same_bits(width: int, dtype: type[np.floating[Any]]) -> None:
    pytest.importorskip("numba", reason="comes with talaria[fast]")
    from talaria.aggregate.compiled import Compiled

    g = np.random.default_rng(6)
    values = g.standard_normal((3, 4, width)).astype(dtype)
    for columns in ([2, 3, 4, 5], [0, 3, 4, 5], [0, 1, 3, 5]):
        results, sums = [], g.standard_normal((5, 6, width))
        for loops in (Plain(), Compiled()):
            total = sums.copy()
            loops.add_grid(total, np.array([0, 2, 4]), np.array(columns), values, 1 / 3)
            results.append(total)
        assert np.array_equal(*results)
        assert np.array_equal(results[0][1], sums[1])
        assert (np.delete(results[0][::2], columns, 1) == np.delete(sums[::2], columns, 1)).all()
        assert np.array_equal(results[0][::2][:, columns], sums[::2][:, columns] + np.float64(values) * (1 / 3))


@pytest.mark.parametrize("width", [1, 9])
def test_both_loops_say_whether_what_they_give_is_finite_and_what_they_leave_out(width: int) -> None:
    """What a client sent for a coordinate that stays shows in no new value."""
    pytest.importorskip("numba", reason="comes with talaria[fast]")
    from talaria.aggregate.compiled import Compiled

    old, stays = np.ones((40, width), np.float32), np.arange(40) % 2 == 0
    for loops in (Plain(), Compiled()):
        for row, value in [(None, 0.0), (6, math.nan), (6, math.inf), (7, math.nan), (7, -math.inf), (7, 1e300)]:
            total = np.ones((40, width))
            if row is not None:
                total[row, -1] = value
            out = np.empty_like(old)
            with np.errstate(over="ignore"):
                found = loops.mean_rows(total, np.full(40, 2.0), old, stays, False, out)
            assert found == (row is None), (type(loops), row, value)
            assert (out[::2] == 1).all()
            assert (np.delete(out, 7, 0)[~np.delete(stays, 7)] == 0.5).all()


def test_equal_masks_give_the_same_bits_whether_they_wait_or_not(
    net: tuple[Tensors, ChannelLayout], monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, layout = net
    _, updates = clients(net, [ChannelMask(layout, {"a": (0, 2, 5), "b": (1, 2)})] * 7)
    waited, _ = MaskedMean().apply(shared, {}, updates)
    monkeypatch.setattr(masked_sum, "_WAITING", 0)
    settled, _ = MaskedMean().apply(shared, {}, updates)
    assert tensors.equal(waited, settled)


@pytest.mark.parametrize(("waiting", "poison"), [(0, math.inf), (1 << 20, math.nan)])
def test_a_value_that_is_not_finite_is_found_wherever_its_client_stands(
    net: tuple[Tensors, ChannelLayout], monkeypatch: pytest.MonkeyPatch, poison: float, waiting: int
) -> None:
    """Alone, among equal masks, without a mask, and where too few hold the coordinate for it to move."""
    shared, layout = net
    masks = [ChannelMask(layout, {"a": (i % 6,), "b": (i % 4,)}) for i in (0, 0, 1, 2, 2, 2)]
    _, updates = clients(net, [None, *masks, None])
    monkeypatch.setattr(masked_sum, "_WAITING", waiting)
    for bad, sent in enumerate(updates):
        for name, value in list(sent.tensors.items())[:: len(sent.tensors) - 1]:
            spoiled = value.copy()
            spoiled.reshape(-1)[-1] = poison
            given = [*updates]
            given[bad] = sent.but(tensors={**sent.tensors, name: spoiled}, client="eve")
            for rule in (MaskedMean(), MaskedMean(min_holders=8), MaskedMean(mode="intersection", blend=True)):
                with pytest.raises(AggregationError, match=f"'eve': tensor '{name}' holds NaN or infinity"):
                    rule.apply(shared, {}, given)


def test_a_fold_holds_its_result_and_what_may_wait() -> None:
    g = np.random.default_rng(7)
    layout = ChannelLayout({"a": 340, "b": 340}, {"w": ((("a", 1),), (("b", 1),), ())})
    shared = {"w": np.zeros((340, 340, 9), np.float32)}
    halves = [ChannelMask(layout, {"a": tuple(range(i, i + 170)), "b": tuple(range(0, 340, 2))}) for i in range(8)]
    sent = g.random((170, 170, 9), np.float32)
    updates = [Update({"w": sent}, 1.0, str(i), mask=halves[i % 8]) for i in range(16)]

    def peak(given: Iterable[Update]) -> float:
        tracemalloc.start()
        MaskedMean().apply(shared, {}, given)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found / 2**20

    MaskedMean().apply(shared, {}, updates)
    assert peak(updates) < 4 + 2 * 2 + 0.9 + 1.5, "the new model, two tiles, weights: no sums of a class"
    many = (Update({"w": g.random((340, 340, 9), np.float32)}, 1.0, str(i)) for i in range(30))
    assert peak(many) < 8 * 4 + 5, "five models may wait, beside float64 sums and the one that comes"


def test_a_large_model_folds_alike_with_and_without_compiled_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba", reason="comes with talaria[fast]")
    g = np.random.default_rng(4)
    layout = ChannelLayout({"a": 64, "b": 64}, {"w": ((("a", 1),), (("b", 1),), ())})
    shared = {"w": g.standard_normal((64, 64, 9), np.float32)}
    updates = []
    for i in range(5):
        kept = {k: tuple(np.sort(g.choice(64, 32, False)).tolist()) for k in ("a", "b")}
        part = g.standard_normal((32, 32, 9), np.float32)
        updates.append(Update({"w": part}, weight=0.1 + i / 3, client=str(i), mask=ChannelMask(layout, kept)))
    plain, _ = MaskedMean().apply(shared, {}, updates)
    monkeypatch.setattr("talaria.aggregate.loops._PAYS", 1)
    compiled, _ = MaskedMean().apply(shared, {}, updates)
    assert type(loops_for(1)).__name__ == "Compiled"
    assert tensors.equal(plain, compiled)


def test_one_wrong_value_far_inside_is_found() -> None:
    for at in (0, 70_000, 199_999):
        value = np.zeros(200_000, np.float32)
        assert is_finite(value)
        value[at] = math.nan
        assert not is_finite(value)


def test_what_does_not_fit_is_refused(net: tuple[Tensors, ChannelLayout]) -> None:
    shared, layout = net
    mask = ChannelMask(layout, {"a": (0, 2), "b": (1, 3)})
    good = gathered(shared, mask)
    other = ChannelLayout({"a": 6, "b": 4}, {"c1.bias": ((("a", 1),),)})
    narrow = ChannelLayout({"a": 5}, {"c1.bias": ((("a", 1),),)})

    def refused(message: str, *updates: Update) -> None:
        with pytest.raises(AggregationError, match=message):
            MaskedMean().apply(shared, {}, updates)

    ok = Update(good, weight=1, client="anna", mask=mask)
    bad = ok.but(client="eve")
    refused("eve.*'nope' is not in the shared state", ok, bad.but(tensors={**good, "nope": np.ones(1, np.float32)}))
    refused("eve.*'fc.bias' is missing", bad.but(tensors=tensors.without(good, "fc.bias")))
    refused(
        r"eve.*'fc.bias' has shape \(3,\), expected \(2,\)",
        bad.but(tensors={**good, "fc.bias": np.ones(3, np.float32)}),
    )
    refused(r"eve.*'c1.weight' has shape \(6, 3, 3\), expected \(2, 3, 3\).*mask", bad.but(tensors=dict(shared)))
    refused(r"eve.*shape \(2, 3, 3\), expected \(6, 3, 3\)", bad.but(mask=None))
    for value in (math.nan, math.inf, -math.inf):
        poison = good["fc.bias"].copy()
        poison[1] = value
        refused("eve.*'fc.bias' holds NaN or infinity", bad.but(tensors={**good, "fc.bias": poison}))
    negative = {**good, "bn.running_var": array([1.0, -0.5])}
    refused("eve.*'bn.running_var' holds a negative variance -0.5", bad.but(tensors=negative))
    refused("eve.*dtype int64, expected float32", bad.but(tensors={**good, "fc.bias": np.ones(2, np.int64)}))
    refused("eve.*kind 'delta'.*anna", ok, bad.but(kind="delta"))
    alone = {**shared, "c1.bias": shared["c1.bias"][[0, 1]]}
    refused("eve.*another model", ok, bad.but(tensors=alone, mask=ChannelMask(other, {"a": (0, 1), "b": (0, 1, 2, 3)})))
    refused(r"eve.*'c1.bias' to be \(5,\)", bad.but(tensors=alone, mask=ChannelMask(narrow, {"a": (0, 1)})))


def test_large_finite_values_pass_the_check() -> None:
    """Their float32 sum overflows, although each is finite."""
    x = np.full(100, 3e38, np.float32)
    assert np.array_equal(
        MaskedMean().apply({"w": np.zeros(100, np.float32)}, {}, [Update({"w": x}, weight=2)])[0]["w"], x
    )


def test_an_aggregate_out_of_range_is_refused() -> None:
    with pytest.raises(AggregationError, match=r"'w'.*range"):
        MaskedMean().apply(
            {"w": np.full(2, 3e38, np.float32)},
            {},
            [Update({"w": np.full(2, 3e38, np.float32)}, weight=1, kind="delta")],
        )
    many = [Update({"w": np.ones(1, np.float32)}, weight=1e308, client=c) for c in "ab"]
    with pytest.raises(AggregationError, match="weights of 2 updates sum to inf"):
        MaskedMean().apply({"w": np.zeros(1, np.float32)}, {}, many)


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="weighting='size'"):
        MaskedMean(weighting="size")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="mode='union'"):
        MaskedMean(mode="union")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="min_holders=0"):
        MaskedMean(min_holders=0)


def test_compact_shape_of_a_flattened_map(net: tuple[Tensors, ChannelLayout]) -> None:
    _, layout = net
    mask = ChannelMask(layout, {"a": (0,), "b": (1, 3)})
    assert compact_shape("fc.weight", (2, 8), mask) == (2, 4)
    where = positions("fc.weight", mask)
    assert where is not None
    assert where[1] is not None
    assert where[1].tolist() == [2, 3, 6, 7]
