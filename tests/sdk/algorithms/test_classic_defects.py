"""Mistakes found in published implementations of these methods, each with a test that would catch it here."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from tolerance import roundings
from torch.nn import functional as F

from talaria.algorithms import ALGORITHMS, load
from talaria.algorithms.apfl import ALPHA, APFL
from talaria.algorithms.base import Algorithm
from talaria.algorithms.ditto import Ditto
from talaria.algorithms.fedavg import FedAvg
from talaria.algorithms.fedavg_ft import FedAvgFT
from talaria.algorithms.fedbabu import FedBABU
from talaria.algorithms.fedper import FedPer
from talaria.algorithms.fedprox import FedProx
from talaria.algorithms.fedrep import FedRep
from talaria.algorithms.perfedavg import PerFedAvg
from talaria.algorithms.sharing import PERSONAL
from talaria.errors import ConfigError
from talaria.model.split import split_model
from talaria.model.state import load as loaded
from talaria.model.state import state_of, tensor_of, to_torch
from talaria.tensors import Tensors, copied, equal, is_float, only, under
from talaria.training.interface import Task
from talaria.training.loop import calibrate, train
from talaria.types import Samples, Update

Tiny = Callable[..., Task]
Rounds = Callable[..., tuple[list[Update], Tensors, Tensors]]
CLASSIC = (
    "local",
    "fedavg",
    "fedavg_ft",
    "fedprox",
    "fedper",
    "fedrep",
    "fedbabu",
    "lg_fedavg",
    "ditto",
    "apfl",
    "perfedavg",
)
classic = pytest.mark.parametrize("name", CLASSIC)


# on the wire


@classic
@pytest.mark.parametrize("newcomer", [False, True])
def test_no_private_bytes_in_an_update(tiny: Tiny, name: str, newcomer: bool) -> None:
    """Whole state dicts were sent, personal layers included. No run of bytes of what stays may be in what goes."""
    task = tiny(norm=True, adapter=True, steps=7).but(newcomer=newcomer)
    algorithm = load(name)
    shared, private = algorithm.init(task.model, task.split)
    _, private = algorithm.fit(task, shared, private)
    update, own = algorithm.fit(task.but(round=1), shared, private)
    wire = b"".join(v.tobytes() for v in update.tensors.values())
    for key, value in own.items():
        # A bias before BatchNorm has a gradient of rounding alone: on some processors it stays as all began.
        if value.size >= 3 and not key.endswith("body.0.bias"):
            assert value.tobytes() not in wire, key
    assert all(isinstance(v, float) for v in update.metrics.values())


@pytest.mark.parametrize(
    "name", ["fedavg_ft", "fedbabu", "fedrep", "ditto", "apfl", "perfedavg", "fedper", "lg_fedavg"]
)
@pytest.mark.parametrize("newcomer", [False, True])
def test_personalizing_changes_neither_server_nor_device(tiny: Tiny, rounds: Rounds, name: str, newcomer: bool) -> None:
    """Fine-tuned weights were uploaded and averaged, personal models replaced shared ones in the last round. Here a
    personal model is made from copies, and the round after it is the one that would have been."""
    task, algorithm = tiny(norm=True).but(newcomer=newcomer), load(name)
    _, shared, private = rounds(algorithm, task, 1)
    before = copied(shared), copied(private)
    expected, own = algorithm.fit(task, shared, private)
    algorithm.personal(task, shared, private)
    assert equal(shared, before[0])
    assert equal(private, before[1])
    update, after = algorithm.fit(task, shared, private)
    assert equal(update.tensors, expected.tensors)
    assert equal(after, own)


def test_counters_are_never_averaged(tiny: Tiny) -> None:
    """An averaged integer is cut off when it is loaded."""
    for buffers in ("local", "aggregate"):
        task = tiny(norm=True, buffers=buffers)
        for name in CLASSIC:
            shared, _ = load(name).init(task.model, task.split)
            assert not [k for k, v in shared.items() if not is_float(v)]


def test_shared_statistics_are_everyones_not_the_first_devices(tiny: Tiny) -> None:
    """A server model that began as a copy of the first upload kept that device's BatchNorm."""
    tasks = [tiny(norm=True, buffers="aggregate", client=c, seed=s) for c, s in (("a", 1), ("b", 2))]
    shared, private = FedAvg().init(tasks[0].model, tasks[0].split)
    sent = [FedAvg().fit(task, shared, private)[0] for task in tasks]
    new, _ = FedAvg().aggregator.apply(shared, {}, sent)
    key = "body.1.running_mean"
    assert roundings(new[key], (sent[0].tensors[key] + sent[1].tensors[key]) / 2) <= 16
    assert not np.array_equal(new[key], sent[0].tensors[key])


