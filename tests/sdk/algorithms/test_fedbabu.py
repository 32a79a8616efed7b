"""FedBABU: nobody trains the head until the end, and what fine-tuning trains is what its name says."""

from collections.abc import Callable

import pytest

from talaria.algorithms.fedbabu import FedBABU
from talaria.errors import ConfigError
from talaria.model.state import state_of
from talaria.tensors import Tensors, equal, only
from talaria.training.interface import Task
from talaria.training.loop import train
from talaria.types import Update

Tiny = Callable[..., Task]
Rounds = Callable[..., tuple[list[Update], Tensors, Tensors]]
HEAD = ("head.weight", "head.bias")


@pytest.mark.parametrize("net", [{}, {"norm": True}, {"momentum": 0.9, "weight_decay": 0.1}], ids=str)
def test_the_common_head_never_moves(tiny: Tiny, rounds: Rounds, net: dict[str, object]) -> None:
    first = state_of(tiny(**net).model)
    sent, shared, private = rounds(FedBABU(), tiny(**net))
    assert equal(only(private, HEAD), only(first, HEAD))
    assert not equal(shared, only(first, shared))
    assert all(set(update.tensors) == set(shared) for update in sent)
    assert not set(HEAD) & set(shared)


def test_adapters_belong_to_the_representation(tiny: Tiny, rounds: Rounds) -> None:
    first = state_of(tiny(adapter=True).model)
    _, shared, _ = rounds(FedBABU(), tiny(adapter=True))
    assert "adapter.weight" in shared
    assert not equal(only(shared, ["adapter.weight"]), only(first, ["adapter.weight"]))


def test_before_tuning_all_devices_are_the_same(tiny: Tiny, rounds: Rounds) -> None:
    _, shared, private = rounds(FedBABU(), tiny())
    plain = FedBABU(tune_epochs=0, allow_degenerate=True)
    other = tiny(client="ben", seed=9).but(newcomer=True)
    assert equal(
        state_of(plain.personal(tiny(), shared, private)),
        state_of(plain.personal(other, shared, plain.init(other.model, other.split)[1])),
    )


@pytest.mark.parametrize(("tune", "moves"), [("full", {"body", "head"}), ("head", {"head"}), ("body", {"body"})])
def test_tuning_moves_the_named_part_alone(tiny: Tiny, rounds: Rounds, tune: str, moves: set[str]) -> None:
    task = tiny(norm=True, weight_decay=0.1, momentum=0.9)
    _, shared, private = rounds(FedBABU(), task)
    before = {**shared, **private}
    after = state_of(FedBABU(tune=tune).personal(task, shared, private))
    moved = {k.split(".")[0] for k in before if not equal(only(before, [k]), only(after, [k]))}
    assert moved == moves


def test_a_newcomer_tunes_as_everyone_does(tiny: Tiny, rounds: Rounds) -> None:
    """No asymmetry: neither frozen head nor frozen body is left over from the rounds."""
    _, shared, private = rounds(FedBABU(), tiny())
    member = FedBABU().personal(tiny(), shared, private)
    newcomer = FedBABU().personal(tiny().but(newcomer=True), shared, private)
    assert equal(state_of(member), state_of(newcomer))


def test_tuning_rate_is_a_share_of_the_recipes(tiny: Tiny, rounds: Rounds) -> None:
    task = tiny(lr=0.2)
    _, shared, private = rounds(FedBABU(), task)
    served = state_of(FedBABU(tune_rate=0.5, tune_epochs=3).personal(task, shared, private))
    recipe = task.recipe.but(lr=0.1, epochs=3)
    assert equal(served, train(task, {**shared, **private}, recipe=recipe, purpose="tune"))


@pytest.mark.parametrize(
    ("field", "value"),
    [("tune", "neck"), ("tune_epochs", -1), ("tune_epochs", 0), ("tune_rate", 0.0), ("weighting", "even")],
)
def test_bad_options(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"fedbabu: {field}={value!r}"):
        FedBABU(**{field: value})  # type: ignore[arg-type]
