"""More ordinary networks: one step is torch's, a mask's program is its compact twin's, and both engines learn alike."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from networks import networks
from tolerance import roundings

import talaria
from talaria.data import Client, Federated
from talaria.errors import ModelError
from talaria.model import pruning, zoo
from talaria.model.compaction import gather
from talaria.model.state import state_of
from talaria.programs import differentiate, reference, vector
from talaria.programs.build import build
from talaria.programs.engine import ProgramEngine
from talaria.programs.graph import size_of
from talaria.programs.making import Maker
from talaria.programs.program import Program
from talaria.training import loop
from talaria.training.taps import Taps
from talaria.types import Recipe, Samples

NETS = {
    name: net
    for file in ("ordinary", "before", "walked", "ranked", "framed", "changed")
    for name, net in networks(file).NETS.items()
}

STEPS = 8


def samples(shape, seed, count=12):
    """Maps and sequences of numbers; of one dimension, words."""
    rng = np.random.default_rng(seed)
    numbers = rng.standard_normal((count, *shape), np.float32)
    words = rng.integers(0, 3, (count, *shape)).astype(np.float32)
    return Samples(numbers if len(shape) > 1 else words, np.arange(count) % 4)


def learned(shape, net, engine):
    """What two rounds of two steps each come to; a small rate, so that both engines' roundings stay roundings."""
    clients = {n: Client(*(samples(shape, 3 * i + j) for j in range(3))) for i, n in enumerate(("anna", "ben"))}
    fleet = Federated("mine", clients, tuple("abcd"), shape)
    recipe = {"epochs": 1, "batch": 6, "lr": 0.01}
    return talaria.simulate("fedper", fleet, net, rounds=2, recipe=recipe, engine=engine).learned


def made(name):
    torch.manual_seed(0)
    shape, make = NETS[name]
    return shape, make()


@pytest.mark.parametrize("name", NETS)
def test_it_learns_alike_on_both_engines(name):
    shape, net = made(name)
    found, wanted = (learned(shape, net, engine) for engine in ("onnx", "torch"))
    most = STEPS * max(math.prod(p.shape[1:]) * 100 for p in net.parameters() if p.dim() > 1)
    for mine, theirs in (
        (found.shared, wanted.shared),
        *((found.private[n], wanted.private[n]) for n in found.private),
    ):
        assert list(mine) == list(theirs)
        for key, value in theirs.items():
            scale = max(1.0, float(np.abs(value).max(initial=0)))
            assert roundings(mine[key], value, scale=scale) <= most, key


@pytest.mark.parametrize("name", NETS)
def test_what_a_mask_leaves_steps_and_answers_as_its_compact_twin(name):
    """Where the survey finds nothing to take, the whole network does."""
    shape, net = made(name)
    spec = zoo.keep(net, shape, 4)
    layout = zoo.layout(spec)
    mask = pruning.choose(pruning.importance(net, layout), layout.full(), keep=0.5, block=1)
    module, weights = pruning.compact(net, mask), gather(state_of(net), mask)
    program, given = Program(build(spec)), samples(shape, 5, 6)
    kept = {group: len(kept) * layout.spans[group] for group, kept in mask.kept.items()}
    sizes = {**program.manifest.sizes, "N": 6} | kept
    draws = {
        port.name.removeprefix("draw/"): np.ones([size_of(one, sizes) for one in port.shape], np.float32)
        for port in program.graph.inputs
        if port.name.startswith("draw/")
    }
    y = given.y.astype(np.int64)
    state, _, _ = program.step(weights, program.momentum(weights), given.x, y, lr=0.05, draws=draws)
    feed = {"x": given.x, "y": y, "lr": np.array(0.05, np.float32)}
    feed |= {f"weight/{k}": v for k, v in weights.items()} | {f"draw/{k}": v for k, v in draws.items()}
    feed |= {f"momentum/{k}": v for k, v in program.momentum(weights).items()}
    exact, plain = (reference.step(module, Recipe(), None, feed, kind) for kind in (torch.float64, torch.float32))
    found = {f"next/weight/{k}": state[k] for k in weights if f"next/weight/{k}" in exact}
    exact, plain = ({k: one[k] for k in found} for one in (exact, plain))
    assert vector.distance(found, exact) <= 4 * vector.distance(plain, exact) + 2**-23
    with torch.no_grad():
        wanted = module.eval()(torch.from_numpy(given.x)).numpy()
    assert roundings(Maker(spec).forward().held(weights, given.x)({"x": given.x}, weights)["features"], wanted) <= 1000


