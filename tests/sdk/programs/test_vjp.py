"""A model's derivative as a graph is torch's: at every tap, layer by layer, under masks, and of what trains alone."""

import copy
import importlib.util
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from tolerance import roundings
from torch import nn
from torch.nn import functional as F

from talaria.errors import ModelError, TooLarge, WireError
from talaria.model import pruning, tokens, zoo
from talaria.model.batch_norm import lone_sample_in_eval
from talaria.model.compaction import gather
from talaria.model.spec import ModelSpec
from talaria.model.state import load, state_of
from talaria.programs import differentiate, onnx_file, vector
from talaria.programs import manifest as manifests
from talaria.programs.shapes import Limits
from talaria.programs.vjp import Vjp
from talaria.training import loop
from talaria.training.taps import Taps

_nets = importlib.util.spec_from_file_location("talaria_program_nets", Path(__file__).with_name("nets.py"))
nets = importlib.util.module_from_spec(_nets)
_nets.loader.exec_module(nets)

DEEP = ("logits", "mean bn2", "mean conv3", "into head")


def derivative(spec, only=None, taps=("logits",), **options):
    whole = partial(zoo.whole, spec)
    graph = differentiate.graph_of(zoo.build(spec), zoo.head(spec), spec.input_shape, only, taps, whole=whole)
    return Vjp(graph, **options)


def by_torch(module, only, taps, x, slopes, dtype):
    """Taps, gradients and statistics by autograd."""
    own = copy.deepcopy(module).to(dtype)
    trained = loop.freeze_but(own, only)
    with Taps(own, taps) as opened, lone_sample_in_eval(own, len(x)):
        own(torch.from_numpy(x).to(dtype))
    seen = opened.seen
    reached = [tap for tap in slopes if seen[tap].requires_grad]
    torch.autograd.backward([seen[t] for t in reached], [torch.from_numpy(slopes[t]).to(dtype) for t in reached])
    gradients = {k: p.grad for k, p in trained.items() if p.grad is not None}
    return {t: v.detach() for t, v in seen.items()}, gradients, state_of(own)


def assert_is_torchs(vjp, module, only, taps, x):
    """What is seen, the gradients and the statistics err about as little as torch's own do in float32."""
    state, rng = state_of(module), np.random.default_rng(1)
    done = vjp.forward(state, x)
    slopes = {tap: rng.standard_normal(value.shape).astype(np.float32) for tap, value in done.taps.items()}
    found = done.backward(slopes)
    plain = by_torch(module, only, taps, x, slopes, torch.float32)
    exact = by_torch(module, only, taps, x, slopes, torch.float64)
    assert found.keys() == plain[1].keys()
    for mine, theirs, truth in zip((done.taps, found, done.moved), plain, exact, strict=True):
        for key, value in mine.items():
            scale = max(1e-3, float(np.abs(np.asarray(truth[key])).max()))
            wanted = np.asarray(truth[key]).astype(value.dtype)
            allowed = 4 * roundings(theirs[key], wanted, scale) + 64
            assert roundings(value, wanted, scale) <= allowed, key


@pytest.mark.parametrize("name", [name for name in nets.NETS if not name.startswith(("dropout", "stochastic"))])
def test_each_layer_goes_forward_and_back_as_torch_does(name):
    shape, make = nets.NETS[name]
    torch.manual_seed(0)
    spec = zoo.keep(make(), shape, 4)
    x = np.random.default_rng(0).standard_normal((5, *shape), np.float32)
    if tokens.vocabulary(zoo.build(spec)):
        x = tokens.example(zoo.build(spec), shape, 5).numpy()
    assert_is_torchs(derivative(spec), zoo.build(spec), None, ("logits",), x)


@pytest.mark.parametrize(
    ("part", "keep", "count"), [(None, 0.5, 1), (None, 0.5, 7), ("body", 1.0, 2), ("head", 0.5, 7)]
)
def test_one_graph_serves_every_tap_mask_and_batch(spec_of, part, keep, count):
    spec = spec_of("imu_cnn")
    dense = zoo.build(spec)
    mask = pruning.choose(pruning.importance(dense, zoo.layout(spec)), zoo.layout(spec).full(), keep=keep)
    module = load(pruning.compact(dense, mask), gather(state_of(dense), mask))
    only = None if part is None else zoo.split(spec, dense).of(part)
    x = np.random.default_rng(0).standard_normal((count, *spec.input_shape), np.float32)
    assert_is_torchs(derivative(spec, only, DEEP), module, only, DEEP, x)


