"""The laws that every algorithm keeps, over every name in the registry and one of another package (``tests/mypkg``), in
every setting; nothing is skipped."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from math import prod

import numpy as np
import pytest
import torch
from tolerance import roundings
from torch import nn
from torch.nn import Module

from talaria.algorithms import ALGORITHMS, kind_of, load, name_of, options
from talaria.errors import ConfigError, ModelError, TalariaError
from talaria.federated import device_task, rounds, run_model
from talaria.federated.run import Member, Run
from talaria.model import zoo
from talaria.model.spec import AdapterSpec, ModelSpec
from talaria.model.state import state_of, tensor_of
from talaria.planning.plan import Plan
from talaria.tensors import Tensors, copied, equal, is_float
from talaria.training.loop import predict
from talaria.types import Recipe, Samples, Update
from talaria.wire import codec
from talaria_export.convert.onnx import export_onnx
from talaria_export.runtime.session import Session

SHAPE, CLASSES = (3, 16), 3
SPEC = ModelSpec("imu_cnn", SHAPE, CLASSES)
ADAPTED = ModelSpec("imu_cnn", SHAPE, CLASSES, adapters=AdapterSpec("lowrank", rank=2))
NARROW = Plan(widths={"conv1": 16, "conv2": 24, "conv3": 32, "conv4": 40})
NARROW_ADAPTED = Plan(widths={f"{group}.base": width for group, width in NARROW.widths.items()})
NAMES = [*sorted(ALGORITHMS), "mypkg.mine:FedHalf"]

SETTINGS: dict[str, dict[str, object]] = {
    "plain": {},
    "masks": {"plan": NARROW},
    "adapters": {"spec": ADAPTED},
    "masks and adapters": {"plan": NARROW_ADAPTED, "spec": ADAPTED},
    "aggregated buffers": {"buffers": "aggregate"},
    "sampling": {"fraction": 0.5},
}
FOREIGN = {
    "a conv net": ("Residual", {"one.first": 8, "two.second": 16}),
    "a GRU": ("Recurrent", {"gru": 8}),
    "a transformer": ("Attentive", {"layer.self_attn": 1, "layer.linear1": 16}),
}
"""Networks of another package (``tests/mypkg``) and the widths at which ben holds them, by the setting."""
SETTINGS |= {
    name: {"spec": ModelSpec(f"mypkg.nets:{net}", SHAPE, CLASSES), "plan": Plan(widths=widths), "pruned": ("ben",)}
    for name, (net, widths) in FOREIGN.items()
}
SETTINGS |= {
    f"{name} with adapters": {
        "spec": ModelSpec(f"mypkg.nets:{net}", SHAPE, CLASSES, adapters=AdapterSpec("lowrank", rank=2)),
        "plan": Plan(widths={f"{group}.base": width for group, width in widths.items()}),
        "pruned": ("ben",),
    }
    for name, (net, widths) in FOREIGN.items()
}
FEW = {"pfedgm": {"features": 8}}
"""Options under which three devices of twelve samples are enough: covariances of 64 features from 12 are noise, and two
engines' roundings grow in their inverse."""
TWO_ROUNDS = 1 << 12
"""Roundings by which two rounds on two engines may differ: they add up those of each step."""

CASES = [(name, setting) for name in NAMES for setting in SETTINGS]
BOTH_WAYS = {
    "a GRU both ways": "BothWays", "an RNN both ways": "PlainBothWays", "an LSTM both ways": "LongBothWays",
}  # fmt: skip
"""Beside the cases: recurrent networks that the two engines are compared on."""
for _name, _net in BOTH_WAYS.items():
    _made = ModelSpec(f"mypkg.nets:{_net}", SHAPE, CLASSES)
    SETTINGS[_name] = {"spec": _made, "plan": Plan(widths={"rnn": 6}), "pruned": ("ben",)}
_made = ModelSpec("mypkg.nets:BothWays", SHAPE, CLASSES, adapters=AdapterSpec("lowrank", rank=2))
SETTINGS["a GRU both ways with adapters"] = {"spec": _made, "plan": Plan(widths={"rnn.base": 6}), "pruned": ("ben",)}


def samples(seed: int, count: int, classes: int = CLASSES) -> Samples:
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % classes
    x = torch.randn(count, *SHAPE, generator=g) * 0.5
    x[:, 0] += y[:, None].float() - 1
    return Samples.of(x, y)


