"""Networks as people write them are exported: their bundles are whole, and answer as torch does."""

import numpy as np
import pytest
import torch
from networks import networks
from tolerance import roundings

import talaria
from talaria_export import make_bundle, open_bundle, verify_bundle
from talaria_export.runtime.session import session_of

tutorials, walked, ranked, framed, changed = map(networks, ("tutorials", "walked", "ranked", "framed", "changed"))

NETS = [
    *(
        "u-net",
        "u-net by layers",
        "u-net by learned filters",
        "sub-pixel",
        "rnn from zeros",
        "gpt under a mask",
        "named products",
    ),
    *("learned filters", "prototypes", "window", "lstm of convolutions"),
]


def test_a_network_that_begins_with_zeros_for_its_batch_is_told_of_all_variants(tmp_path):
    shape, make = tutorials.NETS["gru by hand"]
    torch.manual_seed(0)
    x = np.random.default_rng(0).standard_normal((40, *shape), np.float32)
    labels = np.arange(40) % 4
    found = make_bundle(tmp_path / "me.talaria", make().eval(), example=x[:1], samples=(x, labels), seconds=0)
    assert found.ok
    assert [one["name"] for one in found.figures["variants"]] == ["fp32", "fp16", "int8", "int8-linear"]


def test_transposed_convolutions_of_several_groups_have_every_variant(tmp_path):
    torch.manual_seed(0)
    grown = torch.nn.ConvTranspose1d(6, 10, 4, stride=2, padding=1, output_padding=1, groups=2, dilation=2)
    net = torch.nn.Sequential(
        grown, torch.nn.BatchNorm1d(10), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.LazyLinear(3)
    )
    x = np.random.default_rng(0).standard_normal((60, 6, 8), np.float32)
    labels = net.eval()(torch.from_numpy(x)).argmax(1).numpy()
    found = make_bundle(tmp_path / "me.talaria", net, example=x[:1], samples=(x, labels), dense=net, seconds=0)
    assert found.ok
    assert all(one["bytes"] for one in found.figures["variants"])
    assert verify_bundle(tmp_path / "me.talaria").ok


class Levelled(torch.nn.Module):
    """A normalization over two dimensions, of which each sample takes places that it names."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = torch.nn.Linear(3, 8), torch.nn.LayerNorm([12, 8]), torch.nn.Linear(8, 4)

    def forward(self, x):
        y = self.norm(self.embed(x.transpose(1, 2)))
        at = (x[:, :1] > 0).sum(2).clamp(max=11)
        return self.head(y.gather(1, at[:, :, None].expand(-1, -1, 8))[:, 0] + y.mean(1))


class Loose(torch.nn.Module):
    """Dimensions named by dots, squeezed where their size is no 1, and multiplied."""

    def __init__(self):
        super().__init__()
        self.embed, self.near, self.head = (
            torch.nn.Linear(3, 8),
            torch.nn.Parameter(torch.rand(8)),
            torch.nn.Linear(8, 4),
        )

    def forward(self, x):
        y = torch.sigmoid(self.embed(x.transpose(1, 2))).squeeze(1)
        share = torch.einsum("b...c,c->b...", y, self.near)
        y = torch.einsum("...lc,...l->...c", y, share) + (y + 1).prod(dim=1).log()
        return self.head(y).squeeze(-1)


@pytest.mark.parametrize("kind", [Levelled, Loose])
def test_a_network_of_ones_own_operations_has_every_variant(kind, tmp_path):
    torch.manual_seed(0)
    x = np.random.default_rng(0).standard_normal((40, 3, 12), np.float32)
    net = kind().eval()
    labels = net(torch.from_numpy(x)).argmax(1).numpy()
    found = make_bundle(tmp_path / "me.talaria", net, example=x[:1], samples=(x, labels), seconds=0)
    assert found.ok
    assert all(one["bytes"] for one in found.figures["variants"])
    assert verify_bundle(tmp_path / "me.talaria").ok


WALKED = ("sentiment by LSTM", "packed, cells", "packed, weighed both ways", "translating, packed both ways")


@pytest.mark.parametrize("name", WALKED)
def test_a_bundle_of_sequences_that_end_before_others_answers_as_torch_does(name, tmp_path):
    shape, make = walked.NETS[name]
    torch.manual_seed(0)
    net, path = make().eval(), tmp_path / "me.talaria"
    x = np.random.default_rng(0).integers(0, 3, (30, *shape)).astype(np.float32)
    assert make_bundle(path, net, example=x[:1], dense=net, variants=("fp32",), seconds=0).ok
    with torch.no_grad():
        wanted = net(torch.from_numpy(x)).numpy()
    assert roundings(session_of(open_bundle(path), "fp32")(x), wanted) <= 1000


CHANGED = [name for name in changed.NETS if name != "changed, added to a piece"]  # which the exporter scatters


@pytest.mark.parametrize("name", [*NETS, *ranked.NETS, *framed.NETS, *CHANGED])
def test_a_bundle_is_whole_and_answers_as_torch_does(name, tmp_path):
    shape, make = {**tutorials.NETS, **ranked.NETS, **framed.NETS, **changed.NETS}[name]
    torch.manual_seed(0)
    net, path = make().eval(), tmp_path / "me.talaria"
    x = np.random.default_rng(0).standard_normal((6, *shape), np.float32)
    assert make_bundle(path, net, example=x[:1], dense=net, variants=("fp32",), seconds=0).ok
    assert verify_bundle(path).ok
    with torch.no_grad():
        wanted = net(torch.from_numpy(x)).numpy()
    assert roundings(session_of(open_bundle(path), "fp32")(x), wanted) <= 1000


def test_a_gaussian_head_over_features_that_have_much_in_common_is_exported(tmp_path):
    draw = np.random.default_rng(0)
    patterns, y = draw.integers(0, 255, (4, 3, 12, 12)), draw.integers(0, 4, 120)
    x = (0.5 * patterns[y] + draw.integers(0, 128, (120, 3, 12, 12))).astype(np.uint8)
    data = talaria.data.Federated.from_arrays(x, y, np.repeat(["anna", "bela", "carl"], 40))
    layers = torch.nn
    torch.manual_seed(0)
    net = layers.Sequential(
        layers.Conv2d(3, 32, 3, 2), layers.GroupNorm(8, 32), layers.Hardswish(), layers.AdaptiveAvgPool2d(1),
        layers.Flatten(), layers.Linear(32, 4),
    )  # fmt: skip
    for predictive in (False, True):
        result = talaria.simulate("pfedgm", data, net, rounds=2, options={"predictive": predictive})
        assert result.accuracy.mean > 0.5
        for name, client in data.clients.items():
            path, held = tmp_path / f"{name}-{predictive}.talaria", (client.val.x, client.val.y)
            assert make_bundle(path, result.model(name), example=client.train.x[:1], samples=held, seconds=0).ok
