"""What no program can hold is refused by its name, with what to write instead."""

import importlib.util
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import orthogonal, spectral_norm

from talaria.errors import ConfigError, ModelError
from talaria.model import zoo
from talaria.model.spec import ModelSpec
from talaria.programs.build import build
from talaria.programs.making import Maker
from talaria.programs.step import answers_of
from talaria.types import Recipe

_nets = importlib.util.spec_from_file_location("talaria_program_nets", Path(__file__).with_name("nets.py"))
nets = importlib.util.module_from_spec(_nets)
_nets.loader.exec_module(nets)


def first():
    return nn.Conv1d(3, 3, 1)


class Odd(nn.Module):
    def __init__(self, do) -> None:
        super().__init__()
        self.first, self.flatten, self.head, self.do = first(), nn.Flatten(), nn.Linear(36, 4), do

    def forward(self, x):
        return self.head(self.flatten(self.do(self.first(x))))


class Cross(nn.Module):
    def __init__(self, **options) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, **options)

    def forward(self, x):
        return self.attention(x, x[..., : self.attention.kdim], x)[0]


class Masked(Cross):
    def __init__(self, mask=None) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, x):
        return self.attention(x, x, x, attn_mask=x if self.mask is None else self.mask)[0]


class Tabled(nn.Module):
    def __init__(self, do) -> None:
        super().__init__()
        self.first, self.head, self.do = first(), nn.Linear(36, 4), do
        self.register_buffer("table", torch.ones(3, 12))

    def forward(self, x):
        return self.head(self.do(self.first(x), self.table).flatten(1))


class Hidden(Cross):
    def forward(self, x):
        return self.attention(x, x, x, key_padding_mask=x[:, :, 0])[0]


class Projected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(12, 4, batch_first=True, proj_size=2), nn.Linear(2, 4)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


class Gru(nn.Module):
    def __init__(self, first=False, take=0, batch_first=True, **options) -> None:
        super().__init__()
        self.gru = nn.GRU(12, 4, batch_first=batch_first, **options)
        self.head = nn.Linear(8 if self.gru.bidirectional else 4, 4)
        self.first, self.take = first, take

    def forward(self, x):
        found = self.gru(x, x) if self.first else self.gru(x)
        return self.head(found[self.take].mean(1))


