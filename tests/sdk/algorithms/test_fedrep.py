"""FedRep: two phases that leave each other's part alone to the bit, and a body that finds the truth."""

from collections.abc import Callable

import pytest
import torch
from tolerance import roundings
from torch import nn

from talaria.algorithms.fedrep import FedRep
from talaria.errors import ConfigError
from talaria.model.split import Split
from talaria.model.state import state_of, tensor_of
from talaria.tensors import Tensors, copied, equal, only
from talaria.training.interface import Task
from talaria.training.loop import accuracy, calibrate
from talaria.types import Recipe, Samples, Update

Tiny = Callable[..., Task]
Rounds = Callable[..., tuple[list[Update], Tensors, Tensors]]


def trained_before(task: Task, rounds: Rounds) -> tuple[Tensors, Tensors]:
    _, shared, private = rounds(FedRep(), task, 1)
    return shared, private


@pytest.mark.parametrize("norm", [False, True])
def test_head_phase_leaves_the_body_and_its_statistics_alone(tiny: Tiny, rounds: Rounds, norm: bool) -> None:
    task = tiny(norm=norm, momentum=0.5, weight_decay=0.01)
    shared, private = trained_before(task, rounds)
    update, after = FedRep(body_epochs=0, allow_degenerate=True).fit(task, shared, private)
    assert equal(update.tensors, shared)
    still = [k for k in private if not k.startswith("head")]
    assert equal(only(after, still), only(private, still))
    assert not equal(after, private)


def test_body_phase_leaves_the_head_alone(tiny: Tiny, rounds: Rounds) -> None:
    task = tiny(momentum=0.5, weight_decay=0.01)
    shared, private = trained_before(task, rounds)
    update, after = FedRep(head_epochs=0, allow_degenerate=True).fit(task, shared, private)
    assert equal(after, private)
    assert not equal(update.tensors, shared)


def test_momentum_never_crosses_from_phase_to_phase(tiny: Tiny, rounds: Rounds) -> None:
    """Head, then body, in one fit is the same as in two fits."""
    task = tiny(momentum=0.9)
    shared, private = trained_before(task, rounds)
    update, after = FedRep(head_epochs=3, body_epochs=2).fit(task, shared, private)
    _, head = FedRep(head_epochs=3, body_epochs=0, allow_degenerate=True).fit(task, shared, private)
    alone, _ = FedRep(head_epochs=0, body_epochs=2, allow_degenerate=True).fit(task, shared, head)
    assert equal(update.tensors, alone.tensors)
    assert equal(after, head)


def test_only_the_body_travels(tiny: Tiny, rounds: Rounds) -> None:
    for net in ({}, {"norm": True}, {"adapter": True}):
        sent, shared, private = rounds(FedRep(), tiny(**net), 1)
        assert set(sent[0].tensors) == set(shared) == {k for k in shared if k.startswith("body")}
        assert not any("running" in k or "tracked" in k for k in shared)
        assert {"head.weight", "head.bias"} <= set(private)


def test_head_epochs_do_not_follow_the_recipe(tiny: Tiny, rounds: Rounds) -> None:
    """Steps given in the recipe would otherwise be taken in both phases."""
    task = tiny()
    shared, private = trained_before(task, rounds)
    plain, _ = FedRep().fit(task, shared, private)
    stepped, _ = FedRep().fit(task.but(recipe=task.recipe.but(steps=1)), shared, private)
    assert equal(plain.tensors, stepped.tensors)


def test_served_model_has_the_latest_body_and_a_head_fitted_to_it(tiny: Tiny, rounds: Rounds) -> None:
    task = tiny(norm=True)
    shared, private = trained_before(task, rounds)
    newer = {k: v + 0.3 for k, v in shared.items()}
    served = state_of(FedRep().personal(task, newer, private))
    assert equal(only(served, newer), newer)
    stale = {**newer, **private}
    assert not equal(only(served, private), private)
    assert accuracy(task, served, task.train) >= accuracy(task, stale, task.train)
    assert equal(state_of(FedRep(final_epochs=0).personal(task, newer, private)), {k: stale[k] for k in served})