@pytest.mark.parametrize(
    "name",
    [
        "attention pool by layer",
        "twins by norm",
        "twins by towards",
        "twins by squeezed",
        "bounds, clamped",
        "bounds, chosen",
        "bounds, mixed",
        "bounds, multiplied",
        "local responses",
        "words picked",
        "words gathered",
        "packed, cells",
        "begun, sample",
        "k-max",
        "sums",
        "frames, gru",
    ],
)
def test_it_is_differentiated_twice(name):
    """Its making measures it against float64."""
    shape, net = made(name)
    assert differentiate.curved(zoo.keep(net, shape, 4))


def test_of_values_that_are_all_the_same_a_deviation_learns_nothing():
    """Their mean may round: what is then off it is no direction to learn in."""
    torch.manual_seed(0)
    net = networks("ranked").Ranked("deviation")
    program, weights, flat = Program(build(zoo.keep(net, (3, 12), 4))), state_of(net), np.zeros((6, 3, 12), np.float32)
    state, _, _ = program.step(weights, program.momentum(weights), flat, np.arange(6) % 4, lr=0.5)
    assert np.array_equal(state["conv.bias"], weights["conv.bias"])


def test_what_is_cut_off_is_not_differentiated_twice():
    shape, net = made("bounds, quantized")
    with pytest.raises(ModelError, match="'detach' lets nothing be learned of a map"):
        differentiate.curved(zoo.keep(net, shape, 4))


def test_of_packed_states_no_mean_is_looked_at():
    shape, net = made("packed, summed")
    with pytest.raises(ModelError, match="'rnn' gives a packed sequence, of which no mean is taken"):
        differentiate.packed(zoo.keep(net, shape, 4), None, ("logits", "mean rnn"))


def test_of_parts_of_a_sample_the_mean_is_looked_at():
    """Where they are merged with the batch as where they stand behind it: the derivative is measured against torch."""
    for name, layer in (("video, gated", "conv1"), ("frames, mean", "conv"), ("merged, gru", "each.module.0")):
        shape, net = made(name)
        assert differentiate.packed(zoo.keep(net, shape, 4), None, ("logits", f"mean {layer}"))


def test_what_enters_a_layer_one_part_after_the_other_is_looked_at_by_neither_engine():
    shape, net = made("frames, logits")
    with pytest.raises(ModelError, match="'head' reads several parts of each sample"):
        differentiate.packed(zoo.keep(net, shape, 4), None, ("logits", "into head"))
    with pytest.raises(ModelError, match="'head' reads several parts of each sample"), Taps(net, ("into head",)):
        net(torch.zeros(2, *shape))


def test_where_a_head_reads_parts_no_features_are_kept():
    """Of the engines' two ways of keeping them: what passes the frozen layers there is no sample's alone."""
    shape, net = made("frames, logits")
    clients = {n: Client(*(samples(shape, 3 * i + j) for j in range(3))) for i, n in enumerate(("anna", "ben"))}
    fleet, recipe = Federated("mine", clients, tuple("abcd"), shape), {"epochs": 2, "batch": 6, "lr": 0.01}
    found, wanted = (
        talaria.simulate("fedrep", fleet, net, rounds=1, recipe=recipe, engine=engine).learned.shared
        for engine in ("onnx", "torch")
    )
    assert all(roundings(found[key], value, scale=1.0) <= 1000 for key, value in wanted.items())


def test_a_normalization_that_no_pass_calls_has_no_statistics_to_estimate():
    shape, net = made("frames, channels")
    x = samples(shape, 0).x
    assert Maker(zoo.keep(net, shape, 4)).calibration()({"x": x, "rate": np.float32(1)}, state_of(net)) == {}