def member(name: str, seed: int, plan: Plan | None = None, count: int = 12, classes: int = CLASSES) -> Member:
    return Member(name, samples(seed, count, classes), samples(seed + 50, 6, classes), plan)


def run_of(name: str, setting: str) -> Run:
    wanted = {k: v for k, v in SETTINGS[setting].items() if k not in ("plan", "pruned")}
    hparams = {"threshold": 0.0} if name == "hermes" else {}
    spec = wanted.pop("spec", SPEC)
    recipe = Recipe(epochs=1, batch=6, lr=0.02, momentum=0.5)
    return Run(spec=spec, algorithm=name, hparams=hparams, recipe=recipe, rounds=2, seed=3, **wanted)


@dataclass(frozen=True)
class Learned:
    run: Run
    members: Mapping[str, Member]
    before: Tensors
    shared: Tensors
    private: Mapping[str, Tensors]
    updates: tuple[Update, ...]


@cache
def learned(name: str, setting: str) -> Learned:
    run = run_of(name, setting)
    plan = SETTINGS[setting].get("plan")
    names = ("anna", "ben", "cleo")
    pruned = SETTINGS[setting].get("pruned", names)
    members = {n: member(n, i, plan if n in pruned else None) for i, n in enumerate(names)}
    return learn(run, members)


def learn(run: Run, members: Mapping[str, Member]) -> Learned:
    before, server = rounds.start(run)
    shared, private, updates = before, {}, []
    for number in range(1, run.rounds + 1):
        updates = []
        for name in rounds.cohort(run, number, tuple(members)):
            update, private[name] = rounds.participate(run, members[name], shared, private.get(name), number)
            updates.append(update)
        shared, server = rounds.close(run, shared, server, updates)
    return Learned(run, members, before, shared, private, tuple(updates))


def test_what_makes_no_sense_is_refused() -> None:
    bare = nn.Sequential(nn.Flatten(), nn.LayerNorm(prod(SHAPE)), nn.Linear(prod(SHAPE), CLASSES))
    conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(SHAPE[0], 16, 3))
    normed = nn.Sequential(conv, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(16, CLASSES))
    for network, why in ((bare, "a model of linear layers alone"), (normed, "0 computes its weight from")):
        run = replace(run_of("hermes", "plain"), spec=zoo.keep(network, SHAPE, CLASSES))
        with pytest.raises(TalariaError, match=rf"prunes channels, but .* has none that may go \({why}"):
            rounds.start(run)


@pytest.mark.parametrize(("name", "setting"), CASES)
def test_the_same_seed_gives_the_same_bits(name: str, setting: str) -> None:
    one = learned(name, setting)
    two = learn(one.run, one.members)
    assert equal(one.shared, two.shared)
    assert one.private.keys() == two.private.keys()
    assert all(equal(one.private[n], two.private[n]) for n in one.private)


@pytest.mark.parametrize("name", NAMES)
def test_another_seed_gives_other_bits(name: str) -> None:
    one = learned(name, "plain")
    two = learn(replace(one.run, seed=4), one.members)
    assert not all(equal(one.private[n], two.private[n]) for n in one.private) or not equal(one.shared, two.shared)


@pytest.mark.parametrize(("name", "setting"), CASES)
def test_inputs_stay_untouched(name: str, setting: str) -> None:
    done = learned(name, setting)
    who = sorted(done.private)[0]
    shared, private = done.shared, done.private[who]
    saved = copied(shared), copied(private)
    rounds.participate(done.run, done.members[who], shared, private, 9)
    rounds.personalize(done.run, done.members[who], shared, private)
    assert equal(shared, saved[0])
    assert equal(private, saved[1])


def require_arrives(run: Run, shared: Tensors, update: Update, how: str = "raw") -> None:
    """What a coordinator asks of the update's bytes when they arrive."""
    data = codec.encode_update(update, how)
    schema, layout = codec.schema_of(run_model.first_shared(run)), run_model.layout_of(run.spec)
    rounds.require_update(run, shared, codec.decode_update(data, schema=schema, layout=layout, client=update.client))