def test_a_look_is_in_eval_mode_and_has_no_way_back(spec_of):
    spec, module = spec_of("imu_cnn"), zoo.build(spec_of("imu_cnn")).eval()
    x = np.random.default_rng(0).standard_normal((3, *spec.input_shape), np.float32)
    done = derivative(spec, (), DEEP).forward(state_of(module), x)
    with Taps(module, DEEP) as opened, torch.no_grad():
        module(torch.from_numpy(x))
    assert roundings(done.taps, {tap: value.numpy() for tap, value in opened.seen.items()}) <= 1000
    assert done.moved == {}
    assert done.backward({}) == {}


def test_what_lies_above_the_taps_is_not_asked_for(spec_of):
    spec = spec_of("imu_cnn")
    vjp, state = derivative(spec, None, ("into head",)), state_of(zoo.build(spec))
    below = {key: value for key, value in state.items() if not key.startswith("head")}
    done = vjp.forward(below, np.zeros((2, *spec.input_shape), np.float32))
    assert done.taps["into head"].shape == (2, state["head.weight"].shape[1])
    assert {*done.backward(done.taps)} | {*done.moved} == {*below}


@pytest.mark.parametrize(("net", "tap"), [("Listed", "blocks"), ("Recurrent", "gru"), ("Attentive", "layer")])
def test_means_of_sequences_and_of_lists_of_modules_are_torchs(net, tap):
    """Packing measures them beside torch, forward and back."""
    spec = ModelSpec(f"mypkg.nets:{net}", (3, 16), 3)
    found = Vjp.read(differentiate.packed(spec, None, ("logits", f"mean {tap}")))
    done = found.forward(state_of(zoo.build(spec)), np.zeros((2, 3, 16), np.float32))
    assert done.taps[f"mean {tap}"].shape == (2, 12 if net == "Recurrent" else 16)


class Called(nn.Module):
    """A convolution, a function of what it sees, and a head on what is left of it on average."""

    def __init__(self, function, flat):
        super().__init__()
        self.function, self.conv = function, (nn.Conv1d if flat else nn.Conv2d)(3, 8, 3, padding=1)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(torch.flatten(self.function(torch.relu(self.conv(x))), 2).mean(-1))


@pytest.mark.parametrize(
    ("function", "flat"),
    [
        (lambda x: F.max_pool1d(x, 2), True),
        (lambda x: F.max_pool2d(x, 2), False),
        (lambda x: F.max_pool2d(x, kernel_size=3, stride=2, padding=1), False),
        (lambda x: F.avg_pool1d(x, 2), True),
        (lambda x: F.avg_pool2d(x, 3, 2, 1, False, False), False),
        (lambda x: F.adaptive_avg_pool1d(x, 4), True),
        (lambda x: F.adaptive_avg_pool2d(x, (2, 2)), False),
        (lambda x: F.adaptive_max_pool1d(x, 1), True),
        (lambda x: F.adaptive_max_pool2d(x, 1), False),
        (lambda x: x.flatten(start_dim=-2), False),
    ],
)
def test_functions_that_pool_and_flatten_are_torchs(function, flat):
    """Packing measures them beside torch, forward and back."""
    torch.manual_seed(0)
    shape = (3, 16) if flat else (3, 8, 8)
    spec = zoo.keep(Called(function, flat), shape, 3, "head")
    found = Vjp.read(differentiate.packed(spec, None, ("logits",)))
    assert found.forward(state_of(zoo.build(spec)), np.zeros((2, *shape), np.float32)).taps["logits"].shape == (2, 3)


@pytest.mark.parametrize("pool", [F.max_pool2d, F.adaptive_max_pool2d])
def test_a_function_that_gives_places_is_refused(pool):
    spec = zoo.keep(Called(lambda x: pool(x, 2, return_indices=True)[0], False), (3, 8, 8), 3, "head")
    with pytest.raises(ModelError, match=r"pool2d|places"):
        differentiate.packed(spec, None, ("logits",))


@pytest.mark.parametrize(
    ("make", "tap"),
    [
        (lambda: nets.Recent("out", 2), "mean gru"),
        (lambda: nets.BothWays(nn.LSTM, "ends"), "mean rnn"),
        (lambda: nets.BothWays(nn.GRU, "pieces", num_layers=2), "mean rnn"),
    ],
)
def test_the_mean_state_is_seen_of_a_network_that_reads_the_last_ones(make, tap):
    torch.manual_seed(0)
    spec = zoo.keep(make(), (3, 6), 4)
    x, taps = np.random.default_rng(0).standard_normal((5, 3, 6), np.float32), ("logits", tap)
    assert_is_torchs(derivative(spec, None, taps), zoo.build(spec), None, taps, x)