# which model is tested


@classic
def test_served_models_are_in_eval_and_repeat(tiny: Tiny, rounds: Rounds, name: str) -> None:
    """Tests ran in train mode, so that batches normalized themselves and moved the statistics."""
    task = tiny(norm=True, dropout=0.5)
    _, shared, private = rounds(load(name), task, 1)
    model = load(name).personal(task, shared, private)
    before = state_of(model)
    x = tensor_of(task.val.x)
    assert torch.equal(model(x), model(x))
    assert roundings(model(x)[:1], model(x[:1])) <= 64
    assert equal(state_of(model), before)


@pytest.mark.parametrize(("name", "moves"), [("apfl", True), ("ditto", False)])
def test_the_personal_model_is_the_one_served(tiny: Tiny, rounds: Rounds, name: str, moves: bool) -> None:
    """The federated copy was tested in place of the personal one."""
    task, algorithm = tiny(), load(name)
    _, shared, private = rounds(algorithm, task)
    served = state_of(algorithm.personal(task, shared, private))
    assert not equal(only(served, shared), shared)
    changed = {k: v + 0.1 if k.startswith(PERSONAL) else v for k, v in private.items()}
    assert not equal(state_of(algorithm.personal(task, shared, changed)), served)
    newer = {k: v + 0.1 for k, v in shared.items()}
    assert equal(state_of(algorithm.personal(task, newer, private)), served) is not moves


@classic
def test_test_data_is_out_of_reach(tiny: Tiny, rounds: Rounds, name: str) -> None:
    """Adaptation ran on the test split. Neither rounds nor serving depend on what is held out for validation."""
    task = tiny(norm=True)
    other = task.but(val=Samples(task.val.x + 5, (task.val.y + 1) % 3))
    (_, shared, private), (_, same, own) = (
        rounds(load(name), task),
        rounds(load(name), tiny(norm=True).but(val=other.val)),
    )
    assert equal({**shared, **private}, {**same, **own})
    served = state_of(load(name).personal(task, shared, private))
    assert equal(served, state_of(load(name).personal(other, shared, private)))


@pytest.mark.parametrize(
    "name", ["fedavg_ft", "fedbabu", "fedper", "fedrep", "lg_fedavg", "ditto", "apfl", "perfedavg"]
)
def test_every_device_is_personalized_also_one_never_sampled(tiny: Tiny, rounds: Rounds, name: str) -> None:
    """Only the sampled devices were, or a newcomer's personal model was tested untrained."""
    algorithm = load(name)
    _, shared, _ = rounds(algorithm, tiny(norm=True, lr=0.3), 1)
    late = tiny(norm=True, client="late", seed=9, lr=0.3).but(newcomer=True)
    plain = {**state_of(late.model), **shared}
    loaded(late.model, plain)
    _, private = algorithm.init(late.model, late.split)
    served = state_of(algorithm.personal(late, shared, private))
    trained = late.split.parameters("body", "head")
    assert not equal(only(served, trained), only(plain, trained))


# default settings


