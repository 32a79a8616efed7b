"""Heads of attention: taken out of queries, keys, values and output at once, exactly, or left whole by name."""

import copy

import pytest
import torch
from tolerance import roundings
from torch import nn

from talaria import tensors
from talaria.model import pruning
from talaria.model.attention import FewerHeads, dropping
from talaria.model.compaction import compact, expand
from talaria.model.masks import apply_dense
from talaria.model.prunability import survey
from talaria.model.sensitivity import worth
from talaria.model.state import load, state_of
from talaria.model.widths import whole, widths_of

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
HEADS, EACH, LENGTH = 4, 2, 9
WIDE = HEADS * EACH


class Reading(nn.Module):
    """Attention over what a linear layer makes of each moment, called in one of the ways in which people call it."""

    def __init__(self, way="weights left", **options) -> None:
        super().__init__()
        self.way, self.embed = way, nn.Linear(3, WIDE)
        self.attention = nn.MultiheadAttention(WIDE, HEADS, **{"batch_first": True, **options})
        self.head = nn.Linear(WIDE, 3)

    def forward(self, x):
        length = 1 if self.attention.batch_first else 0
        hidden = (x[:, :, 0] > 0.8) & (torch.arange(LENGTH) > 0)
        x = self.embed(x if length else x.transpose(0, 1))
        later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        numbers = nn.Transformer.generate_square_subsequent_mask(LENGTH)  # in float32, whatever the weights are in
        calls = {
            "weights left": lambda: self.attention(x, x, x)[0],
            "padded": lambda: self.attention(x, x, x, hidden, need_weights=False)[0],
            "padded, weights left": lambda: self.attention(x, x, x, key_padding_mask=hidden)[0],
            "causal": lambda: self.attention(x, x, x, need_weights=False, attn_mask=later, is_causal=True)[0],
            "causal, padded": lambda: self.attention(x, x, x, hidden, attn_mask=later)[0],
            "added": lambda: self.attention(x, x, x, need_weights=False, attn_mask=numbers, is_causal=True)[0],
            "another": lambda: self.attention(x, torch.tanh(x), x * 2, need_weights=False)[0],
            "one by one": lambda: torch.stack([self.attention(one, one, one)[0] for one in x]),
            "weights read": lambda: sum_of(*self.attention(x, x, x)),
            "each head's weights read": lambda: sum_of(*self.attention(x, x, x, average_attn_weights=False)),
            "each head's mask": lambda: self.attention(x, x, x, attn_mask=later.repeat(len(x) * HEADS, 1, 1))[0],
        }
        return self.head((x + calls[self.way]()).mean(length))


def sum_of(given, weights):
    return given * weights.sum((1, 2) if weights.dim() == 4 else 1)[..., None]


class Encoding(nn.Module):
    """torch's encoder over padded sequences, which it nests where it can."""

    def __init__(self, **options) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDE, HEADS, 12, 0.0, batch_first=True, **options)
        self.embed, self.head = nn.Linear(3, WIDE), nn.Linear(WIDE, 3)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not options)

    def forward(self, x):
        hidden = torch.arange(LENGTH) >= torch.arange(LENGTH, 0, -1)[: len(x), None]
        x = self.encoder(self.embed(x), src_key_padding_mask=hidden)
        return self.head(x.masked_fill(hidden[..., None], 0).mean(1))


NETS = {
    **{way: lambda way=way: Reading(way) for way in ("weights left", "padded", "padded, weights left", "causal")},
    **{way: lambda way=way: Reading(way) for way in ("causal, padded", "added", "another")},
    "no bias": lambda: Reading(bias=False),
    "length first": lambda: Reading("padded", batch_first=False),
    "encoder": Encoding,
    "encoder, norm first": lambda: Encoding(norm_first=True, activation="gelu"),
}


@pytest.fixture(params=NETS)
def net(request):
    torch.manual_seed(0)
    model, x = NETS[request.param]().eval(), torch.randn(3, LENGTH, 3)
    return model, x, survey(model, x)


def attention_of(model):
    return [one for one in model.modules() if isinstance(one, nn.MultiheadAttention)]


def test_heads_are_taken_out_exactly_under_any_mask(net, random_mask):
    model, x, found = net
    groups = [name for name in found.layout.sizes if "att" in name]
    assert len(groups) == len(attention_of(model))
    assert {found.layout.sizes[group] for group in groups} == {HEADS}
    assert not any("att" in name for name in found.refused)
    for seed in range(4):
        mask, twin = random_mask(found.layout, seed), copy.deepcopy(model)
        load(twin, apply_dense(state_of(model), mask))
        small = compact(model, mask)
        for group, own in zip(groups, attention_of(small), strict=True):
            assert (own.num_heads, own.head_dim, own.embed_dim) == (len(mask.kept[group]), EACH, WIDE)
        with torch.no_grad():
            assert roundings(small(x), twin(x)) <= 1000
        again = small.train()(x), twin.train()(x)
        assert roundings(*(one.detach() for one in again)) <= 1000
        assert widths_of(found.layout, state_of(small)) == {g: len(k) for g, k in mask.kept.items()}
        assert tensors.equal(state_of(expand(small, mask, like=model)), state_of(model))


