"""Hidden units of recurrent layers: taken out of all gates, layers and directions at once, exactly, or left whole."""

import copy

import pytest
import torch
from tolerance import roundings
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from talaria import tensors
from talaria.model import pruning
from talaria.model.compaction import compact, expand
from talaria.model.masks import apply_dense
from talaria.model.prunability import survey
from talaria.model.recurrent import dropping, places
from talaria.model.sensitivity import worth
from talaria.model.state import load, state_of
from talaria.model.widths import widths_of


class Reading(nn.Module):
    """A convolution, a recurrent layer, and a head over its states in one of the ways in which people read them."""

    def __init__(self, kind, way="mean", **options) -> None:
        super().__init__()
        self.way, wide = way, 10 * (2 if options.get("bidirectional") else 1)
        self.conv, self.rnn = nn.Conv1d(3, 8, 3), kind(8, 10, **{"batch_first": True, **options})
        self.head = nn.Linear(wide * (8 if way == "flat" else 1), 3)

    def forward(self, x):
        x = torch.relu(self.conv(x)).permute(*((0, 2, 1) if self.rnn.batch_first else (2, 0, 1)))
        if self.way == "packed":
            x = pack_padded_sequence(x, torch.tensor([8, 5, 3]), batch_first=True)
        first = torch.ones(self.rnn.num_layers, len(x), 10) if self.way == "begun" else None
        states, last = self.rnn(x, first)
        last = last[0] if isinstance(last, tuple) else last
        if self.way in ("state", "packed"):
            return self.head(torch.cat([last[-2], last[-1]], 1) if self.rnn.bidirectional else last[-1])
        if self.way == "flat":
            return self.head(states.flatten(1))
        return self.head(states.mean(1 if self.rnn.batch_first else 0))


NETS = {
    "gru": lambda: Reading(nn.GRU),
    "gru, both ways, two layers": lambda: Reading(nn.GRU, num_layers=2, bidirectional=True),
    "gru, last state": lambda: Reading(nn.GRU, "state", num_layers=2, bias=False),
    "gru, moments first": lambda: Reading(nn.GRU, batch_first=False),
    "lstm": lambda: Reading(nn.LSTM, num_layers=3),
    "lstm, both last states": lambda: Reading(nn.LSTM, "state", bidirectional=True),
    "lstm, packed": lambda: Reading(nn.LSTM, "packed", num_layers=2, bidirectional=True),
    "rnn": lambda: Reading(nn.RNN, nonlinearity="relu", bidirectional=True),
}


@pytest.fixture(params=NETS)
def net(request):
    torch.manual_seed(0)
    model, x = NETS[request.param](), torch.randn(3, 3, 10)
    return model, x, survey(model, x)


def test_units_and_what_feeds_them_are_taken_out_exactly_under_any_mask(net, random_mask):
    model, x, found = net
    assert dict(found.layout.sizes) == {"conv": 8, "rnn": 10}
    assert not found.refused
    for seed in range(4):
        mask, twin = random_mask(found.layout, seed), copy.deepcopy(model)
        load(twin, apply_dense(state_of(model), mask))
        small = compact(model, mask)
        assert small.rnn.hidden_size == len(mask.kept["rnn"])
        with torch.no_grad():
            assert roundings(small(x), twin(x)) <= 1000
        assert widths_of(found.layout, state_of(small)) == {g: len(k) for g, k in mask.kept.items()}
        assert tensors.equal(state_of(expand(small, mask, like=model)), state_of(model))


def test_a_choice_by_importance_keeps_what_weighs_most(net):
    model, _, found = net
    scores = pruning.importance(model, found.layout)
    with torch.no_grad():
        for key, value in model.rnn.named_parameters():
            value.view(-1, 10, *value.shape[1:])[:, 3] *= 0.01
            if key.startswith("weight_hh"):
                value[:, 3] *= 0.01
    less = pruning.importance(model, found.layout)
    assert less["rnn"].argmin() == 3
    assert less["rnn"][3] < scores["rnn"][3]
    assert 3 not in pruning.choose(less, found.layout.full(), keep=0.5, block=1).kept["rnn"]