@pytest.mark.parametrize("name", CLASSIC)
def test_no_default_switches_the_method_off(name: str) -> None:
    """Ditto and FedProx came with a pull of 0, APFL with α = 1."""
    algorithm = load(name)
    neutral = {"fedprox": ("mu", 0.0), "ditto": ("lam", 0.0), "perfedavg": ("form", "none")}
    assert algorithm == ALGORITHMS[name]()
    if name in neutral:
        with pytest.raises(ConfigError, match="allow_degenerate"):
            load(name, dict([neutral[name]]))


def test_fedrep_defaults_are_ten_head_epochs_then_one_of_the_body() -> None:
    """Others ship 1 + 1, 4 + 1, or the two the wrong way round."""
    assert (FedRep().head_epochs, FedRep().body_epochs, FedRep().final_epochs) == (10, 1, 10)


def test_unknown_options_are_refused_not_replaced_by_a_default() -> None:
    with pytest.raises(ConfigError, match="did you mean 'lam'"):
        load("ditto", {"lamb": 0.1})


# FedProx, FedPer, FedRep, FedBABU


def test_fedprox_pull_grows_with_the_distance(bowl: Callable[..., Task]) -> None:
    """An unsquared norm pulls with constant strength and is undefined at the anchor itself. From the anchor 1:
    the first step, to 1.4, is free; the third sees 0.7 of distance."""
    w = {"w": np.array(1.0)}
    one, two, three = (float(FedProx(mu=0.5).fit(bowl(steps=n), w, {})[0].tensors["w"]) for n in (1, 2, 3))
    assert (one, two) == pytest.approx((1.4, 1.7))
    assert three == pytest.approx(1.7 + 0.1 * (2.6 - 0.5 * 0.7))


def test_fedper_serves_the_stored_head_unchanged(tiny: Tiny, rounds: Rounds) -> None:
    """A head-only round at the end is no part of the paper, and hid how well the old head fits the new body."""
    _, shared, private = rounds(FedPer(), tiny(norm=True))
    newer = {k: v * 1.1 for k, v in shared.items()}
    served = state_of(FedPer().personal(tiny(norm=True), newer, private))
    assert equal(only(served, newer), newer)
    assert equal(only(served, private), private)


def test_parts_are_exact_names_not_substrings() -> None:
    """``conv1`` is not ``conv10``, nor the ``conv1`` inside a block."""
    model = torch.nn.ModuleDict({
        "fc1": torch.nn.Linear(2, 2),
        "fc10": torch.nn.Linear(2, 2),
        "block": torch.nn.ModuleDict({"fc1": torch.nn.Linear(2, 2)}),
    })  # fmt: skip
    assert split_model(model, "fc1").head == ("fc1.weight", "fc1.bias")


def test_frozen_body_does_not_move_in_the_head_tune(tiny: Tiny, rounds: Rounds) -> None:
    """Freezing gradients alone leaves BatchNorm's statistics moving."""
    task = tiny(norm=True)
    for algorithm in (FedBABU(tune="head"), FedAvgFT(tune="head")):
        _, shared, private = rounds(algorithm, task)
        served = state_of(algorithm.personal(task, shared, private))
        body = task.split.body
        assert equal(only(served, body), only({**shared, **private}, body))


def test_fedbabu_tunes_from_the_aggregate_not_from_its_own_last_body(tiny: Tiny) -> None:
    """The last aggregate was never sent; each device tuned the body that it had trained itself."""
    algorithm = FedBABU(tune_rate=1e-9)
    tasks = [tiny(client=c, seed=s) for c, s in (("a", 1), ("b", 2))]
    shared, private = algorithm.init(tasks[0].model, tasks[0].split)
    sent = [algorithm.fit(task, shared, private)[0] for task in tasks]
    new, _ = algorithm.aggregator.apply(shared, {}, sent)
    served = state_of(algorithm.personal(tasks[0], new, private))
    assert all(roundings(served[k], new[k]) <= 64 for k in new)
    assert any(not np.allclose(served[k], sent[0].tensors[k], atol=1e-4) for k in new)


