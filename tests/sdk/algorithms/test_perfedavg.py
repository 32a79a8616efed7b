"""Per-FedAvg: the meta-gradient against autograd, disjoint batches, and statistics that only w moves."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tolerance import roundings
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from talaria.algorithms.ffgg import FFGG
from talaria.algorithms.perfedavg import PerFedAvg
from talaria.algorithms.perfedavg.triples import apart, third
from talaria.errors import ConfigError
from talaria.model.state import load, state_of, tensor_of, to_arrays, to_torch
from talaria.planning.plan import Plan
from talaria.seeds import Draws
from talaria.tensors import Array, Tensors, copied, equal, only
from talaria.training.batching import batches
from talaria.training.interface import Task
from talaria.training.loop import gradient
from talaria.types import Update

Tiny = Callable[..., Task]
Rounds = Callable[..., tuple[list[Update], Tensors, Tensors]]


def meta_gradient(task: Task, state: Tensors, alpha: float, parts: list[Array]) -> Tensors:
    """∇f(w̃; D') - α ∇²f(w; D'') ∇f(w̃; D') by autograd, straight from the formula."""

    def loss(at: dict[str, Tensor], index: Array) -> Tensor:
        part = task.train.take(index)
        return F.cross_entropy(functional_call(task.model, at, (tensor_of(part.x),)), tensor_of(part.y))

    first, second, last = parts
    w = {k: v.clone().requires_grad_() for k, v in to_torch(state).items()}
    step = torch.autograd.grad(loss(w, first), list(w.values()))
    near = {k: (v - alpha * g).detach().requires_grad_() for (k, v), g in zip(w.items(), step, strict=True)}
    slope = torch.autograd.grad(loss(near, second), list(near.values()))
    at = torch.autograd.grad(loss(w, last), list(w.values()), create_graph=True)
    bent = torch.autograd.grad(sum((a * b).sum() for a, b in zip(at, slope, strict=True)), list(w.values()))  # type: ignore[arg-type]
    return to_arrays({k: g - alpha * h for k, g, h in zip(w, slope, bent, strict=True)})


@pytest.mark.parametrize(("form", "tolerance"), [("exact", 64), ("hf", 4000)])
def test_meta_step_against_the_formula(tiny: Tiny, form: str, tolerance: float) -> None:
    task = tiny(steps=1, lr=1.0)
    state = state_of(task.model)
    second = next(batches(13, 4, 1, task.draws("train")))
    first, last = apart(13, second, 4, task.draws("train/inner"))
    expected = meta_gradient(task, state, 0.5, [first, second, last])
    update, _ = PerFedAvg(inner_lr=0.5, form=form).fit(task, state, {})
    for k, g in expected.items():
        assert roundings(state[k] - update.tensors[k], g, 1.0) <= tolerance, k
    plain, _ = PerFedAvg(inner_lr=0.5, form="fo").fit(task, state, {})
    assert any(not np.allclose(state[k] - plain.tensors[k], g, atol=1e-3) for k, g in expected.items())


def test_finite_difference_holds_under_dropout(tiny: Tiny) -> None:
    """Both sides of the difference see the same dropout, as the exact form does: what the difference errs by is little
    of what the second derivatives add, whose noise would else be more than all of it."""
    for net in ({"dropout": 0.5}, {"norm": True}):
        task = tiny(steps=1, lr=1.0, **net)
        shared, private = PerFedAvg().init(task.model, task.split)
        forms = ("exact", "hf", "fo")
        sent = [PerFedAvg(inner_lr=0.5, form=form).fit(task, shared, private)[0].tensors for form in forms]
        errs, adds = (max(float(np.abs(sent[0][k] - other[k]).max()) for k in shared) for other in sent[1:])
        assert errs < 0.02 * adds


@given(count=st.integers(1, 80), size=st.integers(1, 20), seed=st.integers(0, 5))
def test_the_three_batches_are_disjoint_where_three_samples_are(count: int, size: int, seed: int) -> None:
    draws = Draws(seed)
    for second in batches(count, third(count, size), 7, draws):
        first, last = apart(count, second, size, draws)
        trio = [set(part.tolist()) for part in (first, second, last)]
        assert all(0 < len(part) <= size + 1 for part in trio)
        if count >= 3:
            assert len(set.union(*trio)) == sum(map(len, trio))
        if count >= 3 * size:
            assert len(trio[0]) == len(trio[2]) == size


@pytest.mark.parametrize("form", ["fo", "hf", "exact"])
def test_only_the_pass_at_w_moves_batchnorm(tiny: Tiny, form: str) -> None:
    """One meta-step is one batch in the statistics, whatever is evaluated beside w, and it is D at w."""
    task = tiny(norm=True, steps=1, count=30, lr=5.0)
    algorithm = PerFedAvg(inner_lr=5.0, form=form)
    shared, private = algorithm.init(task.model, task.split)
    _, after = algorithm.fit(task, shared, private)
    second = next(batches(30, 4, 1, task.draws("train")))
    first, _ = apart(30, second, 4, task.draws("train/inner"))
    hidden = task.train.x[first] @ shared["body.0.weight"].T + shared["body.0.bias"]
    assert int(after["body.1.num_batches_tracked"]) == 1
    assert roundings(after["body.1.running_mean"], 0.1 * hidden.mean(0)) <= 64


def test_it_takes_as_many_steps_as_the_recipe_says(tiny: Tiny) -> None:
    for net, steps in (({"count": 13}, 6), ({"count": 2}, 2), ({"count": 13, "steps": 4}, 4)):
        task = tiny(norm=True, **net)
        algorithm = PerFedAvg(form="fo")
        shared, private = algorithm.init(task.model, task.split)
        _, after = algorithm.fit(task, shared, private)
        lone = third(len(task.train), 4) == 1
        assert int(after["body.1.num_batches_tracked"]) == (0 if lone else steps)


def test_served_is_one_full_batch_step_without_decay_or_momentum(tiny: Tiny, rounds: Rounds) -> None:
    task = tiny(momentum=0.9, weight_decay=0.1)
    algorithm = PerFedAvg(inner_lr=0.3, adapt_steps=1)
    _, shared, private = rounds(algorithm, task)
    served = state_of(algorithm.personal(task, shared, private))
    slope = gradient(task, shared)
    assert all(roundings(served[k], shared[k] - 0.3 * slope[k]) <= 64 for k in shared)
    newcomer = algorithm.personal(task.but(newcomer=True), shared, private)
    assert equal(state_of(newcomer), served)


def test_the_inner_step_follows_the_recipe_unless_it_is_given(tiny: Tiny) -> None:
    """A fixed rate beside a recipe of another size made steps too small to adapt anything."""
    recipe = tiny(lr=0.2).recipe
    assert PerFedAvg().alpha(recipe) == 0.2
    assert PerFedAvg(inner_lr=0.3).alpha(recipe) == 0.3
    task = tiny(lr=0.2)
    shared, private = PerFedAvg().init(task.model, task.split)
    served = state_of(PerFedAvg().personal(task, shared, private))
    given = state_of(PerFedAvg(inner_lr=PerFedAvg().alpha(recipe)).personal(task, shared, private))
    assert equal(served, given)


def test_serving_takes_every_sample_in_bounded_slices(tiny: Tiny) -> None:
    task = tiny(count=600)
    algorithm = PerFedAvg(inner_lr=0.3, adapt_steps=1)
    shared, private = algorithm.init(task.model, task.split)
    largest = []
    served = task.but(model=task.model)
    task.model.register_forward_pre_hook(lambda module, inputs: largest.append(len(inputs[0])))
    after = state_of(algorithm.personal(served, shared, private))
    assert sum(largest) == 600
    assert max(largest) <= 256
    slope = gradient(task, shared)
    assert all(roundings(after[k], shared[k] - 0.3 * slope[k]) <= 64 for k in shared)


@pytest.mark.parametrize(
    ("plan", "slices", "most"),
    [
        (Plan(predicted={"train_memory_mb": 1.0}), 1, 4),
        (None, 2, 2),
        (Plan(), 1, 30),
    ],
)
def test_a_device_holds_no_more_samples_than_its_memory_was_planned_for(
    tiny: Tiny, plan: Plan | None, slices: int, most: int
) -> None:
    """Where all of its samples have a say at once, too: the served step, and FFGG's gradient."""
    for algorithm in (PerFedAvg(), FFGG(form="gradient")):
        task = tiny(count=30, accumulate=slices).but(plan=plan)
        shared, private = algorithm.init(task.model, task.split)
        held = []
        task.model.register_forward_pre_hook(
            lambda module, inputs, held=held: held.append(len(inputs[0])) if torch.is_grad_enabled() else None
        )
        algorithm.fit(task, shared, private)
        algorithm.personal(task, shared, private)
        assert max(held) == most