@pytest.mark.parametrize("name", ["one block for both", "one block for both, means"])
def test_statistics_are_estimated_anew_of_every_call(name):
    shape, net = made(name)
    task = SimpleNamespace(model=net, train=samples(shape, 0), still=frozenset())
    engine = ProgramEngine(zoo.keep(net, shape, 4))
    found, wanted = (one.calibrate(task, state_of(net), batch=4) for one in (engine, loop))
    assert int(wanted["block.1.num_batches_tracked"]) == 6
    assert all(roundings(found[key], value, scale=1.0) <= 100 for key, value in wanted.items())


class Bands(torch.nn.Module):
    """The logarithm of what learned bands find."""

    def __init__(self):
        super().__init__()
        self.bank, self.head = torch.nn.Conv1d(3, 8, 1, bias=False), torch.nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.bank(x * x).log().mean(2))


def test_a_network_that_gives_no_numbers_at_weights_drawn_at_random_is_refused_with_the_mend():
    with pytest.raises(ModelError, match=r"no finite numbers, as a logarithm .* keep what enters it above zero"):
        build(zoo.keep(Bands(), (3, 12), 4))


class Changed(torch.nn.Module):
    """A map that is changed in place in a way that is not known."""

    def __init__(self, do):
        super().__init__()
        self.conv, self.head, self.do = torch.nn.Conv1d(3, 8, 3, padding=1), torch.nn.Linear(8, 4), do

    def forward(self, x):
        return self.head(self.do(self.conv(x)))


def a_piece_of_what_is_read(x):
    y = x.clone()
    y[:, 0].add_(1.0)
    return y.amax(2)


def what_a_piece_is_of(x):
    y = x * 2
    first = y[:, :, 0]
    y.add_(1.0)
    return first + y.mean(2)


def by_a_mask_of_values(x):
    y = x.clone()
    y[y < 0] = x.mean()
    return y.mean(2)


def some_places(x):
    out = torch.empty(len(x), 3, 8)
    out[:, 0] = x.mean(2)
    return out.sum(1)


def every_other(x):
    y = x.clone()
    y[:, :, ::2] = 0.0
    return y.mean(2)


@pytest.mark.parametrize(
    ("do", "said"),
    [
        (
            a_piece_of_what_is_read,
            "'getitem' is read by 'amax' after a part of it, or what it is a part of, is changed",
        ),
        (
            what_a_piece_is_of,
            "'mul' is read by 'add_1' after a part of it, or what it is a part of, is changed in place",
        ),
        (by_a_mask_of_values, "'setitem' puts values where a mask is; use torch.where of a mask and two maps"),
        (some_places, "'setitem' leaves places of a tensor without a value; begin with torch.zeros"),
        (every_other, "'setitem' puts values at .*; name neighbouring places behind the batch"),
        (
            lambda x: torch.sigmoid(x).mul_(2).mean(2),
            "torch does not train this model .*modified by an inplace operation",
        ),
    ],
)
def test_what_is_changed_in_place_in_another_way_is_refused(do, said):
    with pytest.raises(ModelError, match=said):
        build(zoo.keep(Changed(do), (3, 12), 4))


class Merged(torch.nn.Module):
    """A sequence before the batch, of which something is asked that is not known."""

    def __init__(self, do):
        super().__init__()
        self.gru, self.head, self.do = torch.nn.GRU(3, 8, batch_first=True), torch.nn.Linear(8, 4), do
        self.embed = torch.nn.Linear(3, 8)

    def forward(self, x):
        return self.head(self.do(self, x.permute(2, 0, 1)))


@pytest.mark.parametrize(
    ("do", "said"),
    [
        (lambda own, x: own.embed(x).flatten(0, 1).view(12, -1, 8)[0], "'flatten' does flatten a sequence that stands"),
        (lambda own, x: own.gru(x)[0][-1], "'gru' reads with batch_first=True a sequence that stands before the batch"),
        (lambda own, x: own.embed(x)[:, :2].mean((0, 1), keepdim=True)[0], "'getitem.*' takes .* before the batch"),
    ],
)
def test_what_is_not_known_of_a_sequence_before_the_batch_is_refused(do, said, monkeypatch):
    monkeypatch.setattr("talaria.model.answers.require", lambda *_: None)
    with pytest.raises(ModelError, match=said):
        build(zoo.keep(Merged(do), (3, 12), 4))