def test_a_frozen_part_thaws_for_the_next_phase(tiny: Tiny, rounds: Rounds) -> None:
    """After tuning the head the body stayed frozen, and newcomers never got their head unfrozen."""
    task, algorithm = tiny(norm=True), FedBABU(tune="head")
    _, shared, private = rounds(algorithm, task)
    algorithm.personal(task, shared, private)
    expected = FedBABU(tune="full").personal(tiny(norm=True), shared, private)
    assert equal(state_of(FedBABU(tune="full").personal(task, shared, private)), state_of(expected))


# APFL, Ditto


def mixed_case(task: Task) -> tuple[Tensors, Tensors]:
    shared, private = APFL(alpha=0.5).init(task.model, task.split)
    trained = [PERSONAL + k for k in task.split.parameters("body", "head")]
    return shared, {k: np.roll(v, 1, 0) + 0.2 if k in trained else v for k, v in private.items()}


def test_apfl_mixes_parameters_not_logits(tiny: Tiny) -> None:
    """Mixed logits are another function, and no single network."""
    task = tiny()
    shared, private = mixed_case(task)
    served = APFL().personal(task, shared, private)
    assert type(served) is type(task.model)
    own, common, x = to_torch(under(private, PERSONAL)), to_torch(shared), tensor_of(task.val.x)
    call = torch.func.functional_call
    logits = 0.5 * call(task.model, own, (x,)) + 0.5 * call(task.model, common, (x,))
    weights = {k: 0.5 * own[k] + 0.5 * common[k] for k in own}
    assert roundings(served(x), call(task.model, weights, (x,))) <= 64
    assert float((served(x) - logits).abs().max()) > 0.01


def test_apfl_own_pass_sees_the_shared_weights_before_their_step(tiny: Tiny) -> None:
    """w was already updated when the personal pass ran."""
    task = tiny(epochs=1, batch=13)
    shared, private = mixed_case(task)
    at = {
        k: v.requires_grad_()
        for k, v in to_torch({k: 0.5 * private[PERSONAL + k] + 0.5 * w for k, w in shared.items()}).items()
    }
    logits = torch.func.functional_call(task.model, at, (tensor_of(task.train.x),))
    loss = F.cross_entropy(logits, tensor_of(task.train.y))
    slopes = dict(zip(at, torch.autograd.grad(loss, list(at.values())), strict=True))
    _, after = APFL(alpha_update="off").fit(task, shared, private)
    for k in shared:
        assert roundings(after[PERSONAL + k], private[PERSONAL + k] - 0.05 * slopes[k].numpy()) <= 64


def test_apfl_own_model_is_not_overwritten_by_the_mixture(tiny: Tiny) -> None:
    """At the end of a round v became v̄, so that α compounded. With rate ~0, v stays what it was."""
    task = tiny(lr=1e-12)
    shared, private = mixed_case(task)
    _, after = APFL(alpha_update="off").fit(task, shared, private)
    for k in shared:
        assert roundings(after[PERSONAL + k], private[PERSONAL + k]) <= 1


def test_shared_batchnorm_advances_once_a_batch(tiny: Tiny) -> None:
    """The personal pass ran through the shared model's BatchNorm a second time."""
    for algorithm in (APFL(), Ditto()):
        task = tiny(norm=True)
        shared, private = algorithm.init(task.model, task.split)
        _, after = algorithm.fit(task, shared, private)
        assert int(after["body.1.num_batches_tracked"]) == 2 * 3


@pytest.mark.parametrize("algorithm", [APFL(), Ditto()], ids=["apfl", "ditto"])
def test_the_own_model_starts_from_the_received_one(tiny: Tiny, algorithm: Algorithm) -> None:
    """It began at unrelated random weights."""
    task = tiny(norm=True)
    shared, private = algorithm.init(task.model, task.split)
    assert equal(only(under(private, PERSONAL), shared), shared)


def test_apfl_alpha_has_no_hidden_regularizer(tiny: Tiny) -> None:
    """0.02 α was added to its gradient: with v = w there is none at all."""
    task = tiny(steps=1)
    shared, private = APFL(alpha=0.5).init(task.model, task.split)
    _, after = APFL(alpha_update="every_step", alpha_lr=1.0).fit(task, shared, private)
    assert float(after[ALPHA]) == 0.5