def test_every_unit_is_worth_something_to_the_loss(net):
    model, x, found = net
    assert (worth(model, found.layout, [(x, torch.tensor([0, 1, 2]))])["rnn"] > 0).all()


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_what_falls_away_between_layers_is_what_is_given(kind, batch_first, begun):
    torch.manual_seed(0)
    layer, x = kind(3, 4, 3, batch_first=batch_first, dropout=0.5, bidirectional=True), torch.randn(2, 5, 3)
    assert places(layer, "rnn") == ["rnn.l0", "rnn.l1"]
    first = torch.randn(6, 2 if batch_first else 5, 4)
    hx = ((first, -first) if kind is nn.LSTM else first) if begun else None
    want = layer.eval()(x, hx)
    same, none = (dropping(layer.train(), lambda n, x, k=k: torch.full_like(x, k)) for k in (1.0, 0.0))
    flat = [(out[0], *out[1]) if kind is nn.LSTM else out for out in (want, same(x, hx))]
    assert all(roundings(mine.detach(), theirs.detach()) <= 100 for mine, theirs in zip(flat[1], flat[0], strict=True))
    assert torch.equal(none(x)[0], none(torch.zeros_like(x))[0]), "the last layer reads zeros"
    layer.eval()
    assert torch.equal(none(x, hx)[0], want[0]), "in eval mode nothing falls"


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_of_packed_sequences_falls_away_what_is_given_for_all_moments(kind, batch_first, begun):
    """What is drawn for the longest sample's moments stays the same where another one is longer."""
    torch.manual_seed(0)
    layer, x = kind(3, 4, 3, batch_first=batch_first, dropout=0.5, bidirectional=True), torch.randn(3, 6, 3)
    drawn = torch.rand(2, 3, 6, 8)
    given = dropping(layer.train(), lambda n, x: drawn[n] if batch_first else drawn[n].transpose(0, 1))
    first = torch.randn(6, 3, 4)
    found = []
    for lengths in ([3, 2, 4], [6, 2, 4]):
        hx = None if not begun else (first, -first) if kind is nn.LSTM else first
        whole = x if batch_first else x.transpose(0, 1)
        out, last = given(pack_padded_sequence(whole, torch.tensor(lengths), batch_first, enforce_sorted=False), hx)
        out = pad_packed_sequence(out, batch_first=True, total_length=6)[0]
        found.append((out[1:], *(one[:, 1:] for one in (last if kind is nn.LSTM else (last,)))))
        alone = x[1:2, :2] if batch_first else x[1:2, :2].transpose(0, 1)
        one = dropping(layer, lambda n, x: drawn[n, 1:2, :2] if batch_first else drawn[n, 1:2, :2].transpose(0, 1))
        hx = None if hx is None else tuple(h[:, 1:2] for h in hx) if kind is nn.LSTM else hx[:, 1:2]
        own = one(alone, hx)[0]
        assert roundings(out[1:2, :2].detach(), (own if batch_first else own.transpose(0, 1)).detach()) <= 100
    assert all(roundings(a.detach(), b.detach()) <= 100 for a, b in zip(*found, strict=True))


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Reading(nn.GRU, "begun"), "rnn"),  # its units begin at one, and with ten of them in the code
        (lambda: Reading(nn.LSTM, "flat"), "rnn"),
        (lambda: nn.Sequential(nn.Linear(10, 8), Projected()), "1.rnn"),
    ],
)
def test_what_is_not_proven_is_left_whole_by_name(make, name):
    torch.manual_seed(0)
    found = survey(make(), torch.randn(3, 3, 10))
    assert name not in found.layout.sizes
    assert any(name in layer or name in reason for layer, reason in found.refused.items()), found.refused


class Projected(nn.Module):
    """An LSTM whose states are projected."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(8, 10, proj_size=4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.rnn(x)[0].mean(1))
