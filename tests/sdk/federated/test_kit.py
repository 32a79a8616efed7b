"""A kit holds what a device asks for, gives torch's masks, and anything else in its place is refused."""

import gc
import json
import weakref
import zlib
from dataclasses import replace

import numpy as np
import pytest

from talaria.algorithms import ALGORITHMS
from talaria.errors import ConfigError, StateError, TalariaError, TooLarge, WireError
from talaria.federated import device_task, rounds, run_model
from talaria.federated import kit as kits
from talaria.federated.kit import made
from talaria.federated.make_kit import kit_of
from talaria.federated.run import Member, Run
from talaria.model.spec import AdapterSpec, ModelSpec
from talaria.model.state import state_of
from talaria.model.weights import Served
from talaria.planning.plan import Plan
from talaria.programs.given import Given
from talaria.programs.shapes import Limits
from talaria.programs.source import Need
from talaria.tensors import equal
from talaria.training.engine import predict
from talaria.training.evaluation import evaluate
from talaria.types import Recipe, Samples
from talaria.wire import strict_safetensors

RUN = Run(spec=ModelSpec("imu_cnn", (6, 32), 3), algorithm="fedper", rounds=2, recipe=Recipe(epochs=2, batch=8))


@pytest.fixture(scope="module")
def file():
    return kits.encode(kit_of(RUN))


@pytest.fixture
def equipped(file):
    """This process has the kit of the run for one test."""
    run_model.equip(RUN, kits.decode(file))
    yield
    run_model._kits.clear()
    run_model._adopted.clear()
    run_model.update_schema.cache_clear()


def member(count=30, shape=RUN.spec.input_shape, **changes):
    rng = np.random.default_rng(0)
    y = np.arange(count) % 3
    x = (rng.standard_normal((count, *shape)) + y[:, None, None]).astype(np.float32)
    return replace(Member("anna", Samples(x, y), Samples(x, y), engine="onnx"), **changes)


def whole_round(one, shared):
    update, private = rounds.participate(RUN, one, shared, None, 1)
    served = rounds.personalize(RUN, one, shared, private)
    newcomer = rounds.personalize(RUN, one, shared, None)
    return update, private, served, newcomer


