"""Where two methods must coincide they do so to the bit: the draws of one branch never disturb another."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests.tolerance import roundings

from talaria.algorithms.apfl import ALPHA, APFL
from talaria.algorithms.base import Algorithm
from talaria.algorithms.ditto import Ditto
from talaria.algorithms.fedavg import FedAvg
from talaria.algorithms.fedavg_ft import FedAvgFT
from talaria.algorithms.fedbabu import FedBABU
from talaria.algorithms.fedper import FedPer
from talaria.algorithms.fedprox import FedProx
from talaria.algorithms.fedrep import FedRep
from talaria.algorithms.hermes import Hermes
from talaria.algorithms.hermes.own_values import OWN, SEEN
from talaria.algorithms.lg_fedavg import LGFedAvg
from talaria.algorithms.local_only import LocalOnly
from talaria.algorithms.perfedavg import PerFedAvg
from talaria.algorithms.sharing import PERSONAL
from talaria.model.masks import ChannelLayout
from talaria.model.state import state_of, tensor_of
from talaria.tensors import Tensors, equal, only, under, without
from talaria.training.interface import Task
from talaria.types import Update

Tiny = Callable[..., Task]
Rounds = Callable[..., tuple[list[Update], Tensors, Tensors]]

NETS = [
    {},
    {"norm": True},
    {"norm": True, "buffers": "aggregate"},
    {"dropout": 0.5},
    {"adapter": True},
    {"norm": True, "momentum": 0.9, "weight_decay": 0.01, "smoothing": 0.1, "accumulate": 2},
    {"norm": True, "count": 1},
]
nets = pytest.mark.parametrize("net", NETS, ids=str)


def whole(rounds: Rounds, algorithm: Algorithm, task: Task) -> Tensors:
    _, shared, private = rounds(algorithm, task)
    return {k: v for k, v in {**shared, **private}.items() if "/" not in k}


@nets
@pytest.mark.parametrize("same", [FedPer, LGFedAvg], ids=["FedPer without a head", "LG with everything shared"])
def test_all_shared_is_fedavg(
    tiny: Tiny, rounds: Rounds, net: dict[str, object], same: Callable[[], Algorithm]
) -> None:
    head = "none" if same is FedPer else "all"
    a, b = tiny(**net, head=head), tiny(**net, head=head)
    assert equal(whole(rounds, same(), a), whole(rounds, FedAvg(), b))


@nets
@pytest.mark.parametrize("same", [FedPer, LGFedAvg], ids=["FedPer without a body", "LG without a head"])
def test_nothing_shared_is_local(
    tiny: Tiny, rounds: Rounds, net: dict[str, object], same: Callable[[], Algorithm]
) -> None:
    head = "all" if same is FedPer else "none"
    sent, _, _ = rounds(same(), tiny(**net, head=head))
    assert equal(whole(rounds, same(), tiny(**net, head=head)), whole(rounds, LocalOnly(), tiny(**net)))
    assert all(not update.tensors for update in sent)


@nets
def test_fedrep_without_a_body_is_local(tiny: Tiny, rounds: Rounds, net: dict[str, object]) -> None:
    """Its head phase is then the whole training. Statistics that no batch has moved are estimated first."""
    same = whole(rounds, FedRep(head_epochs=2), tiny(**net, head="all"))
    local = whole(rounds, LocalOnly(), tiny(**net))
    trained = tiny(**net).split.parameters("body", "adapters", "head")
    assert equal(only(same, trained), only(local, trained))


@pytest.mark.parametrize("net", [net for net in NETS if "adapter" not in net], ids=str)
def test_fedrep_without_a_head_phase_is_fedbabu(tiny: Tiny, rounds: Rounds, net: dict[str, object]) -> None:
    """Without adapters, which FedRep keeps at home and FedBABU shares."""
    same = whole(rounds, FedRep(head_epochs=0, body_epochs=2, allow_degenerate=True), tiny(**net))
    assert equal(same, whole(rounds, FedBABU(), tiny(**net)))


@pytest.mark.parametrize("net", [{}, {"norm": True}, {"adapter": True}, {"momentum": 0.9}], ids=str)
def test_fedbabu_is_fedavg_whose_head_has_rate_zero(tiny: Tiny, rounds: Rounds, net: dict[str, object]) -> None:
    task = tiny(**net)
    expected = state_of(task.model)
    _, shared, private = rounds(FedBABU(), tiny(**net), 1)
    model, recipe = task.model.train(), task.recipe
    body = [p for k, p in model.named_parameters() if not k.startswith("head")]
    groups = [{"params": body}, {"params": model.head.parameters(), "lr": 0.0}]  # type: ignore[union-attr]
    optimizer = torch.optim.SGD(groups, lr=recipe.lr, momentum=recipe.momentum)
    draws, x, y = task.draws("train"), tensor_of(task.train.x), tensor_of(task.train.y)
    for _ in range(recipe.epochs):
        order = tensor_of(draws.order(13))
        for index in (order[:4], order[4:8], order[8:]):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x[index]), y[index]).backward()
            optimizer.step()
    assert equal({**shared, **private}, only(state_of(model), {**shared, **private}))
    assert equal(only({**shared, **private}, task.split.head), only(expected, task.split.head))


@nets
def test_fedprox_without_a_pull_is_fedavg(tiny: Tiny, rounds: Rounds, net: dict[str, object]) -> None:
    same = whole(rounds, FedProx(mu=0.0, allow_degenerate=True), tiny(**net))
    assert equal(same, whole(rounds, FedAvg(), tiny(**net)))


@nets
def test_no_tuning_is_fedavg(tiny: Tiny, rounds: Rounds, net: dict[str, object]) -> None:
    task, algorithm = tiny(**net), FedAvgFT(tune_epochs=0)
    _, shared, private = rounds(algorithm, task)
    served = algorithm.personal(task, shared, private)
    assert equal(state_of(served), state_of(FedAvg().personal(task, shared, private)))
    assert equal({**shared, **private}, whole(rounds, FedAvg(), tiny(**net)))


@nets
def test_none_of_the_way_to_the_tuned_model_is_fedavg(tiny: Tiny, rounds: Rounds, net: dict[str, object]) -> None:
    task = tiny(**net)
    _, shared, private = rounds(FedAvgFT(), task)
    none, half, every = (state_of(FedAvgFT(mix=mix).personal(task, shared, private)) for mix in (0.0, 0.5, 1.0))
    plain = state_of(FedAvg().personal(task, shared, private))
    weights = task.split.parameters("body", "adapters", "head")
    assert equal(only(none, weights), only(plain, weights))
    assert not equal(only(every, weights), only(plain, weights))
    for key in weights:
        assert roundings(half[key], (plain[key] + every[key]) / 2) <= 4


@nets
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_what_apfl_sends_is_fedavg_for_every_alpha(
    tiny: Tiny, rounds: Rounds, net: dict[str, object], alpha: float
) -> None:
    algorithm = APFL(alpha=alpha, alpha_update="every_step", allow_degenerate=True)
    assert equal(whole(rounds, algorithm, tiny(**net)), whole(rounds, FedAvg(), tiny(**net)))


@nets
def test_apfl_with_alpha_one_is_local(tiny: Tiny, rounds: Rounds, net: dict[str, object]) -> None:
    algorithm = APFL(alpha=1.0, alpha_update="off", allow_degenerate=True)
    _, shared, private = rounds(algorithm, tiny(**net))
    assert equal(under(private, PERSONAL), whole(rounds, LocalOnly(), tiny(**net)))
    other = {k: v + 1 for k, v in shared.items()}
    served = state_of(algorithm.personal(tiny(**net), shared, private))
    assert equal(served, state_of(algorithm.personal(tiny(**net), other, private)))


@nets
def test_apfl_with_alpha_zero_serves_the_shared_model_and_never_moves_its_own(
    tiny: Tiny, rounds: Rounds, net: dict[str, object]
) -> None:
    algorithm = APFL(alpha=0.0, alpha_update="off", allow_degenerate=True)
    task = tiny(**net)
    trained = task.split.parameters("body", "adapters", "head")
    _, first = algorithm.init(task.model, task.split)
    _, shared, private = rounds(algorithm, tiny(**net))
    assert equal(only(under(private, PERSONAL), trained), only(under(first, PERSONAL), trained))
    assert equal(only(state_of(algorithm.personal(task, shared, private)), trained), only(shared, trained))


@nets
@pytest.mark.parametrize("lam", [0.0, 0.7])
def test_what_ditto_sends_is_fedavg_for_every_lambda(
    tiny: Tiny, rounds: Rounds, net: dict[str, object], lam: float
) -> None:
    algorithm = Ditto(lam=lam, personal_epochs=3, allow_degenerate=True)
    assert equal(whole(rounds, algorithm, tiny(**net)), whole(rounds, FedAvg(), tiny(**net)))


@nets
def test_ditto_without_a_pull_is_local(tiny: Tiny, rounds: Rounds, net: dict[str, object]) -> None:
    _, _, private = rounds(Ditto(lam=0.0, allow_degenerate=True), tiny(**net))
    assert equal(under(private, PERSONAL), whole(rounds, LocalOnly(), tiny(**net)))


@pytest.mark.parametrize("net", [{}, {"dropout": 0.5}, {"momentum": 0.9, "weight_decay": 0.01}], ids=str)
def test_perfedavg_without_an_inner_step_is_fedavg(tiny: Tiny, rounds: Rounds, net: dict[str, object]) -> None:
    """The outer batches D' are those of plain training where there are three batches of samples."""
    algorithm = PerFedAvg(form="none", allow_degenerate=True)
    assert equal(whole(rounds, algorithm, tiny(**net)), whole(rounds, FedAvg(), tiny(**net)))