@pytest.mark.parametrize(("name", "setting"), CASES)
def test_what_an_honest_device_sends_is_never_refused(name: str, setting: str) -> None:
    done = learned(name, setting)
    for update in done.updates:
        require_arrives(done.run, done.shared, update)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("changes", "count", "classes"),
    [
        ({}, 1, 3),
        ({}, 2, 3),
        ({}, 7, 1),
        ({"codec": "int8"}, 12, 3),
        ({"codec": "topk:0.05", "buffers": "aggregate"}, 12, 3),
        ({"asynchronous": True, "buffers": "aggregate"}, 12, 3),
    ],
    ids=["one sample", "two samples", "one class", "int8", "top-k", "asynchronous"],
)
def test_nor_is_what_it_learns_from_little_or_sends_in_short(
    name: str, changes: dict[str, object], count: int, classes: int
) -> None:
    run = replace(run_of(name, "plain"), **changes)
    shared, private = run_model.first_shared(run), None
    who = member("anna", 0, count=count, classes=classes)
    for number in (1, 2):
        update, private = rounds.participate(run, who, shared, private, number)
        require_arrives(run, shared, update, device_task.codec_of(run, who))


@pytest.mark.parametrize(("name", "setting"), CASES)
def test_only_shared_names_are_in_an_update(name: str, setting: str) -> None:
    done = learned(name, setting)
    for update in done.updates:
        assert set(update.tensors) <= set(done.shared)
        assert not any("num_batches_tracked" in key for key in update.tensors)
        if done.run.buffers == "local":
            assert not any("running_" in key for key in update.tensors)


@pytest.mark.parametrize(("name", "setting"), CASES)
def test_no_private_tensor_is_in_the_bytes(name: str, setting: str) -> None:
    """Not even under another name: no private tensor's raw bytes occur in what is sent. A device may keep a copy of
    what it shares (Hermes' ``own/`` and ``seen/``)."""
    done = learned(name, setting)
    for update in done.updates:
        frame = codec.encode_update(update, "raw", compress=False)
        for key, tensor in done.private[update.client].items():
            if key.startswith(("own/", "seen/")) and key.partition("/")[2] in update.tensors:
                continue
            if is_float(tensor) and tensor.size >= 8 and np.unique(tensor).size > 2:
                assert tensor.tobytes() not in frame, f"{key} of {update.client} travelled"


@pytest.mark.parametrize(("name", "setting"), CASES)
def test_an_update_survives_the_wire(name: str, setting: str) -> None:
    done = learned(name, setting)
    layout, schema = run_model.layout_of(done.run.spec), codec.schema_of(done.before)
    for update in done.updates:
        back = codec.decode_update(codec.encode_update(update), schema=schema, layout=layout)
        assert equal(back.tensors, update.tensors)
        assert (back.client, back.weight, back.base_version, back.kind) == (
            update.client,
            update.weight,
            update.base_version,
            update.kind,
        )
        assert (back.mask or layout.full()).kept == (update.mask or layout.full()).kept
        same = codec.as_decoded(update, schema=schema, layout=layout)
        assert list(same.tensors) == list(back.tensors)
        assert equal(same.tensors, back.tensors)
        assert replace(same, tensors={}) == replace(back, tensors={})


@pytest.mark.parametrize("name", [n for n in NAMES if n != "local"])
def test_what_is_shared_is_learned(name: str) -> None:
    done = learned(name, "plain")
    assert not equal(done.before, done.shared)


@pytest.mark.parametrize(("name", "setting"), CASES)
def test_a_device_that_never_trained_is_served(name: str, setting: str) -> None:
    done = learned(name, setting)
    late = member("zoe", 77, SETTINGS[setting].get("plan"))
    logits = predict(rounds.personalize(done.run, late, done.shared, None), late.val.x)
    assert logits.shape == (6, CLASSES)
    assert np.isfinite(logits).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_device_may_join_late(name: str) -> None:
    done = learned(name, "plain")
    late = member("zoe", 77)
    update, private = rounds.participate(done.run, late, done.shared, None, 3)
    shared, server = done.shared, run_model.algorithm_of(done.run).aggregator.init(done.shared)
    shared, _ = rounds.close(done.run, shared, server, [update])
    assert np.isfinite(predict(rounds.personalize(done.run, late, shared, private), late.val.x)).all()


