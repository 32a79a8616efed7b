"""Networks drawn at random, sound and odd layers mixed: what the survey lets be pruned is exact, whatever the mask."""

import copy
import random
import re

import pytest
import torch
from tolerance import roundings
from torch import nn
from torch.nn import functional as F

from talaria import tensors
from talaria.model import zoo
from talaria.model.compaction import compact
from talaria.model.masks import apply_dense, gather, scatter
from talaria.model.prunability import survey
from talaria.model.state import load, state_of

SIZE = 8


class Do(nn.Module):
    """One step: ``work(layer, a, b)`` of an earlier value ``a`` and another one ``b``."""

    def __init__(self, work, layer=None):
        super().__init__()
        self.work, self.layer = work, layer

    def forward(self, a, b):
        return self.work(self.layer, a, b)


def through(layer):
    return Do(lambda layer, a, b: layer(a), layer)


def plain(work):
    return Do(lambda layer, a, b: work(a))


def gate(c):
    inner = max(1, c // 2)
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(c, inner, 1), nn.ReLU(), nn.Conv2d(inner, c, 1))


def shuffled(a):
    n, c, h, w = a.shape
    return a.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


def attended(layer, a, b):
    tokens = a.flatten(2).transpose(1, 2)
    return layer(tokens, tokens, tokens)[0].transpose(1, 2).reshape(a.shape)


