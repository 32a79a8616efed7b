"""What the survey finds, what it refuses by name, and that torch-pruning removes the same channels."""

import copy

import pytest
import torch
from tolerance import roundings
from torch import Tensor, nn
from torch.nn import functional as F

from talaria import tensors
from talaria.model.compaction import compact, expand
from talaria.model.masks import ChannelMask, apply_dense
from talaria.model.prunability import layout, survey
from talaria.model.state import load, state_of


def test_compact_equals_torch_pruning(net, random_mask, removed_by_torch_pruning):
    model, x, found = net
    for seed in range(4):
        mask = random_mask(found, seed)
        reference = removed_by_torch_pruning(model, x, mask)
        small = compact(model, mask)
        assert tensors.equal(state_of(small), state_of(reference))
        with torch.no_grad():
            assert torch.equal(small.eval()(x), reference.eval()(x))


def assert_exact(model, mask, x):
    twin = copy.deepcopy(model)
    load(twin, apply_dense(state_of(model), mask))
    with torch.no_grad():
        assert roundings(compact(model, mask).eval()(x), twin.eval()(x)) <= 200


EXPECTED = {
    "residual": {"stem": 8, "conv1": 12, "down": 16},
    "squeeze_excite": {"conv": 16, "fc1": 6, "project": 10},
    "depthwise": {"expand": 12, "project": 8},
    "grouped": {"conv1": 4, "conv2": 6, "conv3": 8},
    "concat": {"a": 8, "b": 12, "c": 10, "d": 8},
    "flatten": {"conv1": 8, "conv2": 10, "fc": 16},
}


@pytest.mark.parametrize("kind", sorted(EXPECTED))
def test_every_channel_between_input_and_output_is_found(make_net, kind):
    assert dict(make_net(kind)[2].sizes) == EXPECTED[kind]


def test_axes_say_how_channels_lie(make_net):
    axes = make_net("grouped")[2].axes
    assert axes["conv2.weight"][0] == (("conv2", 1),) * 4
    assert axes["conv2.weight"][1] == (("conv1", 1),)
    assert make_net("flatten")[2].axes["fc.weight"] == ((("fc", 1),), (("conv2", 4),))
    assert make_net("concat")[2].axes["d.weight"][1] == (("c", 1), ("a", 1), ("b", 1))
    assert "head.bias" not in make_net("residual")[2].axes
    assert make_net("residual")[2].axes["head.weight"] == ((), (("down", 1),))


def test_the_model_is_left_as_it_was(make_net):
    model, x, _ = make_net("residual")
    model.train()
    model.stem.weight.requires_grad_(False)
    before = tensors.copied(state_of(model))
    layout(model, x)
    assert model.training
    assert all(m.training for m in model.modules())
    assert tensors.equal(before, state_of(model))
    assert not model.stem.weight.requires_grad
    assert model.head.weight.requires_grad
    assert not any(m._forward_hooks for m in model.modules())


def test_layout_is_the_same_every_time_and_without_gradients(make_net):
    model, x, first = make_net("concat")
    with torch.no_grad():
        assert layout(copy.deepcopy(model), x) == first


class _Tail(nn.Module):
    """A prunable beginning, and a middle that a subclass makes difficult."""

    def __init__(self):
        super().__init__()
        self.safe = nn.Conv2d(3, 8, 3, padding=1)
        self.odd = nn.Conv2d(8, 8, 3, padding=1)
        self.after = nn.Conv2d(8, 6, 1)
        self.head = nn.Linear(6, 3)

    def middle(self, x: Tensor) -> Tensor:
        raise AssertionError

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.safe(x))
        x = self.middle(x)
        return self.head(F.relu(self.after(x)).mean((2, 3)))


class _Softmax(_Tail):
    def middle(self, x):
        return self.odd(x).softmax(1)


class _Norm(_Tail):
    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(1, 8)

    def middle(self, x):
        return self.norm(self.odd(x))


class _FixedShape(_Tail):
    def middle(self, x):
        y = self.odd(x)
        return y.reshape(y.shape[0], 8, -1).cumsum(1).reshape(y.shape)


class _Constant(_Tail):
    def middle(self, x):
        return self.odd(x) + torch.linspace(0, 1, 8)[None, :, None, None]


