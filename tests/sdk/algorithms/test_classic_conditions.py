"""Every classic method under every condition: masks, adapters, both buffer policies, few samples, sampling."""

from collections.abc import Callable

import numpy as np
import pytest

from talaria.algorithms import load
from talaria.algorithms.base import Algorithm
from talaria.model.masks import ChannelMask
from talaria.model.state import state_of
from talaria.tensors import Tensors, copied, equal
from talaria.training.interface import Task
from talaria.training.loop import calibrate, predict
from talaria.types import Update

Tiny = Callable[..., Task]
Rounds = Callable[..., tuple[list[Update], Tensors, Tensors]]
NAMES = ["local", "fedavg", "fedavg_ft", "fedprox", "fedper", "fedrep", "fedbabu", "lg_fedavg", "ditto", "apfl"]
CLASSIC = [*((name, {}) for name in NAMES), *(("perfedavg", {"form": form}) for form in ("fo", "hf", "exact"))]
classic = pytest.mark.parametrize(
    ("name", "hparams"), CLASSIC, ids=lambda value: value if isinstance(value, str) else ""
)
PRIVATE = {
    "local": {"body", "adapter", "head"},
    "fedper": {"adapter", "head"},
    "fedrep": {"adapter", "head"},
    "fedbabu": {"head"},
    "lg_fedavg": {"body", "adapter"},
}
"""Parts that never leave the device; the other methods share all three."""


@pytest.fixture
def algorithm(name: str, hparams: dict[str, object]) -> Algorithm:
    return load(name, hparams)


CONDITIONS = [
    {"count": 1},
    {"count": 2},
    {"count": 9, "classes": 1},
    {"norm": True, "count": 1},
    {"norm": True, "count": 2},
    {"norm": True, "adapter": True, "dropout": 0.3},
    {"norm": True, "buffers": "aggregate"},
    {"norm": True, "momentum": 0.9, "weight_decay": 0.01, "steps": 3},
]


@classic
@pytest.mark.parametrize("condition", CONDITIONS, ids=str)
def test_rounds_are_pure_repeatable_and_finite(
    tiny: Tiny, rounds: Rounds, algorithm: Algorithm, condition: dict[str, object]
) -> None:
    task = tiny(**condition)
    shared, private = algorithm.init(task.model, task.split)
    before = copied(shared), copied(private)
    first, own = algorithm.fit(task, shared, private)
    again, twin = algorithm.fit(task, shared, private)
    assert equal(shared, before[0])
    assert equal(private, before[1])
    assert equal(first.tensors, again.tensors)
    assert equal(own, twin)
    assert own.keys() == private.keys()
    assert {k: (v.dtype, v.shape) for k, v in own.items()} == {k: (v.dtype, v.shape) for k, v in private.items()}
    assert set(first.tensors) == set(shared)
    assert first.weight == len(task.train)
    _, shared, private = rounds(algorithm, tiny(**condition), 2)
    for t in (task, task.but(newcomer=True)):
        served = algorithm.personal(t, shared, private if not t.newcomer else algorithm.init(t.model, t.split)[1])
        logits = predict(served, task.val.x)
        assert np.isfinite(logits).all()
        assert served is not task.model
        assert not any(m.training for m in served.modules())


@classic
@pytest.mark.parametrize("buffers", ["local", "aggregate"])
def test_what_leaves_the_device(tiny: Tiny, algorithm: Algorithm, buffers: str) -> None:
    task = tiny(norm=True, adapter=True, buffers=buffers)
    shared, private = algorithm.init(task.model, task.split)
    home = PRIVATE.get(algorithm.card.name, set())
    keys = {
        k
        for k in state_of(task.model)
        if k.split(".")[0] not in home
        and not k.endswith("num_batches_tracked")
        and (buffers == "aggregate" or "running" not in k)
    }
    assert set(shared) == keys
    assert not keys & set(private)


@classic
def test_a_masked_device_sends_and_serves_its_small_model(
    tiny: Tiny, narrowed: Callable[[Task], tuple[Task, ChannelMask]], algorithm: Algorithm
) -> None:
    """One device keeps three of four hidden units, one keeps all: the server folds both, and what the first does not
    hold is the other's."""
    wide = tiny(client="wide")
    narrow, mask = narrowed(tiny(client="narrow", seed=3))
    shared, private = algorithm.init(wide.model, wide.split)
    small, own = algorithm.init(narrow.model, narrow.split)
    sent = [algorithm.fit(narrow, small, own)[0], algorithm.fit(wide, shared, private)[0]]
    assert sent[0].mask is mask
    new, _ = algorithm.aggregator.apply(shared, algorithm.aggregator.init(shared), sent)
    if "body.0.weight" in shared:
        assert np.array_equal(new["body.0.weight"][1], sent[1].tensors["body.0.weight"][1])
        assert not np.array_equal(new["body.0.weight"][0], sent[1].tensors["body.0.weight"][0])
    served = algorithm.personal(narrow, small, own)
    assert served.body[0].weight.shape == (3, 6)  # type: ignore[union-attr, index]


@classic
def test_rounds_draw_new_shuffles(tiny: Tiny, algorithm: Algorithm) -> None:
    """The same order in every round would give the same update from the same state."""
    task = tiny()
    shared, private = algorithm.init(task.model, task.split)
    (one, own), (two, other) = (algorithm.fit(task.but(round=n), shared, private) for n in (0, 1))
    assert not equal({**one.tensors, **own}, {**two.tensors, **other})


@classic
def test_learning_beats_the_start(tiny: Tiny, rounds: Rounds, algorithm: Algorithm) -> None:
    task = tiny(count=60, epochs=3, batch=8, lr=0.3)
    _, shared, private = rounds(algorithm, task, 6)
    served = algorithm.personal(task, shared, private)
    right = float((predict(served, task.train.x).argmax(1) == task.train.y).mean())
    start = float((predict(tiny(count=60).model, task.train.x).argmax(1) == task.train.y).mean())
    assert right > max(0.7, start)


@classic
def test_the_card_says_what_the_code_does(tiny: Tiny, algorithm: Algorithm) -> None:
    task = tiny(adapter=True)
    shared, _ = algorithm.init(task.model, task.split)
    parts = [part for part, key in (("body", "body."), ("adapters", "adapter."), ("head", "head."))
             if any(k.startswith(key) for k in shared)]  # fmt: skip
    assert algorithm.card.shares == (", ".join(parts) or "nothing")
    assert algorithm.card.evidence == "confirmed"


@pytest.mark.parametrize(
    ("name", "hparams"),
    [
        ("fedavg", {}),
        ("fedprox", {}),
        ("fedavg_ft", {"tune_epochs": 0}),
        ("fedper", {"join_epochs": 0}),
        ("fedbabu", {"tune_epochs": 0, "allow_degenerate": True}),
        ("lg_fedavg", {"join_epochs": 0}),
        ("ditto", {"join_epochs": 0}),
        ("apfl", {"join_epochs": 0}),
        ("perfedavg", {"adapt_steps": 0, "allow_degenerate": True}),
    ],
)
def test_a_newcomer_is_served_with_the_statistics_of_its_own_inputs(
    tiny: Tiny, name: str, hparams: dict[str, object]
) -> None:
    """Private BatchNorm statistics that no batch has moved are those of nobody."""
    task = tiny(norm=True).but(newcomer=True)
    algorithm = load(name, hparams)
    shared, private = algorithm.init(task.model, task.split)
    fresh = state_of(task.model)
    served = state_of(algorithm.personal(task, shared, private))
    assert equal(served, calibrate(task, fresh))