def halves(a):
    first, second = torch.split(a, a.shape[1] // 2, 1)
    return first + F.relu(second)


class Scale(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.by = nn.Parameter(torch.randn(c, 1, 1))

    def forward(self, x):
        return x * self.by


# By width of a and b, and a new width: the step, and how wide its outcome is (0: it does not fit here).
STEPS = {
    "conv": lambda c, d, o: (through(nn.Conv2d(c, o, 3, padding=1)), o),
    "conv, norm": lambda c, d, o: (through(nn.Sequential(nn.Conv2d(c, o, 1), nn.BatchNorm2d(o), nn.SiLU())), o),
    "depthwise": lambda c, d, o: (through(nn.Sequential(nn.Conv2d(c, c, 3, padding=1, groups=c), nn.ReLU6())), c),
    "grouped": lambda c, d, o: (through(nn.Conv2d(c, o, 1, groups=2)), o),
    "squeeze, excite": lambda c, d, o: (Do(lambda layer, a, b: a * layer(a).sigmoid(), gate(c)), c),
    "gate": lambda c, d, o: (Do(lambda m, a, b: a * m(a.mean((2, 3)))[:, :, None, None], nn.Linear(c, c)), c),
    "add": lambda c, d, o: (Do(lambda layer, a, b: a + b), c if c == d else 0),
    "multiply": lambda c, d, o: (Do(lambda layer, a, b: a * b), c if c == d else 0),
    "concat": lambda c, d, o: (Do(lambda layer, a, b: torch.cat((a, b), 1)), c + d),
    "first half": lambda c, d, o: (plain(lambda a: a.chunk(2, 1)[0]), c // 2),
    "both halves": lambda c, d, o: (plain(halves), c // 2),
    "slice": lambda c, d, o: (plain(lambda a: a[:, 1:-1]), c - 2),
    "shuffle": lambda c, d, o: (plain(shuffled), c),
    "softmax": lambda c, d, o: (plain(lambda a: a.softmax(1)), c),
    "centre": lambda c, d, o: (plain(lambda a: a - a.mean(1, keepdim=True)), c),
    "prelu": lambda c, d, o: (through(nn.PReLU(c)), c),
    "scale": lambda c, d, o: (through(Scale(c)), c),
    "group norm": lambda c, d, o: (through(nn.GroupNorm(2, c)), c),
    "transposed": lambda c, d, o: (through(nn.ConvTranspose2d(c, o, 1)), o),
    "twice": lambda c, d, o: (Do(lambda layer, a, b: layer(layer(a).relu()), nn.Conv2d(c, c, 1)), c),
    "attention": lambda c, d, o: (Do(attended, nn.MultiheadAttention(c, 2, batch_first=True)), c),
}


class Drawn(nn.Module):
    def __init__(self, seed):
        super().__init__()
        draw, widths = random.Random(seed), [4]
        self.first, self.steps, self.wires, self.kinds = nn.Conv2d(3, 4, 1), nn.ModuleList(), [], []
        for _ in range(draw.randint(2, 9)):
            a, b = max(draw.choices(range(len(widths)), k=3)), draw.randrange(len(widths))
            kind = draw.choice(["conv", "conv, norm", draw.choice(sorted(STEPS))])
            step, width = STEPS[kind](widths[a], widths[b], draw.choice((4, 8, 12, 16)))
            if 4 <= width <= 48 and width % 2 == 0:
                self.steps.append(step)
                self.wires.append((a, b))
                self.kinds.append(kind)
                widths.append(width)
        self.flat = draw.random() < 0.4
        self.head = nn.Linear(widths[-1] * (SIZE * SIZE if self.flat else 1), 5)

    def forward(self, x):
        values = [self.first(x)]
        for step, (a, b) in zip(self.steps, self.wires, strict=True):
            values.append(step(values[a], values[b]))
        return self.head(values[-1].flatten(1) if self.flat else values[-1].mean((2, 3)))


@pytest.mark.parametrize("decade", range(12))
def test_whatever_may_be_pruned_is_exact_for_any_mask(decade, random_mask):
    shrunk = 0
    for seed in range(10 * decade, 10 * decade + 10):
        torch.manual_seed(seed)
        model, x = Drawn(seed).eval(), torch.randn(2, 3, SIZE, SIZE)
        state = tensors.copied(state_of(model))
        layout = survey(model, x).layout
        shrunk += bool(layout.sizes)
        for number in range(3):
            mask = random_mask(layout, number)
            twin = copy.deepcopy(model)
            load(twin, apply_dense(state, mask))
            with torch.no_grad():
                got, want = compact(model, mask)(x), twin(x)
            assert roundings(got, want, want.abs().max().clamp(min=1e-3)) <= 1000, (seed, model.kinds, mask.kept)
            assert tensors.equal(scatter(gather(state, mask), mask, state), state)
        assert tensors.equal(state_of(model), state)
    assert shrunk >= 5


@pytest.mark.parametrize("own", [False, True])
def test_features_beside_the_input_itself_are_left_whole_with_what_would_let_them_go(own):
    class Beside(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.last = nn.Conv1d(6, 16, 3), nn.Linear(6, 6) if own else nn.Identity()
            self.fc, self.head = nn.Linear(22, 32), nn.Linear(32, 3)

        def forward(self, x):
            joined = torch.cat([self.conv(x).relu().mean(-1), self.last(x[:, :, -1])], 1)
            return self.head(self.fc(joined).relu())

    spec = zoo.keep(Beside(), (6, 12), 3)
    assert zoo.layout(spec).sizes == {"fc": 32, **({"conv": 16, "last": 6} if own else {})}
    said = (
        "conv shares 'fc' with channels that no mask takes: the model's input, .* a layer of its own before the input"
    )
    assert re.match("" if own else said, zoo.left_whole(spec))
    assert bool(zoo.left_whole(spec)) is not own


def test_who_keeps_joined_channels_whole_is_named():
    """As of a U-Net, where it was said of the model's input, which is nowhere near."""

    class Joined(nn.Module):
        def __init__(self, other):
            super().__init__()
            self.one, self.other, self.both, self.head = (
                nn.Conv1d(6, 16, 1),
                other,
                nn.Conv1d(24, 8, 1),
                nn.Linear(8, 3),
            )

        def forward(self, x):
            return self.head(self.both(torch.cat([self.one(x), self.other(x)], 1)).mean(-1))

    def said(other):
        return zoo.left_whole(zoo.keep(Joined(other), (6, 12), 3))

    unknown = "one shares 'both' with channels that no mask takes: the model's input, .* a layer that is left whole; "
    assert re.search(unknown, said(nn.ConvTranspose1d(6, 8, 1)))
    whole = nn.Sequential(nn.Conv1d(6, 8, 1), nn.GroupNorm(1, 8))
    assert "one shares 'both' with channels of other.0, which stay" in said(whole)


def test_who_keeps_channels_whole_that_only_go_all_at_once_is_named():
    """Of attention pooling it was said that a layer before the input would help; of the second, nothing at all."""

    class Weighed(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru, self.score = nn.GRU(6, 16, batch_first=True), nn.Linear(16, 1)
            self.head = nn.Linear(16, 3)

        def forward(self, x):
            y = self.gru(x.transpose(1, 2))[0]
            return self.head((self.score(y).softmax(1) * y).sum(1))

    several = nn.Sequential(
        nn.Conv1d(6, 8, 3), nn.Conv1d(8, 16, 3, groups=8), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(16, 3)
    )
    for net, said in (
        (Weighed(), "gru shares 'gru' with channels of score, which stay"),
        (several, "0 has channels that could only go all at once, for what reads them"),
    ):
        assert zoo.left_whole(zoo.keep(net, (6, 12), 3)) == said