class Normed(nn.Module):
    """A layer whose weight follows each call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = spectral_norm(nn.Linear(12, 12)), nn.Linear(36, 4)

    def forward(self, x):
        return self.head(self.layer(torch.relu(self.layer(x))).flatten(1))


class Packed(Gru):
    """Packed by lengths of which some are shorter, or none is, and averaged over the longest."""

    def __init__(self, unsorted, whole, **options) -> None:
        super().__init__()
        self.unsorted, self.least, self.options = unsorted, 3 if whole else 1, options

    def forward(self, x):
        many = (x[:, :, 0] > 0).sum(1).clamp(min=self.least).cpu()
        out, _ = self.gru(nn.utils.rnn.pack_padded_sequence(x, many, True, self.unsorted is False))
        return self.head(nn.utils.rnn.pad_packed_sequence(out, batch_first=True, **self.options)[0].mean(1))


class Worded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(3, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.head(self.words(x.abs().clamp(0, 2).long()).mean((1, 2)))


class Placed(nn.Module):
    def __init__(self, many) -> None:
        super().__init__()
        self.places = nn.Embedding(many, 12)

    def forward(self, x):
        return x + self.places(torch.arange(3 + x.size(1)))


class Twice(nn.Module):
    """A layer under two names, of which its pass takes both."""

    def __init__(self) -> None:
        super().__init__()
        self.first = first()
        self.layers, self.head = nn.Sequential(self.first, nn.ReLU(), nn.Flatten()), nn.Linear(36, 4)

    def forward(self, x):
        return self.head(self.layers(x) + self.first(x).flatten(1))


class Owning(Odd):
    """With a parameter of its own."""

    def __init__(self, do) -> None:
        super().__init__(do)
        self.own = nn.Parameter(torch.ones(12, 12))

    def forward(self, x):
        return self.head(self.flatten(self.do(self.first(x), self.own)))


def drop_path(x):
    """Branches that are left out, as image networks copy it."""
    shape = (x.shape[0],) + (1,) * (x.ndim - 1)
    return x * x.new_empty(shape).bernoulli_(0.9).div_(0.9)


def stochastic_depth(x):
    from torchvision.ops import stochastic_depth

    return stochastic_depth(x, 0.1, "row")


def late(x):
    y = x * 2
    return y if x.sum() > 0 else x


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Projected, "proj_size=2"),
        (
            lambda: nets.maps(orthogonal(first()), wide=36),
            "ParametrizedConv1d.*use weight_norm or spectral_norm, of the weight of Conv1d",
        ),
        (lambda: nets.maps(spectral_norm(first(), dim=1), wide=36), "'0' is normed along dimension 1; norm it along"),
        (Normed, "'layer' norms its weight anew in each of several calls; call it once"),
        (
            lambda: nets.maps(nets.lengthened(nn.LayerNorm(12), None), wide=36),
            "ParametrizedLayerNorm.*use weight_norm or",
        ),
        (lambda: nets.maps(first(), nn.RReLU(), wide=36), "'1' is a RReLU"),
        (lambda: nets.maps(nn.ConvTranspose1d(3, 3, 3, dilation=2), wide=48), "dilation"),
        (lambda: nets.maps(nn.ConvTranspose1d(3, 3, 2, 3), wide=105), "no tap meets"),
        (lambda: nets.maps(first(), nn.MaxPool1d(3, dilation=2), wide=24), "dilation"),
        (lambda: Odd(lambda x: nn.functional.pad(x, (0, 0, -1, 1))), "a mask may narrow; .* cut nothing"),
        (lambda: Odd(lambda x: nn.functional.pad(x, (0, 0, 0, 0, 1, 0))), "none for the batch"),
        (lambda: Odd(lambda x: 2**x), "takes a map as an exponent; write 2 .. x as torch.exp"),
        (lambda: Odd(lambda x: x**0), "takes the power 0; take a map"),
        (
            lambda: Owning(lambda x, w: x * torch.maximum(w[0], torch.tensor(0.5))),
            "'maximum' reckons with parameters alone; let each meet a map",
        ),
        (
            lambda: Odd(lambda x: nn.functional.interpolate(x[:, None], (3, 12), antialias=True, mode="bicubic")),
            "no antia",
        ),
        (lambda: Odd(lambda x: nn.functional.interpolate(x, 1 << 16, mode="linear")), "whole multiples"),
        (lambda: Odd(lambda x: x.max(0)[0]), "takes the largest along 0"),
        (lambda: nets.maps(first(), nn.InstanceNorm1d(3, track_running_stats=True), wide=36), "track_running_stats"),
        (lambda: nets.maps(first(), nn.InstanceNorm1d(5), wide=36), "use num_features=3"),
        (lambda: Owning(lambda x, w: F.instance_norm(x, w[0, :3], w[1, :3], None, None, False)), "or use BatchNorm"),
        (lambda: nets.maps(first(), nn.AdaptiveMaxPool1d(5, return_indices=True), wide=15), "returns indices"),
        (lambda: nets.maps(first(), nn.Linear(12, 12), wide=36), "turn the channels"),
        (lambda: Odd(lambda x: nn.functional.layer_norm(x, x.shape)), "batch"),
        (lambda: Odd(lambda x: x / x.norm(3, dim=1, keepdim=True)), "norm of p=3; use p=1, 2 or inf"),
        (lambda: Odd(lambda x: F.cosine_similarity(x, x[:, :1], 1)), "vectors of two lengths; give both one size"),
        (lambda: Odd(lambda x: x / x.norm()), r"goes over None of .*name dimensions behind the batch"),
        (lambda: Odd(lambda x: x / torch.linalg.norm(x, 2, (1, 2), True)), "ord=2 of matrices; leave ord out"),
        (lambda: Odd(lambda x: F.normalize(x, 3)), "normalizes by p=3; use p=1 or 2"),
        (lambda: Odd(lambda x: nn.functional.glu(x, 1)), "halves dimension 1 of"),
        (lambda: Odd(lambda x: x - x.std()), "goes over None"),
        (lambda: Odd(lambda x: x - x[:, :1].std(1, keepdim=True)), "of 1 values; .*unbiased=False"),
        (lambda: Owning(lambda x, w: w @ x), r"multiplies|sizes"),
        (lambda: Owning(lambda x, w: F.conv1d(x, x[:, :, :1])), "convolves by a map"),
        (lambda: Owning(lambda x, w: F.conv1d(x, w[:, :, None])), "weighs 3 channels by .*let them fit"),
        (lambda: Owning(lambda x, w: nn.functional.linear(x, x[:, 0])), "by a map; give it a parameter"),
        (lambda: Owning(lambda x, w: x @ nn.functional.normalize(w, 3.0)), r"normalize.*of a parameter .*p=1 and p=2"),
        (lambda: Owning(lambda x, w: x.clamp(max=w.norm(1, 0))), r"takes norm\(1, 0\) of a parameter .*p=2 alone"),
        (lambda: Odd(lambda x: x.to(torch.float64)), "float64"),
        (lambda: nets.Sequences(nn.Linear(3, 8), nn.TransformerEncoderLayer(8, 2, 8, 0.0), wide=8), "batch_first=True"),
        (lambda: nets.maps(nn.Linear(12, 4), Cross(kdim=2), wide=12), "has kdim, vdim"),
        (lambda: nets.maps(nn.Linear(12, 4), Masked(), wide=12), "attn_mask that is made of the sample"),
        (lambda: nets.maps(nn.Linear(12, 4), Masked(torch.zeros(2, 3, 3)), wide=12), "each sample"),
        (lambda: Odd(lambda x: nn.functional.scaled_dot_product_attention(x, x, x, x)), "no comparison"),
        (lambda: Odd(lambda x: x + torch.ones(12).cumsum(0).sqrt() - torch.ones(5)), "adds a tensor"),
        (lambda: Odd(lambda x: x.masked_fill(torch.ones(5) > 0, 0.0)), "hides by a tensor"),
        (lambda: Odd(lambda x: torch.where(x > 0, 1.0, 0.0)), "chooses otherwise than of a map and another value"),
        (
            lambda: Odd(lambda x: torch.stack([x, x]).flatten(0, 1)),
            "does flatten a sequence that stands before the batch",
        ),
        (lambda: Odd(lambda x: x * x[:, 0, 0]), "bring both branches to one shape"),
        (lambda: Odd(lambda x: x + torch.zeros(3, x.size(0)).squeeze(5)), "makes no squeeze of zeros"),
        (lambda: Tabled(lambda x, table: x + table.amax(0)), "gives amax a parameter or a table"),
        (lambda: nets.maps(nn.Linear(12, 4), Hidden(), wide=12), "no comparison"),
        (lambda: Gru(batch_first=False), "batch_first=True"),
        (lambda: Packed(False, False), "packs samples in the order of their lengths.*enforce_sorted=False"),
        (lambda: Packed(True, False), "longest sample of the batch, .*total_length=x.size"),
        (lambda: Packed(True, False, padding_value=1.0), "pads by 1.0 to None; let it pad by 0 to 3"),
        (lambda: Packed(True, True), "pads to a length that is not known"),
        (lambda: Odd(lambda x: x + x.topk(1, 0)[0]), "'topk' goes along the first dimension; put the batch there"),
        (
            lambda: Odd(lambda x: x + torch.zeros(1, x.size(0), 12).exp()[0]),
            "reckons with zeros; begin with a parameter",
        ),
        (lambda: Gru(first=True), r"begins with \(3, 12\) for each sample; give it \(1, batch, 4\)"),
        (lambda: Gru(take=1), "averages over 0"),
        (lambda: Odd(lambda x: x + torch.randn(x.size(0), 3, 12)), "randn"),
        (lambda: Odd(lambda x: x + torch.randn(12)), "forward pass draws numbers; draw in layers alone, nn.Dropout"),
        (lambda: Odd(lambda x: x + torch.randn_like(x)), "randn_like.* draw in layers alone"),
        (lambda: Odd(drop_path), "new_empty.* draw in layers alone, nn.Dropout or torchvision.ops.StochasticDepth"),
        (lambda: Odd(stochastic_depth), "empty.* draw in layers alone"),
        (lambda: Odd(lambda x: x.cumsum(0)), "'cumsum' goes along the first dimension"),
        (lambda: Odd(lambda x: x.cummax(1)[0]), "cummax"),
        (lambda: Odd(lambda x: x[::2]), "keep the whole batch"),
        (lambda: Odd(lambda x: torch.cat([x, x], 0)), "'cat' puts samples behind samples; call the layers with each"),
        (lambda: Odd(lambda x: x.flip(0)), "behind the batch"),
        (lambda: Odd(lambda x: x.roll(1, 0)), "turns the batch"),
        (lambda: Odd(lambda x: x[:, torch.tensor([[0, 1], [2, 0]])].flatten(1, 2)), "take a list of places"),
        (lambda: nets.swin(attention_dropout=0.1), "'ShiftedWindowAttention' drops values; leave out attention_drop"),
        (lambda: Odd(lambda x: nn.functional.pixel_shuffle(x.unflatten(2, (3, 4)), 2)), "whole squares"),
        (lambda: Odd(lambda x: torch.einsum("bij->bji", x)), "name two tensors"),
        (lambda: Odd(lambda x: torch.einsum("...j,jk", x, torch.ones(12, 12))), "name two tensors"),
        (lambda: Odd(lambda x: torch.einsum("bij,cij->bc", x, x)), "the batch first"),
        (
            lambda: Odd(lambda x: x.view(-1, 12) + x[:, 0].repeat(3, 1)),
            "'repeat' reads the batch as one .* and as it is",
        ),
        (lambda: Odd(lambda x: x.transpose(0, 1)), "stands before the batch; put the batch first"),
        (lambda: Odd(lambda x: x @ x), "multiplies"),
        (lambda: Odd(lambda x: x.mean(0)), "averages"),
        (lambda: Odd(lambda x: torch.softmax(x, 0)), "dim=-1"),
        (lambda: Odd(lambda x: x.chunk(2, 0)[0]), r"chunk\(2, 0\), which has no rule"),
        (lambda: Odd(lambda x: x + torch.ones(4, 12)), r"adds a tensor of \(4, 12\)"),
        (lambda: Odd(lambda x: x + 2 * torch.arange(12).double()), "of torch.float64"),
        (lambda: nets.maps(first(), Placed(5), wide=36), "looks up .* in 5 rows"),
        (lambda: Odd(lambda x: x.expand(x.shape[0], 6, 12)), "stretches"),
        (lambda: Odd(lambda x: x.repeat(1, 2, 1)), "repeats"),
        (lambda: Odd(lambda x: x * 2 if x.shape[0] > 1 else x), "the batch's size is a condition"),
        (
            lambda: Odd(lambda x: nn.functional.max_pool2d(x, 2)),
            "pools over 2 behind the channels, .* have 1; give maps",
        ),
        (
            lambda: nets.maps(first(), nn.Flatten(), nn.AdaptiveAvgPool1d(4), wide=4),
            "pools over 1 behind .* x.unsqueeze.1.",
        ),
        (lambda: nets.maps(first(), nn.Flatten(), nn.AvgPool1d(3), wide=12), "'2' pools over 1"),
        (Worded, "'words' looks up numbers that the forward reckons; give it the sample's own"),
        (lambda: Odd(lambda x: x + x.max(1, keepdim=True)[1]), r"of which getitem takes \(1,\); take 0 or -2"),
        (lambda: Odd(lambda x: x.cumsum(1)), r"'cumsum\w*' multiplies \(3, 3\) by \('first', 12"),
        (Twice, "'layers.0' shares its weight with 'first.weight'"),
        (lambda: Odd(late), "depends on its values"),
    ],
)
@pytest.mark.filterwarnings(
    "ignore:LSTM with projections", "ignore:input.s size at dim=1", "ignore:std.*degrees of freedom"
)
def test_what_has_no_rule_is_refused_by_name_with_the_mend(make, said, monkeypatch):
    monkeypatch.setattr("talaria.model.answers.require", lambda *_: None)  # most answer nothing that a model must
    with pytest.raises(ModelError, match=said) as found:
        build(zoo.keep(make(), nets.LINE, 4))
    assert "train this model with torch" in str(found.value)


def test_a_step_of_a_model_for_classes_of_steps_is_refused_with_who_learns_it():
    with pytest.raises(ModelError, match=r"gives maps of \(12, 4\).*learn task='per_step' with engine='onnx' or a kit"):
        build(ModelSpec("steps_cnn", (3, 12), 4))


def test_all_layers_without_a_rule_are_named_at_once():
    with pytest.raises(ModelError, match=r"'1' is a RReLU, '2' is a LPPool1d.*use layers among .*Conv2d"):
        build(zoo.keep(nets.maps(first(), nn.RReLU(), nn.LPPool1d(2, 1), wide=36), nets.LINE, 4))


def test_what_is_changed_in_place_and_read_again_is_refused():
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.act, self.flatten, self.head = first(), nn.ReLU(True), nn.Flatten(), nn.Linear(36, 4)

        def forward(self, x):
            x = self.first(x)
            return self.head(self.flatten(self.act(x) + x))

    with pytest.raises(ModelError, match="in place"):
        build(zoo.keep(Both(), nets.LINE, 4))


class Counting(nn.Module):
    """Gives a buffer of its own a new value in each pass, and goes on with it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.flatten, self.head = first(), nn.Flatten(), nn.Linear(36, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen = self.seen * 0.9 + 0.1
        return self.head(self.flatten(self.first(x) - self.seen))


def test_a_buffer_that_the_pass_gives_another_value_is_refused():
    with pytest.raises(ModelError, match="'seen' is given another value by the pass; leave it as it is"):
        build(zoo.keep(Counting(), nets.LINE, 4))


class Over(nn.Module):
    """Goes along a dimension of a sequence that stands before the batch, as torch's layers read it."""

    def __init__(self, dim) -> None:
        super().__init__()
        self.lstm, self.head, self.dim = nn.LSTM(3, 8), nn.Linear(8, 4), dim

    def forward(self, x):
        return self.head(self.lstm(x.permute(2, 0, 1))[0].softmax(self.dim).mean(0))


def test_a_dimension_that_was_rewritten_is_told_beside_the_networks_own():
    with pytest.raises(ModelError, match=r"goes along dim=0 .*what the network calls 0 is 1, and 1, the batch, is 0"):
        answers_of(Over(1).eval(), "head", (3, 12))
    answers_of(Over(2).eval(), "head", (3, 12))


def test_steps_that_are_not_sgds_and_what_is_no_spec_are_named():
    """The first was said to err by more than torch does, and to be trained with torch."""
    spec = ModelSpec("mlp", (4,), 3)
    with pytest.raises(ConfigError, match="optimizer='adam' is no part of a program, whose step is that of SGD"):
        build(spec, "all", Recipe(optimizer="adam"))
    with pytest.raises(ConfigError, match="clip=1 is no part of a program"):
        build(spec, "all", Recipe(clip=1.0))
    with pytest.raises(ConfigError, match=r"spec=Linear must be a ModelSpec; of a torch module, .*keep\(module"):
        build(nn.Linear(4, 3))


class Gated(nn.Module):
    """Lets those values through whose gain is above zero, a parameter that may be frozen here and learn elsewhere."""

    def __init__(self):
        super().__init__()
        self.body, self.gain, self.head = nn.Linear(6, 8), nn.Parameter(torch.linspace(-1, 1, 8)), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.body(x) * (self.gain > 0))


def test_a_mask_of_a_frozen_parameter_is_not_kept_as_it_was_when_the_program_was_made():
    spec = zoo.keep(Gated(), (6,), 4, "head")
    for make in (lambda: build(spec, "head"), lambda: build(spec), Maker(spec).forward):
        with pytest.raises(ModelError, match="'gt' compares what is no number"):
            make()


@pytest.mark.parametrize("name", ["N", "#4", "conv+norm", "wide*2"])
def test_a_layer_that_is_called_as_sizes_are_is_refused_unless_its_width_is_anothers(name):
    def net(layer):
        layers = (("first", nn.Linear(6, 8)), (name, layer), ("act", nn.ReLU()), ("head", nn.Linear(8, 4)))
        return zoo.keep(nn.Sequential(OrderedDict(layers)), (6,), 4)

    with pytest.raises(ModelError, match=r"is called as sizes are.*name it otherwise"):
        build(net(nn.Linear(8, 8)))
    build(net(nn.BatchNorm1d(8)))