def test_it_learns_a_better_start_than_its_own_average(tiny: Tiny) -> None:
    """Devices with opposite labels: no common model fits them, a start that one step adapts does."""
    algorithm = PerFedAvg(inner_lr=1.0, form="exact")
    tasks = []
    for client, flip in (("a", 0), ("b", 1)):
        task = tiny(count=48, client=client, epochs=4, batch=8, lr=0.2)
        tasks.append(task.but(train=type(task.train)(task.train.x, (task.train.y + flip) % 3)))
    shared, private = algorithm.init(tasks[0].model, tasks[0].split)

    def loss(served: bool) -> float:
        total = 0.0
        for task in tasks:
            model = algorithm.personal(task, shared, private) if served else task.model
            if not served:
                load(model, shared)
            total += float(F.cross_entropy(model(tensor_of(task.train.x)), tensor_of(task.train.y)).detach())
        return total / len(tasks)

    before = loss(True)
    for number in range(15):
        updates = [algorithm.fit(task.but(round=number), shared, private)[0] for task in tasks]
        shared, _ = algorithm.aggregator.apply(shared, {}, updates)
    assert loss(True) < before - 0.1
    assert loss(True) < loss(False) - 0.2


def test_inputs_stay_untouched(tiny: Tiny, rounds: Rounds) -> None:
    task = tiny(norm=True)
    _, shared, private = rounds(PerFedAvg(), task, 1)
    before = copied(shared), copied(private)
    update, _ = PerFedAvg().fit(task, shared, private)
    PerFedAvg().personal(task, shared, private)
    assert equal(shared, before[0])
    assert equal(private, before[1])
    assert equal(only(update.tensors, shared), update.tensors)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("inner_lr", -0.1),
        ("inner_lr", float("inf")),
        ("form", "second"),
        ("form", "none"),
        ("delta", 0.0),
        ("delta", 1e-5),
        ("adapt_steps", 0),
        ("adapt_steps", -1),
        ("weighting", "even"),
    ],
)
def test_bad_options(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"perfedavg: {field}={value!r}"):
        PerFedAvg(**{field: value})  # type: ignore[arg-type]