def test_perfedavg_without_an_inner_step_has_fedavgs_weights_under_batchnorm(tiny: Tiny, rounds: Rounds) -> None:
    algorithm = PerFedAvg(form="none", allow_degenerate=True)
    trained = tiny(norm=True).split.parameters("body", "head")
    same, fedavg = whole(rounds, algorithm, tiny(norm=True)), whole(rounds, FedAvg(), tiny(norm=True))
    assert equal(only(same, trained), only(fedavg, trained))


@nets
def test_hermes_with_everything_kept_is_fedavg(tiny: Tiny, rounds: Rounds, net: dict[str, object]) -> None:
    """A gate that nothing passes; labels of which a part cannot be learned keep the accuracy below 1."""
    layout = ChannelLayout({"h": 4}, {"head.weight": ((), (("h", 1),))})
    task = tiny(**net)
    val = task.val.take(np.array([0, 1, 0, 1]))
    val.y[2:] = (val.y[2:] + 1) % 3
    task = task.but(mask=layout.full(), val=val)
    same = whole(rounds, Hermes(threshold=1.0, private="none"), task)
    same = without(without(same, OWN), SEEN)
    assert equal(same, whole(rounds, FedAvg(), tiny(**net)))


def test_apfl_keeps_alpha_where_both_models_agree(tiny: Tiny) -> None:
    """v = w gives α no gradient; a regularizer on α would move it."""
    task = tiny(epochs=1, batch=13)
    algorithm = APFL(alpha=0.3)
    shared, private = algorithm.init(task.model, task.split)
    _, after = algorithm.fit(task, shared, private)
    assert float(after[ALPHA]) == 0.3


@nets
def test_who_comes_after_local_rounds_is_served_what_a_member_learned(tiny: Tiny, net: dict[str, object]) -> None:
    task, count = tiny(**net), 3
    shared, first = LocalOnly().init(task.model, task.split)
    private = first
    for number in range(1, count + 1):
        _, private = LocalOnly().fit(task.but(round=number), shared, private)
    late = LocalOnly().personal(task.but(round=count, newcomer=True), shared, first)
    assert equal(state_of(late), private)