FEW_STEPS, IN_SLICES = Plan(batch=4, steps=1), Plan(accumulate=2)
HALF = Plan(widths={group: max(8, size // 2) for group, size in run_model.layout_of(RUN.spec).sizes.items()})


@pytest.mark.parametrize(
    "one",
    [
        member(),
        member(plan=HALF),
        member(3),
        member(1),
        member(plan=Plan(batch=4, steps=1)),
        member(plan=Plan(accumulate=2)),
    ],
    ids=["whole", "half", "few", "single", "one-step", "slices"],
)
def test_what_is_learned_from_a_kit_is_what_is_learned_with_torch_beside(file, one):
    shared = run_model.first_shared(RUN)
    here = whole_round(one, shared)
    run_model.equip(RUN, kits.decode(file))
    try:
        there = whole_round(one, shared)
    finally:
        run_model._kits.clear()
        run_model._adopted.clear()
        run_model.update_schema.cache_clear()
    assert equal(here[0].tensors, there[0].tensors)
    assert equal(here[1], there[1])
    for module, served in zip(here[2:], there[2:], strict=True):
        assert isinstance(served, Served)
        assert equal(state_of(module), dict(served.state))
        assert served.size == sum(p.numel() for p in module.parameters())
        np.testing.assert_allclose(served.predict(one.train.x), predict(module, one.train.x), atol=1e-4)
        assert evaluate(served, one.val).samples == len(one.val)


def test_with_a_kit_what_the_recipe_freezes_stands_still_too():
    run = replace(RUN, algorithm="fedavg", recipe=RUN.recipe.but(freeze=("bn2",)))
    shared, file = run_model.first_shared(run), kits.encode(kit_of(run))
    here = rounds.personalize(run, member(), shared, None)
    run_model.equip(run, kits.decode(file))
    try:
        there = rounds.personalize(run, member(), shared, None)
    finally:
        run_model._kits.clear()
        run_model._adopted.clear()
        run_model.update_schema.cache_clear()
    assert equal(state_of(here), dict(there.state))
    assert equal(
        *(
            {k: v for k, v in of.items() if k.startswith("bn2.")}
            for of in (there.state, state_of(run_model.template(run.spec)))
        )
    )


def test_a_run_that_goes_on_for_longer_takes_the_place_of_its_kit(file, equipped):
    """A device that stays had all of them, each with what ONNX Runtime held of its graphs."""
    before = weakref.ref(run_model.kit_of(RUN)[1])
    longer = replace(RUN, rounds=9)
    run_model.equip(longer, kits.decode(file))
    gc.collect()
    assert before() is None
    assert run_model.kit_of(RUN) == run_model.kit_of(longer)


def test_equal_runs_give_equal_files_in_any_process(file):
    assert made(RUN.to_json()) == file
    assert kits.encode(kits.decode(file)) == file


@pytest.mark.parametrize("name", ["fedper", "ditto", "hermes", "apfl"])
def test_what_is_downloaded_anyhow_is_not_in_it(name):
    """A kit has no values of what travels: the weights of a model were most of the file."""
    run = replace(RUN, algorithm=name)
    weights = sum(value.nbytes for value in state_of(run_model.template(run.spec)).values())
    kit = kit_of(run)
    assert not {*kit.state} & {*run_model.first_shared(run)}
    assert len(kits.encode(kit)) < sum(map(len, kit.source.files.values())) / 2 + weights / 8
    with pytest.raises(ConfigError, match="no run can begin here"):
        kit.blueprint.first()


def test_a_kit_of_another_run_is_refused(file):
    with pytest.raises(ConfigError, match="another run"):
        run_model.equip(replace(RUN, seed=1), kits.decode(file))


ADAPTED = replace(RUN.spec, adapters=AdapterSpec("residual"))
CASES = [
    *((name, ADAPTED, {}) for name in sorted(set(ALGORITHMS) - {"local"})),
    *((name, replace(ADAPTED, adapters=AdapterSpec("lowrank", rank=2)), {}) for name in ("fedper", "heart_pfl")),
    ("thorki", ADAPTED, {"general": "adapters"}),
    *((name, ModelSpec("mlp", (6, 8), 3), {}) for name in sorted(set(ALGORITHMS) - {"local"})),
    ("hermes", RUN.spec, {"threshold": 0.0}),
    ("hermes", RUN.spec, {"threshold": 0.0, "importance": "taylor"}),
    ("hermes", ModelSpec("mypkg.nets:TwoHeads", (6, 32), 3), {"threshold": 0.0}),
    ("thorki", RUN.spec, {"gate": "sample"}),
    ("pfedgm", RUN.spec, {"features": 8}),
    ("pfedgm", RUN.spec, {"features": 8, "predictive": True}),
]


@pytest.mark.parametrize(("name", "spec", "hparams"), CASES, ids=str)
def test_every_algorithm_learns_and_serves_from_a_kit_what_it_does_where_torch_is(name, spec, hparams):
    """A round, another, what is served to a member and to a newcomer: the same bytes, and the same answers."""
    run = replace(RUN, algorithm=name, hparams=hparams, spec=spec)
    one, ends, shared = member(shape=spec.input_shape), [], run_model.first_shared(run)
    for kit in (None, kits.decode(kits.encode(kit_of(run)))):
        if kit is not None:
            run_model.equip(run, kit)
        _, before = rounds.participate(run, one, shared, None, 1)
        update, private = rounds.participate(run, one, shared, before, 2)
        ends.append((update, private, *(rounds.personalize(run, one, shared, own) for own in (private, None))))
    run_model._kits.clear()
    run_model._adopted.clear()
    run_model.update_schema.cache_clear()
    here, there = ends
    assert equal(here[0].tensors, there[0].tensors)
    assert here[0].mask == there[0].mask
    assert equal(here[1], there[1])
    for module, served in zip(here[2:], there[2:], strict=True):
        assert isinstance(served, Served)
        assert equal(state_of(module), dict(served.state))
        assert served.size == sum(p.numel() for p in module.parameters())
        np.testing.assert_allclose(served.predict(one.train.x), predict(module, one.train.x), atol=1e-3)


@pytest.mark.parametrize("name", ["fedper", "hermes"])
def test_a_class_for_each_step_is_learned_from_a_kit(name, equipped):
    """The same bytes as where torch is, and the same answers."""
    hparams, spec = {"threshold": 0.0} if name == "hermes" else {}, ModelSpec("mypkg.nets:Steps", (3, 16), 3)
    run = replace(RUN, algorithm=name, hparams=hparams, spec=spec, task="per_step")
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((30, 3, 16)).astype(np.float32), rng.integers(-1, 3, (30, 16))
    samples, shared, ends = Samples.of(x, y, run.task), run_model.first_shared(run), []
    one = Member("anna", samples, samples, engine="onnx")
    for kit in (None, kits.decode(kits.encode(kit_of(run)))):
        if kit is not None:
            run_model.equip(run, kit)
        update, private = rounds.participate(run, one, shared, None, 1)
        ends.append((update, private, rounds.personalize(run, one, shared, private)))
    (here, kept, module), (there, learned, served) = ends
    assert equal(here.tensors, there.tensors)
    assert equal(kept, learned)
    assert isinstance(served, Served)
    np.testing.assert_allclose(served.predict(x), predict(module, x), atol=1e-4)
    assert evaluate(served, samples, task=run.task) == evaluate(module, samples, task=run.task)


def test_a_program_that_was_never_made_is_named(file):
    source = kits.decode(file).source
    with pytest.raises(ConfigError, match="talaria programs kit"):
        source.program(Need.of(RUN.recipe.but(momentum=0.5), None))
    with pytest.raises(ConfigError, match="talaria programs kit"):
        source.lower(frozenset({"unknown"}))


def cut(data):
    return data[:-9]


def of_version_one(data):
    return data.replace(b'"talaria-kit":"2"', b'"talaria-kit":"1"', 1)


def rewritten(change):
    def hostile(data):
        entries, meta = strict_safetensors.unpack(data, most=kits.MOST)
        arrays = {name: entry.array() for name, entry in entries.items()}
        about = json.loads(zlib.decompress(arrays["about"]))
        change(about, arrays)
        arrays["about"] = np.frombuffer(zlib.compress(json.dumps(about).encode()), np.uint8)
        return strict_safetensors.pack(arrays, meta)

    hostile.told = change.__name__
    return hostile


def stranger(about, arrays):
    arrays["stray"] = np.zeros(3, np.uint8)


def lost_weight(about, arrays):
    del arrays["state/" + next(name for name, *_ in about["state"] if name not in about["shared"])]


def unknown_part(about, arrays):
    about["split"]["head"] = ["nothing.weight"]


def odd_share(about, arrays):
    about["falls"] = {"drop": 7.0}


def no_size(about, arrays):
    about["cuts"] = dict.fromkeys(about["cuts"], 0)


def downloaded(about, arrays):
    arrays["state/" + about["shared"][0]] = np.zeros(3, np.float32)


def huge(about, arrays):
    about["state"][0][2] = [1 << 20, 1 << 20]


def twice(about, arrays):
    about["state"].append(about["state"][0])


def bomb(about, arrays):
    arrays["file/forward"] = np.frombuffer(zlib.compress(bytes(Limits().file_bytes + 1), 9), np.uint8)


def many_bombs(about, arrays):
    """Each within the bound of one file: together they are 512 MiB, of 4 KiB each."""
    one = np.frombuffer(zlib.compress(bytes(Limits().file_bytes), 9), np.uint8)
    arrays.update({f"file/{place}": one for place in range(128)})


def more_behind(about, arrays):
    arrays["file/forward"] = np.concatenate((arrays["file/forward"], np.zeros(1, np.uint8)))


def layer_of_one_size(about, arrays):
    """Here and in the next one what was raised was not ours: it ended the device that had put the kit on flash, at each
    start."""
    about["layers"][0]["dense"] = [8]


def beyond_all_numbers(about, arrays):
    about["sizes"]["conv1"] = float("inf")


def no_channels(about, arrays):
    about["axes"]["bn1.weight"][0][0][1] = 0


def other_channels(about, arrays):
    about["axes"]["bn1.weight"][0][0][0] = "conv9"


def other_dimensions(about, arrays):
    about["axes"]["bn1.weight"] = []


def few_scores(about, arrays):
    arrays["score/conv1"] = arrays["score/conv1"][1:]


@pytest.mark.parametrize(
    "damage",
    [
        cut,
        of_version_one,
        *map(
            rewritten,
            (
                stranger, lost_weight, unknown_part, odd_share, no_size, downloaded, huge, twice, few_scores, bomb,
                many_bombs, more_behind, layer_of_one_size, beyond_all_numbers, no_channels, other_channels,
                other_dimensions,
            ),
        ),
    ],
    ids=lambda damage: getattr(damage, "told", damage.__name__),
)  # fmt: skip
def test_a_damaged_kit_is_refused_whole(file, damage):
    with pytest.raises(StateError, match="kit"):
        kits.decode(damage(file))


def test_a_file_of_another_version_is_named(file, tmp_path):
    (tmp_path / "old.kit").write_bytes(of_version_one(file))
    with pytest.raises(StateError, match=r"^kit: .*old\.kit: is of version '1', this Talaria reads 2; make it again"):
        kits.open_kit(tmp_path / "old.kit")


def test_no_bytes_raise_anything_but_our_errors(file):
    rng = np.random.default_rng(0)
    for _ in range(200):
        data = bytearray(file)
        for at in rng.integers(0, 4000, 3):
            data[at] = rng.integers(0, 256)
        try:
            kits.decode(bytes(data))
        except TalariaError:
            continue


def test_graphs_beyond_the_limits_are_never_run(file):
    kit = kits.decode(file, Limits(nodes=2))
    with pytest.raises(WireError, match="operators"):
        kit.source.forward()
    look = kits.decode(file, Limits(multiply_adds=1000)).source.forward()
    with pytest.raises(TooLarge):
        look({"x": np.zeros((4, 6, 32), np.float32)}, kit.model)


def test_a_file_that_is_no_graph_is_refused(file):
    source = kits.decode(file).source
    with pytest.raises(WireError, match="program"):
        replace(source, files={**source.files, "forward": b"\x80\x04 a pickle"}).forward()
    assert isinstance(source, Given)


def test_a_device_with_a_kit_has_the_whole_models_mask_too(equipped):
    mask = device_task.mask_of(RUN, member(plan=HALF), None)
    assert {group: len(kept) for group, kept in mask.kept.items()} == dict(HALF.widths)