@pytest.mark.parametrize(("count", "classes"), [(1, 3), (6, 1)], ids=["one sample", "one class"])
@pytest.mark.parametrize("name", NAMES)
def test_a_poor_client_neither_breaks_nor_poisons(name: str, count: int, classes: int) -> None:
    run = run_of(name, "plain")
    members = {"anna": member("anna", 1), "poor": member("poor", 2, count=count, classes=classes)}
    done = learn(run, members)
    assert all(np.isfinite(v).all() for v in done.shared.values() if is_float(v))
    for who, person in members.items():
        model = rounds.personalize(run, person, done.shared, done.private[who])
        assert np.isfinite(predict(model, members["anna"].val.x)).all()


@pytest.mark.parametrize("setting", ["plain", "masks and adapters"])
def test_the_personal_model_exports(setting: str) -> None:
    """That of every algorithm; of those whose networks are the same but for their weights, one is exported."""
    seen = set()
    for name in NAMES:
        done = learned(name, setting)
        who = sorted(done.private)[0]
        x = done.members[who].val.x
        model = rounds.personalize(done.run, done.members[who], done.shared, done.private[who])
        network = str(model), tuple((key, value.shape) for key, value in model.state_dict().items())
        if network in seen:
            continue
        seen.add(network)
        got = Session(export_onnx(model, tensor_of(x[:2])))(x)
        assert roundings(got, predict(model, x)) <= 1000, name
    assert 3 <= len(seen) < len(NAMES)


@pytest.mark.parametrize(("name", "setting"), CASES)
def test_the_personal_model_is_frozen_and_its_own(name: str, setting: str) -> None:
    done = learned(name, setting)
    who = sorted(done.private)[0]
    one, two = (rounds.personalize(done.run, done.members[who], done.shared, done.private[who]) for _ in range(2))
    assert isinstance(one, Module)
    assert not any(m.training for m in one.modules())
    assert not any(p.requires_grad for p in one.parameters())
    assert equal(state_of(one), state_of(two)), "serving twice gives the same model"
    assert not {p.data_ptr() for p in one.parameters()} & {p.data_ptr() for p in two.parameters()}


ENGINES = [(name, setting) for name in NAMES for setting in ("plain", "masks and adapters")]
ENGINES += [("fedper", "a GRU"), ("hermes", "a transformer"), ("heart_pfl", "a GRU with adapters")]
ENGINES += [("heart_pfl", "a transformer"), ("heart_pfl", "a conv net with adapters")]
ENGINES += [(n, s) for s in BOTH_WAYS for n in ("fedper", "apfl", "perfedavg", "heart_pfl", "pfedgm", "hermes")]
ENGINES += [("heart_pfl", "a GRU both ways with adapters"), ("perfedavg", "a GRU both ways with adapters")]
ENGINES += [("apfl", "a transformer with adapters"), ("perfedavg", "a transformer with adapters")]


@pytest.mark.parametrize(("name", "setting"), ENGINES)
def test_programs_learn_what_torch_learns_and_the_same_bits_twice(name: str, setting: str) -> None:
    """Two rounds of all devices and what a newcomer is served, dense and pruned with adapters; units and heads, too."""
    hparams = {**run_of(name, setting).hparams, **FEW.get(name, {})}
    torchs = learned(name, setting) if name not in FEW else None
    run, members = replace(run_of(name, setting), hparams=hparams), learned("fedavg", setting).members
    torchs = torchs or learn(run, members)
    by_programs = {n: replace(m, engine="onnx") for n, m in members.items()}
    one = learn(run, by_programs)
    if setting != "plain":
        two = learn(run, by_programs)
        assert equal(one.shared, two.shared)
        assert all(equal(one.private[n], two.private[n]) for n in one.private)
    for mine, theirs in ((one.shared, torchs.shared), *((one.private[n], torchs.private[n]) for n in one.private)):
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            assert mine[key].shape == value.shape
            scale = max(1e-2, float(np.abs(value).max(initial=0)))
            assert roundings(np.asarray(mine[key], np.float32), value, scale) <= TWO_ROUNDS, key
    late = member("zoe", 77, SETTINGS[setting].get("plan"))
    served, wanted = (
        predict(rounds.personalize(run, replace(late, engine=engine), done.shared, None), late.val.x)
        for engine, done in (("onnx", one), ("torch", torchs))
    )
    assert roundings(served, wanted) <= TWO_ROUNDS