def test_what_does_not_fit_is_refused_by_name(spec_of):
    spec = spec_of("mlp")
    state, x = state_of(zoo.build(spec)), np.zeros((4, *spec.input_shape), np.float32)
    with pytest.raises(ModelError, match="layer 'nosuch' is looked at, but no pass calls it"):
        derivative(spec, None, ("mean nosuch",))
    with pytest.raises(ModelError, match="'fc2'"):
        derivative(spec, None, ("fc2",))
    vjp = derivative(spec)
    with pytest.raises(ModelError, match=r"fc1.bias"):
        vjp.forward({key: value for key, value in state.items() if key != "fc1.bias"}, x)
    with pytest.raises(WireError):
        vjp.forward(state, x[:, :3])
    with pytest.raises(ModelError, match="slope/logits"):
        vjp.forward(state, x).backward({})
    with pytest.raises(TooLarge, match="smaller batch"):
        derivative(spec, limits=Limits(memory_bytes=10_000)).forward(state, x)


def test_a_derivative_is_a_small_file_that_says_what_comes_out(spec_of, program_of):
    spec = spec_of("imu_cnn")
    data = differentiate.packed(spec, None, DEEP)
    assert data == differentiate.packed(spec, None, DEEP)
    assert len(data) <= 25_000
    graph, note = onnx_file.read(data)
    facts = manifests.read(note)
    found = vector.projections(Vjp.read(data).run(vector.inputs(graph, facts)))
    assert {*found} == {"gradient", "tap", "weight"}
    assert vector.deviation(found, facts.expected) <= 4 * facts.allowed
    with pytest.raises(WireError, match="those of a derivative"):
        Vjp.read(program_of("mlp"))
    with pytest.raises(TooLarge, match="file_bytes"):
        Vjp.read(data, Limits(file_bytes=1000))
    with pytest.raises(TooLarge, match="operators"):
        Vjp.read(data, Limits(nodes=10))
    with pytest.raises(TooLarge, match="smaller batch"):
        Vjp.read(data, Limits(memory_bytes=10_000))
    for broken in (data[:-1], data[:2000] + data[2001:], onnx_file.write(graph, "")):
        with pytest.raises(WireError):
            Vjp.read(broken)


TWICE = (
    "batch_norm", "conv2d_large", "depthwise", "max_pool_overlapping", "average_pool", "residual", "stochastic_depth",
    "layer_norm", "softmax", "attention_written", "gru_only", "ReLU6", "GELU", "Hardswish", "padded", "weighed",
    "beside", "logs", "gains", "cosine", "scaled", "rms_norm", "layer_norm_of_maps", "weight_norm", "ranged",
    "weight_norm_of_planes",
    "beside", "resized", "strided", "rnn_both_out", "attention_learned", "einsum", "group_norm_by_function",
    "instance_norm_by_function", "extremes", "nearest", "reckoned", "kernels", "equalized", "tokens", "chosen",
    "ordered", "swin", "GRUCell_learned", "LSTMCell_new", "RNNCell_none",
    "adaptive_wide", "attention_across padded", "adaptive_max_uneven", "bowed", "attention", "attention_fused",
)  # fmt: skip


@pytest.mark.parametrize("name", TWICE)
def test_a_derivatives_derivative_is_torchs(name):
    """Its making measures it against float64: no worse than twice torch's own error."""
    shape, make = nets.NETS[name]
    torch.manual_seed(0)
    graph, note = onnx_file.read(differentiate.curved(zoo.keep(make(), shape, 4)))
    assert {port.name for port in graph.outputs} >= {"tap/along/logits", "gradient/along/head.weight"}
    assert manifests.read(note).parity["program"] <= manifests.read(note).allowed


def test_a_deviation_of_zeros_is_not_differentiated_twice():
    torch.manual_seed(0)
    with pytest.raises(
        ModelError, match=r"no finite numbers here, as of a root or a norm of zeros .*add a small number"
    ):
        differentiate.curved(zoo.keep(nets.Spoken(), nets.LINE, 4))


def test_what_torch_does_not_differentiate_twice_is_refused():
    with pytest.raises(ModelError, match="differences instead"):
        differentiate.curved(zoo.keep(nets.NETS["Hardsigmoid"][1](), nets.LINE, 4))