def test_ditto_pull_leaves_batchnorm_statistics_alone(tiny: Tiny) -> None:
    """The pull was applied to every key of the state."""
    task = tiny(norm=True, lr=1e-9)
    _, private = Ditto(lam=1.0).init(task.model, task.split)
    shared, _ = Ditto().init(task.model, task.split)
    _, after = Ditto(lam=1.0).fit(task, shared, private)
    alone = train(task, under(private, PERSONAL))
    statistics = sorted(task.split.statistics)
    assert all(roundings(under(after, PERSONAL)[k], alone[k]) <= 64 for k in statistics)


def test_ditto_own_model_trains_at_the_recipes_rate_and_decay(tiny: Tiny) -> None:
    """It fell back silently to another rate, without momentum and decay."""
    task = tiny(momentum=0.9, weight_decay=0.1)
    algorithm = Ditto(lam=1e-12)
    shared, private = algorithm.init(task.model, task.split)
    _, after = algorithm.fit(task, shared, private)
    alone = train(task, under(private, PERSONAL))
    assert all(roundings(under(after, PERSONAL)[k], alone[k]) <= 64 for k in alone)


# Per-FedAvg


def test_perfedavg_outer_rate_is_not_the_inner_one(bowl: Callable[..., Task]) -> None:
    """β was ignored and set to α. The update is proportional to the recipe's rate."""
    w = {"w": np.array(0.0)}
    small, large = (float(PerFedAvg(inner_lr=0.1).fit(bowl(lr=lr), w, {})[0].tensors["w"]) for lr in (0.01, 0.03))
    assert large == pytest.approx(3 * small)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7])
def test_perfedavg_trains_devices_with_few_samples(tiny: Tiny, count: int) -> None:
    """Devices with fewer than two batches did nothing, and still uploaded."""
    task = tiny(count=count)
    shared, private = PerFedAvg().init(task.model, task.split)
    update, _ = PerFedAvg().fit(task, shared, private)
    assert not equal(update.tensors, shared)


def test_perfedavg_statistics_are_of_w_not_of_the_inner_step(tiny: Tiny) -> None:
    """They were updated at w̃ and not restored: a huge inner step would show."""
    task = tiny(norm=True, count=60, lr=1e-9, epochs=20)
    algorithm = PerFedAvg(inner_lr=50.0)
    shared, private = algorithm.init(task.model, task.split)
    _, after = algorithm.fit(task, shared, private)
    truth = calibrate(task, {**shared, **private})
    assert np.allclose(after["body.1.running_mean"], truth["body.1.running_mean"], atol=0.4)


def test_perfedavg_adapts_by_a_few_steps_not_by_epochs(tiny: Tiny, rounds: Rounds) -> None:
    task = tiny(norm=True)
    _, shared, private = rounds(PerFedAvg(), task)
    served = state_of(PerFedAvg().personal(task, shared, private))
    key = "body.1.num_batches_tracked"
    assert int(served[key]) == int(private[key]) + PerFedAvg().adapt_steps


# baselines


def test_local_is_independent_of_everyone_else(tiny: Tiny) -> None:
    algorithm = load("local")
    task = tiny()
    shared, private = algorithm.init(task.model, task.split)
    update, own = algorithm.fit(task, shared, private)
    assert shared == {}
    assert update.tensors == {}
    new, _ = algorithm.aggregator.apply(shared, {}, [update, update.but(client="ben")])
    assert new == {}
    assert equal(own, algorithm.fit(task, new, private)[1])


def test_small_devices_train_the_last_short_batch(tiny: Tiny) -> None:
    """drop_last gave devices with fewer samples than a batch no step at all."""
    for name in CLASSIC:
        task = tiny(count=3, batch=32, epochs=1)
        shared, private = load(name).init(task.model, task.split)
        update, own = load(name).fit(task, shared, private)
        assert not equal({**update.tensors, **own}, {**shared, **private}), name