@pytest.mark.parametrize("name", NAMES)
def test_whoever_asks_without_gradients_has_the_same_bits(name: str) -> None:
    done = learned(name, "plain")
    who, private = done.members["anna"], done.private["anna"]
    found = []
    for mode in (torch.enable_grad, torch.no_grad):
        with mode():
            update, own = rounds.participate(done.run, who, done.shared, private, 2)
            served = [state_of(rounds.personalize(done.run, who, done.shared, mine)) for mine in (private, None)]
        found.append((update.tensors, own, *served))
    assert all(equal(one, two) for one, two in zip(*found, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_smoothed_labels_are_learned_from(name: str) -> None:
    run = run_of(name, "plain")
    run = replace(run, hparams={**run.hparams, **FEW.get(name, {})})
    smoothed = replace(run, recipe=run.recipe.but(smoothing=0.3))
    one, two = (
        rounds.participate(of, member("anna", 0), run_model.first_shared(of), None, 1) for of in (run, smoothed)
    )
    assert not equal(one[0].tensors, two[0].tensors) or not equal(one[1], two[1])


FROZEN: list[tuple[str, dict[str, object], str, tuple[str, ...]]] = [
    *((name, {}, "torch", ("conv2", "bn2")) for name in NAMES),
    ("ffgg", {"form": "gradient"}, "torch", ("conv2", "bn2")),
    ("apfl", {}, "onnx", ("conv2", "bn2")),
    ("perfedavg", {"form": "exact"}, "onnx", ("conv2", "bn2")),
    ("ffgg", {"form": "gradient"}, "onnx", ("conv2", "bn2")),
    ("fedrep", {}, "onnx", ("head",)),
]


@pytest.mark.parametrize(("name", "hparams", "engine", "freeze"), FROZEN)
def test_what_the_recipe_freezes_stays_in_the_rounds_and_where_a_model_is_served(
    name: str, hparams: dict[str, object], engine: str, freeze: tuple[str, ...]
) -> None:
    run = run_of(name, "plain")
    recipe = run.recipe.but(freeze=freeze, weight_decay=0.1)
    whole = {"threshold": 1.0} if name == "hermes" else {}
    run = replace(run, recipe=recipe, hparams={**FEW.get(name, {}), **hparams, **whole})
    who, shared = replace(member("anna", 0), engine=engine), run_model.first_shared(run)
    update, private = rounds.participate(run, who, shared, None, 1)
    first = state_of(run_model.template(run.spec))
    sent = update.tensors if update.kind == "value" else {k: shared[k] + v for k, v in update.tensors.items()}
    served = [state_of(rounds.personalize(run, who, shared, own)) for own in (private, None)]
    still = [key for key in run_model.split_of(run).keys if key.startswith(freeze)]
    assert still
    for state in (sent, private, *served):
        there = {key.removeprefix("personal/").removeprefix("own/"): value for key, value in state.items()}
        assert all(np.array_equal(there[key], first[key]) for key in still if key in there)


@pytest.mark.parametrize("name", NAMES)
def test_an_algorithm_is_frozen_data_with_a_card(name: str) -> None:
    algorithm = load(name)
    assert is_dataclass(algorithm)
    assert name not in ALGORITHMS or algorithm.card.name == name
    assert name_of(algorithm)[0] == name
    assert algorithm == load(name)
    scalars = (bool, int, float, str)
    for option, default in options(type(algorithm)).items():
        assert isinstance(default, scalars), f"{name}.{option} cannot travel"
    with pytest.raises((AttributeError, TypeError)):
        setattr(algorithm, fields(algorithm)[0].name, None)


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_option_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"option 'nosuchthing' is unknown"):
        load(name, {"nosuchthing": 1})


@pytest.mark.parametrize("name", NAMES)
def test_every_number_is_refused_out_of_range(name: str) -> None:
    """A negative number makes no sense for any option, and none is taken silently."""
    for option, default in options(kind_of(name)).items():
        if isinstance(default, int | float) and not isinstance(default, bool):
            with pytest.raises(ConfigError, match=option):
                load(name, {option: type(default)(-3)})


@pytest.mark.parametrize("name", NAMES)
def test_a_head_that_does_not_exist_is_refused(name: str) -> None:
    from talaria.model.split import split_model

    with pytest.raises(ModelError, match="nosuchhead"):
        load(name).init(run_model.template(SPEC), split_model(run_model.template(SPEC), head="nosuchhead"))
