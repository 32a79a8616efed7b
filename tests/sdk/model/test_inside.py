"""Adapters inside attention and recurrent layers: beside each matrix, learned, pruned and merged with it."""

import copy

import pytest
import torch
from mypkg.nets import Attentive, Gated
from tolerance import roundings
from torch import nn

from talaria.model import adapters, zoo
from talaria.model.compaction import compact, expand
from talaria.model.masks import apply_dense
from talaria.model.merging import merge
from talaria.model.prunability import survey
from talaria.model.spec import AdapterSpec, ModelSpec
from talaria.model.split import split_model
from talaria.model.state import load, state_of
from talaria.planning.layer_stats import anatomy

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
SHAPE = (6, 32)


class Both(nn.Module):
    """Two layers of an LSTM in both directions, and torch's encoder over its padded states."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 4, 2, batch_first=True, bidirectional=True)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 4, 12, 0.0, batch_first=True), 2)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        hidden = torch.arange(32) >= 32 - torch.arange(len(x))[:, None]
        states = self.lstm(x.transpose(1, 2))[0]
        states = self.encoder(states, src_key_padding_mask=hidden)
        return self.head(states.masked_fill(hidden[..., None], 0).mean(1))


NETS = {
    "gru": (lambda: Gated(SHAPE, 3), {"gru": {"weight_ih_l0", "weight_hh_l0"}}),
    "attention": (lambda: Attentive(SHAPE, 3), {"layer.self_attn": {"in_proj", "out_proj"}}),
    "lstm and encoder": (
        Both,
        {
            "lstm": {f"weight_{kind}_l{n}{way}" for kind in ("ih", "hh") for n in (0, 1) for way in ("", "_reverse")},
            **{f"encoder.layers.{number}.self_attn": {"in_proj", "out_proj"} for number in (0, 1)},
        },
    ),
}


@pytest.fixture(params=NETS)
def net(request):
    torch.manual_seed(0)
    make, places = NETS[request.param]
    plain = make().eval()
    return plain, adapters.insert(plain, AdapterSpec("lowrank", 3), skip=("head",)), places, torch.randn(3, *SHAPE)


def stirred(model):
    """``model`` with factors that change something."""
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if key.endswith("up.weight"):
                weight.normal_(0, 0.3, generator=torch.Generator().manual_seed(len(key)))
    return model


def test_each_matrix_has_factors_that_change_nothing_at_first_and_are_the_adapters(net):
    plain, model, places, x = net
    found = split_model(model)
    for place, names in places.items():
        ours = [key.removeprefix(f"{place}.adapter.") for key in found.adapters if key.startswith(f"{place}.adapter.")]
        assert {*ours} == {f"{name}.{part}.weight" for name in names for part in ("up", "down")}
    with torch.no_grad():
        assert roundings(model(x), plain(x)) <= 1000
    assert not any("adapter" in key for key in found.body)


def test_they_learn_alone_and_are_merged(net):
    _, model, _, x = net
    own = {key: weight for key, weight in model.named_parameters() if "adapter" in key}
    for key, weight in model.named_parameters():
        weight.requires_grad_(key in own)
    optimizer = torch.optim.SGD(own.values(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model.train()(x), torch.tensor([0, 1, 2])).backward()
        assert all(weight.grad is not None for weight in own.values())
        optimizer.step()
    merged = merge(stirred(model)).eval()
    assert not any("adapter" in key or "base" in key for key in merged.state_dict())
    with torch.no_grad():
        assert roundings(merged(x), model.eval()(x)) <= 2000
    again = copy.deepcopy(model)  # after training, as a device keeps it
    assert torch.equal(again(x), model(x))


def test_units_and_heads_go_with_their_factors_exactly(net, random_mask):
    plain, model, _, x = net
    model, found = stirred(model), survey(model, x)
    groups = [size for name, size in found.layout.sizes.items() if "adapter" not in name]
    assert sorted(groups) == sorted(survey(plain, x).layout.sizes.values())
    for seed in range(3):
        mask, twin = random_mask(found.layout, seed), copy.deepcopy(model)
        load(twin, apply_dense(state_of(model), mask))
        small = compact(model, mask)
        with torch.no_grad():
            assert roundings(small(x), twin(x)) <= 2000
            assert roundings(merge(small)(x), twin(x)) <= 2000
        assert {k: v.shape for k, v in state_of(expand(small, mask, like=model)).items()} == {
            k: v.shape for k, v in state_of(model).items()
        }


@pytest.mark.parametrize("name", ["Gated", "Attentive"])
def test_a_plan_for_the_plain_model_fits_the_adapted_one(name):
    spec = ModelSpec(f"mypkg.nets:{name}", SHAPE, 3)
    adapted = ModelSpec(f"mypkg.nets:{name}", SHAPE, 3, adapters=AdapterSpec("lowrank", 2))
    one, other = anatomy(spec), anatomy(adapted)
    names = one.renamed(other)
    sizes = {group: size for group, size in zoo.layout(adapted).sizes.items() if "adapter" not in group}
    assert {names[group]: size for group, size in one.layout.sizes.items()} == sizes
    least = dict.fromkeys(one.layout.sizes, 1)
    assert one.products(least) == other.products({names[group]: width for group, width in least.items()})