class _Twice(_Tail):
    def middle(self, x):
        return self.odd(F.relu(self.odd(x)))


class _Tied(_Tail):
    def __init__(self):
        super().__init__()
        self.mirror = nn.Conv2d(8, 8, 3, padding=1)
        self.mirror.weight = self.odd.weight

    def middle(self, x):
        return self.odd(x) + self.mirror(x)


class _Parameter(_Tail):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(8, 1, 1))

    def middle(self, x):
        return self.odd(x) * self.scale


class _Shuffle(_Tail):
    def middle(self, x):
        y = self.odd(x)
        n, _, h, w = y.shape
        return y.view(n, 2, 4, h, w).transpose(1, 2).reshape(n, 8, h, w)


class _WeightNorm(_Tail):
    def __init__(self):
        super().__init__()
        torch.nn.utils.parametrizations.weight_norm(self.odd)

    def middle(self, x):
        return self.odd(x)


class _OwnDtype(_Tail):
    """Works in float32 only."""

    def middle(self, x):
        return F.conv2d(self.odd(x), torch.eye(8)[:, :, None, None].flip(0))


class _Dead(_Tail):
    def __init__(self):
        super().__init__()
        self.odd_twin = nn.Conv2d(8, 8, 1)

    def middle(self, x):
        return F.conv2d(x, self.odd.weight, padding=1)


@pytest.mark.parametrize(
    "make",
    [_Softmax, _Norm, _FixedShape, _Constant, _Twice, _Tied, _Parameter, _Shuffle, _WeightNorm, _OwnDtype, _Dead],
    ids=lambda c: c.__name__,
)
def test_what_is_unsafe_is_refused_by_name_and_the_rest_still_shrinks(make, random_mask):
    torch.manual_seed(0)
    model, x = make(), torch.randn(2, 3, 8, 8)
    found = survey(model, x)
    assert "odd" not in found.layout.sizes
    assert any("odd" in name or "norm" in name or "scale" in name for name in found.refused)
    assert found.layout.sizes["after"] == 6
    assert_exact(model, random_mask(found.layout, 1), x)


class _Halves(nn.Module):
    """``chunk`` cuts in the middle of what is left: right where both halves lost as many channels, else wrong."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3)
        self.after = nn.Conv2d(8, 6, 1)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        half = F.relu(self.conv(x)).chunk(2, 1)[0]
        return self.head(F.relu(self.after(half)).mean((2, 3)))


class _Even(_Tail):
    """Wrong for an odd number of channels alone: the others are not to blame."""

    def middle(self, x):
        y = self.odd(x)
        if y.shape[1] % 2:
            raise ValueError("an even number of channels, please")
        return y


def test_group_norm_loses_whole_groups_of_channels():
    """Of two that meet in a sum the larger groups; behind a concatenation those that do not lie over the border."""
    torch.manual_seed(0)

    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.first = nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16)
            self.two, self.last = nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(8, 16)
            self.left, self.right, self.both = nn.Conv2d(16, 8, 1), nn.Conv2d(16, 12, 1), nn.GroupNorm(5, 20)
            self.three, self.alone, self.head = nn.Conv2d(20, 6, 1), nn.GroupNorm(1, 6), nn.Linear(6, 4)

        def forward(self, x):
            x = self.first(self.one(x)).relu()
            x = (x + self.last(self.two(x))).relu()
            x = self.both(torch.cat([self.left(x), self.right(x)], 1)).relu()
            return self.head(self.alone(self.three(x)).mean((2, 3)))

    net = Residual().eval()
    found = survey(net, torch.randn(2, 3, 8, 8))
    assert dict(found.layout.sizes) == {"one": 4, "left": 2, "right": 3}
    assert found.layout.axes["two.weight"] == ((("one", 4),), (("one", 4),), (), ())
    assert "three" in found.refused
    kept = {"one": (0, 2, 3), "left": (1,), "right": (0, 2)}
    small = compact(net, ChannelMask(found.layout, kept))
    assert [(one.num_groups, one.num_channels) for one in (small.first, small.last, small.both)] == [
        (3, 12), (6, 12), (3, 12),
    ]  # fmt: skip


def test_what_is_exact_only_for_an_even_number_is_refused_alone():
    found = survey(_Even(), torch.randn(2, 3, 8, 8))
    assert dict(found.layout.sizes) == {"safe": 8, "after": 6}
    assert set(found.refused) == {"odd"}


def test_what_is_exact_only_where_equally_many_are_taken_out_is_refused(random_mask):
    torch.manual_seed(0)
    model, x = _Halves(), torch.randn(2, 3, 8, 8)
    found = survey(model, x)
    assert dict(found.layout.sizes) == {"after": 6}
    assert set(found.refused) == {"conv", "conv:2"}
    assert_exact(model, random_mask(found.layout, 1), x)


class _Circle(nn.Module):
    """Tracing takes the shuffle's reshape and the flattening for one another, and goes round in ever larger circles."""

    def __init__(self):
        super().__init__()
        self.safe = nn.Conv2d(3, 6, 3)
        self.odd = nn.Conv2d(6, 8, 1)
        self.head = nn.Linear(8 * 36, 3)

    def forward(self, x):
        y = self.odd(F.relu(self.safe(x)))
        n, _, h, w = y.shape
        return self.head(y.view(n, 2, 4, h, w).transpose(1, 2).reshape(n, 8, h, w).flatten(1))