def test_a_pruned_attention_is_pruned_again_and_drops_weights_of_the_heads_it_has():
    torch.manual_seed(0)
    model, x = Reading("padded, weights left", dropout=0.5), torch.randn(3, LENGTH, 3)
    layout = survey(model, x).layout
    three, one = ({"attention": count} for count in (3, 1))
    scores = pruning.importance(model, layout)
    first = pruning.choose(scores, layout.full(), widths=three, block=1)
    second = pruning.choose(scores, first, widths=one, block=1)
    twice = compact(compact(model, first), second, held=first)
    assert tensors.equal(state_of(twice), state_of(compact(model, second)))
    assert twice.attention.num_heads == 1
    assert type(compact(model, layout.full()).attention) is nn.MultiheadAttention
    assert type(twice.attention) is FewerHeads
    assert not torch.equal(twice.train()(x), twice(x))
    assert torch.equal(twice.eval()(x), twice(x))


LENGTH_FIRST = ("weights left", "padded", "padded, weights left", "causal", "causal, padded", "another")
WAYS = (*LENGTH_FIRST, "one by one", "weights read", "each head's weights read", "each head's mask")


@pytest.mark.parametrize(("way", "batch_first"), [*((way, True) for way in WAYS), *((w, False) for w in LENGTH_FIRST)])
def test_attention_by_plain_products_is_torchs_where_nothing_falls_away(way, batch_first):
    torch.manual_seed(0)
    model, x = Reading(way, batch_first=batch_first), torch.randn(3, LENGTH, 3)
    with torch.no_grad():
        expected = model(x)
        shapes = []
        model.attention.forward = dropping(model.attention, lambda share: (shapes.append(share.shape), share)[1])
        assert roundings(model(x), expected) <= 1000
    alone = () if way == "one by one" else (3,)
    assert {*shapes} <= {(*alone, HEADS, LENGTH, LENGTH)}
    assert bool(shapes) == (way != "each head's mask")


def test_a_choice_by_importance_keeps_what_weighs_most(net):
    model, _, found = net
    group = next(name for name in found.layout.sizes if "att" in name)
    own = attention_of(model)[0]
    with torch.no_grad():
        own.in_proj_weight.view(3, HEADS, EACH, WIDE)[:, 2] *= 0.01
        own.out_proj.weight.view(WIDE, HEADS, EACH)[:, 2] *= 0.01
    less = pruning.importance(model, found.layout)
    assert less[group].argmin() == 2
    assert pruning.choose(less, found.layout.full(), keep=0.75, block=1).kept[group] == (0, 1, 3)


def test_a_head_is_worth_what_its_output_is_to_the_loss(net):
    model, x, found = net
    group = next(name for name in found.layout.sizes if "att" in name)
    own, y = attention_of(model)[0], torch.tensor([0, 1, 2])
    loss = nn.functional.cross_entropy(model(x), y)
    weight = own.out_proj.weight
    (slope,) = torch.autograd.grad(loss, [weight])
    gates = (weight * slope).detach().double().view(WIDE, HEADS, EACH).sum((0, 2))
    got = torch.from_numpy(worth(model, found.layout, [(x, y)])[group])
    assert (got - gates.square()).abs().max() <= 1e-4 * gates.square().max()


def test_a_block_of_channels_is_as_many_heads_as_are_as_wide():
    layout = survey(Reading().eval(), torch.randn(3, LENGTH, 3)).layout
    assert layout.spans["attention"] == EACH
    assert [whole(layout, "attention", 1, block) for block in (1, 2, 3, 8, 16)] == [1, 1, 2, 4, 4]


@pytest.mark.parametrize("way", ["weights read", "each head's weights read", "each head's mask"])
def test_heads_that_are_told_apart_are_left_whole_by_name(way):
    torch.manual_seed(0)
    found = survey(Reading(way).eval(), torch.randn(3, LENGTH, 3))
    assert "attention" not in found.layout.sizes
    assert "when channels are taken out" in found.refused["attention"]


@pytest.mark.parametrize("options", [{"add_bias_kv": True}, {"vdim": 5}])
def test_attention_of_another_form_is_left_whole_by_name(options):
    class Other(Reading):
        def forward(self, x):
            x = self.embed(x)
            return self.head((x + self.attention(x, x, x[..., : self.attention.vdim])[0]).mean(1))

    found = survey(Other(**options).eval(), torch.randn(3, LENGTH, 3))
    assert "attention" not in found.layout.sizes
    assert "another form" in found.refused["attention"]