def test_newcomer_trains_its_head_under_a_still_body(tiny: Tiny, start: Callable[..., tuple[Tensors, Tensors]]) -> None:
    task = tiny(norm=True).but(newcomer=True)
    shared, private = start(FedRep(), task)
    served = state_of(FedRep().personal(task, shared, private))
    assert equal(only(served, shared), shared)
    assert not equal(only(served, ["head.weight"]), only(private, ["head.weight"]))
    assert int(served["body.1.num_batches_tracked"]) > 0


class Line(nn.Module):
    """x ↦ hᵀ Bᵀ x, given as two logits."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 2, bias=False)
        self.head = nn.Linear(2, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.head(self.body(x))
        return torch.cat([torch.zeros_like(z), z], 1)


def test_linear_body_finds_the_common_subspace() -> None:
    """Devices whose labels come from one two-dimensional subspace: the principal angle of B to it goes to 0."""
    g = torch.Generator().manual_seed(0)
    truth = torch.linalg.qr(torch.randn(8, 2, generator=g))[0]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = Line()
    split = Split(body=("body.weight",), adapters=(), head=("head.weight",))
    tasks = []
    for client in range(8):
        x = torch.randn(64, 8, generator=g)
        y = (x @ truth @ torch.randn(2, generator=g) > 0).long()
        data = Samples.of(x, y)
        recipe = Recipe(batch=16, lr=0.3, epochs=1, momentum=0.0)
        tasks.append(Task(model, split, data, data, recipe, 2, client=str(client)))

    def angle(shared: Tensors) -> float:
        learned = torch.linalg.qr(tensor_of(shared["body.weight"]).T)[0]
        cosines = torch.linalg.svdvals(learned.T @ truth)
        return float(torch.rad2deg(torch.acos(cosines.min().clamp(max=1))))

    algorithm = FedRep(head_epochs=5, body_epochs=1)
    shared, first = algorithm.init(model, split)
    private = {task.client: first for task in tasks}
    before = angle(shared)
    for number in range(25):
        updates = []
        for task in tasks:
            update, private[task.client] = algorithm.fit(task.but(round=number), shared, private[task.client])
            updates.append(update)
        shared, _ = algorithm.aggregator.apply(shared, {}, updates)
    assert before > 40
    assert angle(shared) < 6


def test_uniform_weights_by_option(tiny: Tiny, start: Callable[..., tuple[Tensors, Tensors]]) -> None:
    algorithm = FedRep(weighting="uniform")
    small, large = tiny(count=4, client="a"), tiny(count=20, client="b", seed=2)
    shared, private = start(algorithm, small)
    sent = [algorithm.fit(task, shared, private)[0] for task in (small, large)]
    mean, _ = algorithm.aggregator.apply(shared, {}, sent)
    for k in shared:
        assert roundings(mean[k], (sent[0].tensors[k] + sent[1].tensors[k]) / 2) <= 16


@pytest.mark.parametrize(
    ("field", "value"),
    [("head_epochs", 0), ("body_epochs", 0), ("head_epochs", -1), ("final_epochs", -1), ("weighting", "even")],
)
def test_bad_options(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"fedrep: {field}={value!r}"):
        FedRep(**{field: value})  # type: ignore[arg-type]


def test_inputs_stay_untouched(tiny: Tiny, rounds: Rounds) -> None:
    task = tiny(norm=True)
    shared, private = trained_before(task, rounds)
    before = copied(shared), copied(private)
    FedRep().fit(task, shared, private)
    FedRep().personal(task, shared, private)
    assert equal(shared, before[0])
    assert equal(private, before[1])


def test_the_first_head_phase_sees_this_devices_statistics(
    tiny: Tiny, start: Callable[..., tuple[Tensors, Tensors]]
) -> None:
    """On the first day a frozen BatchNorm would else normalize by the numbers of nobody."""
    task = tiny(norm=True)
    shared, private = start(FedRep(), task)
    _, after = FedRep(body_epochs=0, allow_degenerate=True).fit(task, shared, private)
    truth = calibrate(task, {**shared, **private})
    assert equal(only(after, sorted(task.split.statistics)), only(truth, sorted(task.split.statistics)))