def test_tracing_that_would_never_end_is_ended_and_the_rest_still_shrinks():
    found = survey(_Circle(), torch.randn(2, 3, 8, 8))
    assert dict(found.layout.sizes) == {"safe": 6}
    assert found.refused["odd"] == "reaches itself in a circle that tracing cannot follow"


class _OwnCell(nn.Module):
    """A cell written by hand over the raw input, beside convolutions."""

    def __init__(self):
        super().__init__()
        self.front = nn.Sequential(nn.Conv1d(3, 6, 3), nn.ReLU(), nn.Conv1d(6, 4, 3))
        self.cell = nn.Linear(3 + 5, 10)
        self.head = nn.Linear(4 + 5, 2)

    def forward(self, x):
        h = torch.zeros(len(x), 5, dtype=x.dtype)
        for t in range(x.size(2)):
            gate, new = self.cell(torch.cat([x[:, :, t], h], 1)).chunk(2, 1)
            h = h + torch.sigmoid(gate) * torch.tanh(new)
        return self.head(torch.cat([self.front(x).mean(-1), h], 1))


def test_a_cell_of_ones_own_is_left_whole_by_name_and_the_rest_still_shrinks():
    found = survey(_OwnCell(), torch.randn(2, 3, 24))
    assert "front.0" in found.layout.sizes
    assert "runs 24 times in one pass; " in found.refused["cell"]
    assert "nn.GRU" in found.refused["cell"]


class _Versioned(_Tail):
    """Like torchvision's MNASNet: a state without the version that it was saved with is not taken."""

    _version = 2

    def middle(self, x):
        return self.odd(x)

    def _load_from_state_dict(self, state, prefix, metadata, *rest):
        if metadata.get("version") is None:
            raise ValueError("version should be set")
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def test_a_network_that_asks_for_the_version_of_its_state_is_pruned_and_expanded(random_mask):
    model = _Versioned()
    found = survey(model, torch.randn(2, 3, 8, 8))
    assert dict(found.layout.sizes) == {"safe": 8, "odd": 8, "after": 6}
    assert not found.refused
    mask = random_mask(found.layout, 1)
    back = expand(compact(model, mask), mask, like=model)
    assert tensors.equal(state_of(back), state_of(model))


class _Branches(nn.Module):
    """Control flow that depends on values cannot be told from one trace; it must not break the survey."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(3, 8, 3)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        y = self.conv(x)
        if y.shape[1] != 8:
            raise ValueError("expected 8 channels")
        return self.head(y.mean(2))


def test_a_fixed_channel_count_is_found_by_running():
    found = survey(_Branches(), torch.randn(2, 3, 8))
    assert found.layout.sizes == {}
    assert "expected 8 channels" in found.refused["conv"]


@pytest.mark.parametrize("wide", [3, 4, 5])
def test_few_channels_that_are_read_beside_each_other_stay_whole(wide):
    """Those that are tried are no neighbours, for which a smaller copy computes the same."""
    net = nn.Sequential(nn.Conv1d(3, wide, 3), nn.LocalResponseNorm(2, 0.1), nn.Flatten(), nn.Linear(6 * wide, 2))
    found = survey(net, torch.randn(2, 3, 8))
    assert found.layout.sizes == {}
    assert "something else" in found.refused["0"]


class _Helped(nn.Module):
    """A head of its own in training, as deep networks are helped to learn."""

    def __init__(self):
        super().__init__()
        self.conv, self.other, self.help, self.head = (
            nn.Conv1d(3, 8, 3),
            nn.Conv1d(8, 6, 1),
            nn.Linear(8, 2),
            nn.Linear(6, 2),
        )

    def forward(self, x):
        y = self.conv(x)
        found = self.head(self.other(y).relu().mean(2))
        return found + self.help(y.mean(2)) if self.training else found


def test_what_only_the_pass_in_training_reads_stays_whole():
    found = survey(_Helped(), torch.randn(2, 3, 8))
    assert list(found.layout.sizes) == ["other"]
    assert "cannot be trained when channels are taken out" in found.refused["conv"]


class _Untraceable(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        return torch.from_numpy(self.head(x).detach().numpy())


def test_a_model_that_cannot_be_traced_stays_usable_unpruned():
    model = _Untraceable()
    found = survey(model, torch.randn(2, 3))
    assert found.layout.sizes == {}
    assert tensors.equal(state_of(compact(model, found.layout.full())), state_of(model))


def test_an_input_that_does_not_fit_gives_a_reason_not_a_crash():
    found = survey(_Branches(), torch.randn(2, 5, 8))
    assert found.layout.sizes == {}
    assert "cannot be traced" in found.refused["_Branches"]


class _Dictionary(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(3, 8, 3)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        features = F.relu(self.conv(x)).mean(2)
        return self.head(features), features


def test_features_that_are_an_output_are_not_pruned():
    assert survey(_Dictionary(), torch.randn(2, 3, 8)).layout.sizes == {}


class _FirstDepthwise(nn.Module):
    def __init__(self):
        super().__init__()
        self.depth = nn.Conv1d(4, 4, 3, groups=4)
        self.mix = nn.Conv1d(4, 8, 1)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.mix(self.depth(x)).mean(2))


def test_the_input_is_never_pruned():
    found = survey(_FirstDepthwise(), torch.randn(2, 4, 8))
    assert dict(found.layout.sizes) == {"mix": 8}
    assert "depth" in found.refused


class _Plain(nn.Module):
    """Without biases, a blank input would give a blank output for any layout."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(3, 8, 3, bias=False)
        self.head = nn.Linear(8, 2, bias=False)

    def forward(self, x):
        return self.head(self.conv(x).softmax(1).mean(2) * 0 + self.conv.weight.mean() * 0)


@pytest.mark.parametrize("learned", [False, True])
def test_behind_a_logarithm_of_energies_channels_go(learned, random_mask):
    """Weights drawn at random, by which a layout is checked, have no logarithm there."""
    torch.manual_seed(0)

    class Heard(nn.Module):
        def __init__(self):
            super().__init__()
            self.bank = nn.Parameter(torch.rand(6, 9)) if learned else nn.Buffer(torch.rand(6, 9))
            self.one, self.two, self.head = nn.Conv1d(6, 8, 3), nn.Conv1d(8, 12, 3), nn.Linear(12, 3)

        def forward(self, x):
            x = torch.log(self.bank @ x.square() + 1e-5)
            return self.head(self.two(self.one(x).relu()).relu().mean(2))

    model, x = Heard(), torch.randn(2, 9, 12)
    found = survey(model, x)
    assert (found.layout.sizes, found.refused) == ({"one": 8, "two": 12}, {})
    assert_exact(model, random_mask(found.layout, 1), x)


def test_a_model_of_zeros_proves_nothing_and_is_refused():
    found = survey(_Plain(), torch.randn(2, 3, 8))
    assert found.layout.sizes == {}
    assert any("zeros" in reason for reason in found.refused.values())


def test_a_blank_example_finds_the_same_layout(make_net):
    model, x, want = make_net("squeeze_excite")
    assert layout(model, torch.zeros_like(x)) == want
