"""One small network for each layer that a program may hold."""

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from talaria.model import adapters
from talaria.model.spec import AdapterSpec


def dropped(share: float) -> nn.Module:
    """torchvision's layer that leaves out whole samples; imported here: every process that runs tests reads this."""
    from torchvision.ops import StochasticDepth

    return StochasticDepth(share, "row")


def convnext(depth: float) -> nn.Module:
    """torchvision's, of two stages, narrow."""
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    stages = [CNBlockConfig(8, 12, 1), CNBlockConfig(12, None, 2)]
    return ConvNeXt(stages, stochastic_depth_prob=depth, layer_scale=0.5, num_classes=4)


def lengthened(layer: nn.Module, dim: int | None = 0) -> nn.Module:
    """``layer`` with weights of a direction and a length, which changes them."""
    out = weight_norm(layer, dim=dim)
    with torch.no_grad():
        out.parametrizations.weight.original0.mul_(1.3)
    return out


class Residual(nn.Module):
    """Two branches that meet twice, by operator and by function."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv1d(3, 3, 3, padding=1), nn.BatchNorm1d(3)
        self.flatten, self.head = nn.Flatten(), nn.Linear(36, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.two(self.one(x)) + x
        y = torch.add(torch.relu(y), y)
        return self.head(torch.flatten(y, 1))


class Gated(nn.Module):
    """A gate for each channel, as in squeeze-and-excitation, before a product of two whole maps."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.pool, self.gate = nn.Conv2d(3, 3, 1), nn.AdaptiveAvgPool2d(1), nn.Hardsigmoid()
        self.flatten, self.head = nn.Flatten(), nn.Linear(216, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.one(x)
        y = self.gate(self.pool(y)) * y
        return self.head(self.flatten(torch.mul(y, torch.relu(y))))


class Sequences(nn.Module):
    """Whatever ``layers`` make of a sequence (batch, length, channels), and a head over its mean or its last moment."""

    def __init__(self, *layers: nn.Module, wide: int, last: bool = False, turn: bool = True) -> None:
        super().__init__()
        self.layers, self.head, self.last, self.turn = nn.Sequential(*layers), nn.Linear(wide, 4), last, turn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers(x.transpose(1, 2) if self.turn else x)
        return self.head(y[:, -1] if self.last else y.mean(dim=1))


class Normalized(nn.Module):
    """A normalized sequence that several weights read, and nothing else."""

    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.below, self.norm = nn.Linear(3, 6), nn.LayerNorm(6, **options)
        self.one, self.two, self.head = nn.Linear(6, 5), nn.Linear(6, 5, bias=False), nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.below(x.transpose(1, 2)))
        return self.head((self.one(y) * torch.tanh(self.two(y))).mean(dim=1))


class Recurrent(nn.Module):
    """A GRU above a convolution, read in one of the ways in which people read it."""

    def __init__(self, way: str, layers: int = 1, bias: bool = True) -> None:
        super().__init__()
        self.conv, self.gru = nn.Conv1d(3, 4, 3), nn.GRU(4, 5, layers, batch_first=True, bias=bias)
        self.head, self.way = nn.Linear(5, 4), way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, _ = self.gru(self.conv(x).transpose(1, 2))
        return self.head(states.mean(1) + states[:, -1])


class Recent(Recurrent):
    """Only the last state is looked at, so that no moment before it gets a slope of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "out":
            states, _ = self.gru(self.conv(x).permute(0, 2, 1))
            return self.head(states[:, -1])
        _, last = self.gru(self.conv(x).permute(0, 2, 1))
        return self.head(last[-1] if self.way == "state" else last.squeeze(0))


class Long(nn.Module):
    """An LSTM, read in one of the ways in which people read it."""

    def __init__(self, way: str, layers: int = 1, bias: bool = True) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 5, layers, batch_first=True, bias=bias), nn.Linear(5, 4)
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, (last, _) = self.lstm(x.transpose(1, 2))
        if self.way == "mean":
            return self.head(states.mean(1) + states[:, -1])
        return self.head(last[-1] if self.way == "state" else last.squeeze(0))


class BothWays(nn.Module):
    """A recurrent layer that walks both ways, read in one of the ways in which people read it."""

    shape = (3, 4)

    def __init__(self, kind: type[nn.RNNBase], way: str, wide: int = 5, **options: object) -> None:
        super().__init__()
        self.rnn = kind(3, wide, batch_first=True, bidirectional=True, **options)
        self.kind, self.way, self.head = kind, way, nn.Linear(2 * wide, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, last = self.rnn(x.transpose(1, 2))
        if self.kind is nn.LSTM:
            last, _ = last
        return self.head(self.read(states, last))

    def read(self, states: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        if self.way == "mean":
            return states.mean(1)
        if self.way == "out":
            return states[:, -1, :]
        if self.way == "ends":
            return torch.cat((last[-2], last[-1]), 1)
        if self.way == "pieces":
            return torch.cat([last[-2, :, :], last[-1, :, :]], dim=1) + torch.cat((last[-1], last[-2]), -1)
        if self.way == "pair":
            forward, backward = last
            return torch.cat((forward, forward * backward), 1)
        if self.way == "halves":
            wide = self.rnn.hidden_size
            return torch.cat((states[:, -1, :wide], states[:, 0, wide:]), 1)
        if self.way == "parts":
            forward, backward = states.chunk(2, -1)
            return torch.cat((forward.mean(1), backward[:, 1]), 1)
        return states.mean(1) + states[:, -1] + torch.cat((last[-2], last[-1]), 1)


class Written(nn.Module):
    """Attention written out, in heads, with positions; ``how`` says in which words."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.embed, self.all, self.out = nn.Linear(3, 8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.places, self.norm, self.head = nn.Parameter(torch.randn(1, 12, 8)), nn.LayerNorm(8), nn.Linear(8, 4)
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x.permute(0, 2, 1)) + self.places
        batch, length, wide = x.shape
        if self.how in ("places", "unbound"):
            qkv = self.all(x).reshape(batch, length, 3, 2, wide // 2).permute(2, 0, 3, 1, 4)
            q, k, v = qkv.unbind(0) if self.how == "unbound" else (qkv[0], qkv[1], qkv[2])
        else:
            q, k, v = self.all(x).split(wide, dim=2) if self.how == "split" else self.all(x).chunk(3, dim=-1)
            q, k, v = (one.view(batch, length, 2, wide // 2).transpose(1, 2) for one in (q, k, v))
        if self.how in ("fused", "causal"):
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.how == "causal")
        else:
            share = torch.softmax(q @ k.transpose(-2, -1) / (wide // 2) ** 0.5, dim=-1)
            y = torch.matmul(share * 1.0, v)
        y = y.transpose(1, 2).contiguous().view(x.size(0), length, wide)
        x = self.norm(x + self.out(y)) * 0.5 + 1 - 0.25
        return self.head(x.mean(1))


class Bowed(nn.Module):
    """Functions of each value that are no layers: near 0, and of whole numbers, of which nothing is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.head = nn.Conv1d(3, 6, 1), nn.Linear(72, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(x)
        y = F.softsign(x) + torch.expm1(x) * F.softshrink(x, 0.2) - torch.erf(x) * F.celu(x, 1.3)
        y = y + (x - x.floor()) * (torch.ceil(x) - 0.3 * torch.round(2 * x)) + F.threshold(x, 0.1, 0.5)
        return self.head((y + x.trunc() * F.logsigmoid(x) - F.tanhshrink(x) * F.hardshrink(x, 0.1)).flatten(1))


class Asking(nn.Module):
    """A learned query that attends to a sequence, or a shorter sequence that does."""

    def __init__(self, way: str, dropout: float = 0.0, bias: bool = True) -> None:
        super().__init__()
        self.query, self.way = nn.Parameter(torch.randn(1, 2, 6)), way
        self.norm, self.below, self.short = nn.LayerNorm(6), nn.Conv1d(3, 6, 3), nn.Conv1d(3, 6, 4, 4)
        self.attention = nn.MultiheadAttention(6, 3, dropout, bias, batch_first=True)
        self.head = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        near = self.norm(self.below(x).transpose(1, 2))
        far = self.norm(self.short(x).transpose(1, 2))
        if self.way == "query":
            return self.head(self.attention(self.query.expand(len(x), -1, -1), near, near)[0].flatten(1)[:, :6])
        if self.way == "padded":
            y, _ = self.attention(far, near, near, key_padding_mask=x[:, 0, :10] > 1)
        elif self.way == "named":
            y, _ = self.attention(query=far, key=near, value=torch.tanh(near), need_weights=False)
        else:
            y, _ = self.attention(near, near, torch.tanh(near))
        return self.head(y.mean(1))


class Attending(nn.Module):
    """Attention as torch's own layer, between two turns."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.conv = nn.MultiheadAttention(6, 2, batch_first=True, bias=False), nn.Conv1d(6, 4, 1)
        self.embed, self.head = nn.Linear(3, 6), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x.transpose(1, 2))
        y, _ = self.attention(x, x, x, need_weights=False)
        return self.head(self.conv((x - y).transpose(1, 2)).mean(-1))


class Hiding(Attending):
    """The same over a sequence of which a moment is hidden where its first channel is high."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x[:, 0] > 1
        x = self.embed(x.transpose(1, 2))
        y, _ = self.attention(x, x, x, key_padding_mask=hidden)
        return self.head(self.conv((x - y).transpose(1, 2)).mean(-1))


class Biased(Attending):
    """The same where what is hidden, or added to the scores, is the same for each sample; ``how`` says as what."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.near = how, nn.Parameter(torch.randn(12, 12)) if how == "learned" else None
        self.register_buffer("past", torch.ones(20, 20).triu(1).bool(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, n = self.embed(x.transpose(1, 2)), x.size(2)
        masks = {"learned": self.near, "hidden": self.past[:n, :n]}
        mask = masks.get(self.how, nn.Transformer.generate_square_subsequent_mask(n, device=x.device))
        y, _ = self.attention(x, x, x, attn_mask=mask, need_weights=False)
        return self.head(self.conv((x - y).transpose(1, 2)).mean(-1))


class Seeing(nn.Module):
    """Attention by functions, under masks of the sample and masks that are the same for each."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.head = nn.Linear(3, 24), nn.Linear(8, 4)
        self.near, self.wide = nn.Parameter(torch.randn(2, 12, 12)), nn.Parameter(torch.rand(2, 1, 1) + 1)
        self.register_buffer("past", torch.tril(torch.ones(1, 1, 20, 20)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen, n = (x[:, 0] > -1)[:, None, None, :], x.size(-1)
        q, k, v = self.all(x.transpose(1, 2)).view(-1, n, 3, 2, 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        y = F.scaled_dot_product_attention(q, k, y, self.near)
        y = F.scaled_dot_product_attention(q, y, v, attn_mask=self.past[0, :, :n, :n].bool(), dropout_p=0.0)
        met = q @ k.transpose(-2, -1)
        y = y + met.masked_fill(self.past[:, :, :n, :n] == 0, float("-inf")).softmax(-1) @ v
        y = y + torch.where(self.past[0, 0, :n, :n] > 0, met - self.near, torch.finfo(met.dtype).min).softmax(-1) @ v
        y = y + torch.where(torch.eye(n, device=x.device) == 1, -1e9, met / self.wide).softmax(-1) @ v
        return self.head(y.transpose(1, 2).reshape(-1, n, 8).mean(1))


class Summed(nn.Module):
    """Sums of products by the names of dimensions, of maps and of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, 8), nn.Linear(6, 4)
        self.into, self.heads, self.near = (nn.Parameter(torch.randn(*s) / 3) for s in ((8, 6), (2, 4, 5), (12, 12)))
        self.score = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.embed(x.transpose(1, 2)))
        each = x.view(-1, 12, 2, 4)
        share = torch.einsum("bqhd,bkhd->bhqk", each, each).softmax(-1)
        y = torch.einsum("bhqk, bkhd -> bqhd", share, each).flatten(2)
        y = (
            torch.einsum("nm,bmc->bnc", self.near, x)
            + y
            + torch.einsum("bhl,bqh->bql", share[:, :, 0, :8], each[..., 0])
        )
        few = torch.einsum("blhd,hde->bhle", each, self.heads).sum(2)
        rest = torch.einsum("bl,bld->bd", torch.einsum("bld,d->bl", y, self.score), x)
        both = torch.einsum("bi,bhe->beih", rest, few).mean((1, 3)) * torch.einsum("...ld,...ld->...d", x, y)
        return self.head(torch.einsum("... d, de -> ... e", both, self.into))


class Padded(nn.Module):
    """A recording in two channels beside its padding mask: what that hides counts in no mean."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.mix = nn.Conv1d(2, 16, 3, padding=1), nn.Conv1d(16, 5, 1), nn.Linear(10, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = x[:, 2].unsqueeze(1).clamp(0, max=1)
        seen = mask * self.two(torch.relu(self.one(x[:, :2] * mask)))
        mean = seen.sum(-1) / mask.sum(-1).clamp(min=1)
        return self.head(torch.tanh(self.mix(torch.cat((mean, x[:, 2, -4:], mask.mean(-1)), 1))))


class Weighed(nn.Module):
    """Moments weighed by a score of one channel, whichever comes first, of two branches side by side and a third."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.mix = nn.Conv1d(3, 16, 3, padding=1), nn.Conv1d(3, 8, 1), nn.Conv1d(24, 5, 1)
        self.other, self.score, self.head = nn.Conv1d(3, 5, 1), nn.Conv1d(5, 1, 1), nn.Linear(10, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.mix(torch.cat([self.one(x), self.two(x)], 1)) + self.other(x))
        share = torch.softmax(self.score(y), -1)
        return self.head(torch.cat([(y * share).sum(-1), (share * y).mean(-1)], 1))


class Grouped(nn.Module):
    """GroupNorm within a residual block, behind it, and over features."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.first = nn.Conv1d(3, 16, 3, padding=1), nn.GroupNorm(4, 16)
        self.inner, self.norm = nn.Conv1d(16, 12, 3, padding=1), nn.GroupNorm(4, 12)
        self.two, self.last = nn.Conv1d(12, 16, 3, padding=1), nn.GroupNorm(8, 16)
        self.mix, self.even, self.head = nn.Linear(16, 12), nn.GroupNorm(3, 12), nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(self.one(x)).relu()
        x = (x + self.last(self.two(self.norm(self.inner(x)).tanh()))).relu()
        return self.head(self.even(self.mix(x.mean(2))).tanh())


class Singly(nn.Module):
    """InstanceNorm with weights, within a residual block and behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.first = nn.Conv1d(3, 16, 3, padding=1), nn.InstanceNorm1d(16, affine=True)
        self.inner, self.norm = nn.Conv1d(16, 12, 3, padding=1), nn.InstanceNorm1d(12, affine=True)
        self.two, self.head = nn.Conv1d(12, 16, 3, padding=1), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(self.one(x)).relu()
        return self.head((x + self.two(self.norm(self.inner(x)).tanh())).relu().mean(2))


class Beside(nn.Module):
    """Two branches side by side, each of its own width, with sizes of 1 stretched in sums, products and quotients."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.act = nn.Conv1d(3, 16, 3, padding=1), nn.Conv1d(3, 24, 1), nn.ReLU()
        self.norm, self.flatten, self.head = nn.BatchNorm1d(40), nn.Flatten(), nn.Linear(480, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two = self.act(self.one(x)), self.act(self.two(x))
        two = two / (two.mean(dim=2, keepdim=True) + 1) - two.sum(dim=-1)[:, :, None] * 0.1
        y = torch.cat([one.clip(max=0.5) * one.mean(-1, keepdim=True), two], dim=-2)
        return self.head(self.flatten(self.norm(y + y.mean(-1, keepdim=True))))


class Squeezed(nn.Module):
    """Squeeze-and-excitation as it is written with ``view``, whose sizes a mask may narrow."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.pool, self.head = nn.Conv1d(3, 16, 3), nn.AdaptiveAvgPool1d(1), nn.Linear(16, 4)
        self.fc = nn.Sequential(nn.Linear(16, 8, bias=False), nn.ReLU(), nn.Linear(8, 16, bias=False), nn.Sigmoid())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.conv(x))
        b, c, _ = x.size()
        y = self.fc(self.pool(x).view(b, c)).view(b, c, 1)
        return self.head(self.pool(x * y.expand_as(x)).squeeze(2))


class Bent(nn.Module):
    """Functions of each value, and the largest along dimensions, as they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Conv1d(3, 16, 3), nn.Conv1d(3, 16, 1), nn.Linear(42, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two = F.leaky_relu(self.one(x), 0.2), F.elu(self.two(x), alpha=0.5)
        most, _ = torch.max(one, dim=2)
        spread = torch.sqrt(torch.exp(-most.abs()) + most**2 + torch.square(two.max(-1).values))
        over = torch.tanh(two.transpose(1, 2)).max(1, keepdim=True)[0].flatten(1)
        parts = [spread / math.sqrt(two.size(1)), F.gelu(over, approximate="tanh"), two.amax(1)[:, 2:]]
        return self.head(torch.cat(parts, 1))


class Logs(nn.Module):
    """Roots, powers, waves and logarithms of each value, and what is divided by it, as spectrograms are read."""

    shape = (3, 9, 8)

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3), nn.Linear(16, 4)
        self.power = nn.Parameter(torch.full((1,), 3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.log(x**2 + 0.3) + x.abs().log1p() - (x * x).clamp_min(0.1).log10() + 1 / (1 + x.square())
        x = self.one(x + torch.sin(2 * x) - x.cos()) ** 3 * 0.1 + 2.0
        y = torch.rsqrt(x * x + 1) - 0.5 / x.clamp(0.4) + x.clamp_max(0.5).exp().pow(-1) + torch.log2(x.abs() + 1)
        y = self.two(y).clamp(min=1e-6).pow(self.power).mean((2, 3), keepdim=True).pow(1.0 / self.power)
        return self.head(y.flatten(1) + torch.reciprocal(y.squeeze().pow(0.3) + 1))


class Gains(nn.Module):
    """Parameters and tables that are reckoned with before they meet a map."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.randn(3, 1))
        self.register_buffer("std", torch.rand(3, 1) + 0.5)
        self.one, self.head, self.scale = nn.Conv1d(3, 8, 3), nn.Linear(8, 4), nn.Parameter(torch.tensor(0.7))
        self.gain, self.gate = nn.Parameter(torch.rand(8)), nn.Parameter(torch.randn(1, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.one((x - self.mean) / self.std)).mean(-1)
        x = x * (1 + self.gain) - 2 * F.softplus(self.gate, beta=2) + torch.sigmoid(self.gate) * x
        x = x * self.gain.clamp(0.2, max=0.8) / (self.gate.abs() + 1) + (1 - self.gain.square()) / (x * x + 1)
        return self.head((self.gain - x) * -self.gate[0] / 3) * self.scale.exp().clamp(max=100.0)


class Reckoned(nn.Module):
    """Parameters that are reckoned with one another before they meet a map, and layers that read a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.head, self.scale = nn.Conv1d(3, 8, 3), nn.Linear(8, 4), nn.Parameter(torch.tensor(0.7))
        self.gain, self.gate = nn.Parameter(torch.rand(8) + 0.5), nn.Parameter(torch.randn(1, 8))
        self.up, self.down = nn.Parameter(torch.randn(8, 2)), nn.Parameter(torch.randn(2, 8))
        self.near, self.made = nn.Parameter(torch.randn(10, 10)), nn.Linear(2, 8)
        self.register_buffer("kept", torch.rand(8, 8) > 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = self.up @ self.down
        x = torch.tanh(torch.softmax(F.relu(self.near), dim=-1) @ self.one(x).transpose(1, 2)).mean(1)
        x = x * (self.scale.exp() * self.gain - self.gate) + self.gain / (self.gain + 1) * self.gate.mean(
            1, keepdim=True
        )
        y = F.linear(x, low * self.kept, self.gain + self.gate[0]) + x @ (torch.outer(self.gain, self.gate[0]) / 8)
        few = torch.stack([low[:, 0], self.up.std(1), self.down.sum(0)], 1).var(1, False).expand(2, 8)
        y = y + torch.maximum(few[1], torch.cat([self.gain[:3], self.gate[0, 3:]])) * torch.min(
            self.gain, low.norm(dim=1)
        )
        spread, mean = torch.std_mean(low, 1, keepdim=True)
        y = torch.tanh(y) @ ((low - mean) / (spread + 1)) + torch.tanh(self.made(self.up))[2] * y
        return self.head(y + self.made(self.down[:, 0]).log_softmax(-1))


class Kernels(nn.Module):
    """Convolutions as functions, by what is made of parameters and tables."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(8, 2)), nn.Parameter(torch.randn(2, 27))
        self.rows, self.shift = nn.Parameter(torch.randn(8, 8, 5)), nn.Parameter(torch.randn(8))
        self.each, self.head = nn.Parameter(torch.rand(1, 1, 3, 1)), nn.Linear(8, 4)
        self.register_buffer("blur", torch.tensor([0.25, 0.5, 0.25]).view(1, 1, 1, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(F.conv2d(x, (self.up @ self.down).view(8, 3, 3, 3), self.shift, padding="same"))
        x = F.conv2d(x, self.blur.expand(8, 1, 1, 3) * self.each, stride=(2, 1), padding=1, groups=8)
        spread, mean = torch.var_mean(self.rows, (1, 2), keepdim=True, unbiased=False)
        rows = (self.rows - mean) / torch.sqrt(spread + 1e-5)
        return self.head(torch.tanh(F.conv1d(x.flatten(2), rows, bias=self.shift.abs(), dilation=2)).mean(-1))


class Evened(nn.Conv1d):
    """A convolution whose weight is bent and scaled."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.conv1d(x, self.weight.tanh() * (1 + self.weight.abs()), self.bias, self.stride, self.padding)


class EvenedLinear(nn.Linear):
    """A linear layer likewise."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight * 0.5, self.bias)


class Equalized(nn.Module):
    """Layers that reckon with their own weights: a mask takes their outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.fc = Evened(3, 16, 3), Evened(16, 16, 3), EvenedLinear(16, 12)
        self.head = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.two(torch.tanh(self.one(x)))).mean(-1)
        return self.head(torch.tanh(self.fc(x)))


class Spoken(nn.Module):
    """Statistics over time of maps in which channels are silent, as networks for speech pool them."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv1d(3, 16, 3), nn.Conv1d(16, 16, 3, dilation=2)
        self.mix, self.head = nn.Linear(64, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.two(torch.relu(self.one(x))))
        silent = torch.relu(x - 0.5) * torch.sigmoid(x.mean(2, keepdim=True).repeat(1, 1, x.size(2)))
        spread, mean = torch.std_mean(x, 2, False, keepdim=True)
        near = (
            torch.var_mean(x / (spread + 1), dim=-1, correction=0)[0] + torch.var(silent, dim=2, keepdim=True)[..., 0]
        )
        y = torch.cat([silent.std(-1), x.var(2, False), near, mean.squeeze(-1)], 1)
        return self.head(torch.tanh(self.mix(y)))


class Lengths(nn.Module):
    """Norms of maps, of which some are zero, and vectors of length 1."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 1), nn.Linear(16, 4)

    shape = (3, 9, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(x)
        x = F.normalize(x) * torch.relu(x - 1).norm(2, dim=1, keepdim=True)
        size = torch.norm(x, p=2, dim=(2, 3), keepdim=True)  # of ConvNeXt V2
        y = self.two(x * (size / (torch.linalg.norm(size, dim=1, keepdim=True) + 1e-6)) + x)
        y = y + F.normalize(y, dim=(2, 3))
        y = y.norm(p=2, dim=-1) - torch.linalg.vector_norm(y, 2, dim=(-1,)) * 0.5
        return self.head(F.normalize(y.mean(-1), p=2.0, dim=-1, eps=0.5))


class Extremes(nn.Module):
    """The larger and the smaller one of maps, parameters and numbers, their smooth kin, sides and shares."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv1d(3, 16, 3), nn.Conv1d(3, 16, 3, bias=False)
        self.three, self.head = nn.Conv1d(16, 16, 3), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two = self.one(x), self.two(x)
        y = torch.maximum(one, two) - torch.min(torch.tanh(one), two.mean(-1, keepdim=True)) + one.max(torch.zeros(1))
        y = self.three(y + torch.sign(one) * two + F.softmin(y, dim=-1) + torch.minimum(torch.tensor(0.3), two))
        near = F.cosine_similarity(y, torch.tanh(y.mean(-1, keepdim=True) - 1), dim=1).unsqueeze(1)
        y = F.normalize(y, p=1.0, dim=-1) + y / (y.norm(p=1, dim=2, keepdim=True) + 1) - torch.logsumexp(y, 2, True)
        return self.head((y + near).logsumexp(dim=-1) + torch.linalg.vector_norm(y, math.inf, dim=-1))


class Nearest(nn.Module):
    """How near features are to each row of a table, as heads of prototypes have it, under floors that are learned."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.head = nn.Conv1d(3, 6, 3), nn.Linear(5, 4)
        self.rows, self.low = nn.Parameter(torch.randn(5, 6)), nn.Parameter(torch.randn(6, 1))
        self.wide, self.high = nn.Parameter(torch.rand(5) + 0.5), nn.Parameter(torch.randn(5).abs())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.maximum(self.one(x), self.low).mean(-1)
        far = (x.unsqueeze(1) - self.rows).abs().sum(-1) + (x[:, None] - self.rows[None]).pow(2).mean(2)
        y = torch.exp(-far * self.wide) + F.linear(x, F.normalize(self.rows, p=1, dim=1))
        y = y + F.cosine_similarity(x[:, None], self.rows[None], dim=-1)
        return self.head(torch.minimum(self.high, y) + F.cosine_similarity(self.rows, x.unsqueeze(1), dim=2, eps=0.5))


class Lines(nn.Module):
    """Each channel of a map normalized by itself, as LayerNorm over the length."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Conv1d(3, 16, 3), nn.Conv1d(16, 16, 3), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.two(F.layer_norm(self.one(x), (10,)))).mean(-1))


class Cosine(nn.Module):
    """A head that compares directions, with a bias of its own, beside projections by matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.bias, self.scale = (
            nn.Conv1d(3, 8, 3),
            nn.Parameter(torch.randn(5)),
            nn.Parameter(torch.tensor(2.0)),
        )
        self.weight, self.more = nn.Parameter(torch.randn(5, 8)), nn.Parameter(torch.randn(8, 8))
        self.head = nn.Linear(5, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.one(x).transpose(1, 2) @ self.more).mean(1)
        y = F.linear(F.normalize(y), F.normalize(self.weight, dim=1), bias=self.bias)
        return F.linear(y, F.normalize(self.head.weight, dim=-1)) * self.scale


class Scaled(nn.Module):
    """LayerNorm and RMSNorm as functions, with parameters of the module's own or none."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.mid, self.head = nn.Linear(3, 6), nn.Conv1d(12, 5, 1), nn.Linear(6, 4)
        self.gain, self.shift = nn.Parameter(torch.rand(6) + 0.5), nn.Parameter(torch.randn(6))
        self.whole = nn.Parameter(torch.rand(5, 6) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.below(F.layer_norm(x, (12,)).transpose(1, 2))
        x = F.layer_norm(x, x.shape[-1:], weight=self.gain, bias=self.shift, eps=1e-6)
        x = torch.tanh(F.rms_norm(torch.tanh(x), (6,), self.gain.abs(), 1e-6) - F.rms_norm(x, [6]))
        return self.head(F.layer_norm(self.mid(x), (5, 6), self.whole).mean(1))


class GroupedByHand(nn.Module):
    """GroupNorm and InstanceNorm as functions over planes and features, with parameters of the module's own or none."""

    shape = (3, 9, 8)

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Linear(8, 4)
        self.gain, self.shift = nn.Parameter(torch.rand(8) + 0.5), nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(F.group_norm(self.one(x), 4, self.gain, self.shift, 1e-4))
        x = torch.tanh(F.instance_norm(self.two(F.group_norm(x, 2)), weight=self.gain.exp(), bias=self.shift)).flatten(
            2
        )
        return self.head(F.group_norm(x.transpose(1, 2), 5).mean(1) + torch.group_norm(x.sum(2), 2, bias=self.shift))


class Instances(nn.Module):
    """Each channel of a line by itself, by a function: a mask takes channels."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Conv1d(3, 16, 3), nn.Conv1d(16, 16, 3), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(F.instance_norm(self.one(x)))
        return self.head(torch.tanh(F.instance_norm(self.two(x), eps=1e-3) + 1).mean(-1))


class RMS(nn.Module):
    """RMSNorm as it is written by hand; ``how`` says in which words."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.below, self.weight = nn.Linear(3, 6), nn.Parameter(torch.rand(6) + 0.5)
        self.mid, self.head, self.how, self.eps = nn.Linear(6, 5), nn.Linear(5, 4), how, 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.mid(self.norm(self.below(x.transpose(1, 2))))).mean(1))

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "rsqrt":
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight
        if self.how == "types":
            y = x.float()
            return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x) * self.weight
        if self.how == "norm":
            return self.weight * (x / (x.norm(dim=-1, keepdim=True) * x.shape[-1] ** -0.5 + self.eps))
        return x * (1 / torch.sqrt(torch.mean(x * x, dim=-1, keepdim=True) + self.eps)) * self.weight


class Ranged(nn.Module):
    """Maps stretched to a range of their own, and halves that gate halves."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Conv1d(3, 16, 3), nn.Conv1d(16, 12, 1), nn.Linear(6, 4)
        self.gate, self.three = nn.GLU(dim=1), nn.Conv1d(6, 12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(x)
        low = x.amin(-1, keepdim=True) + torch.min(x, 2, True)[0]
        x = (2 * x - low) / (x.amax(-1, keepdim=True) - low + 3)
        x = self.gate(self.two(x))
        x = F.glu(self.three(x).transpose(1, 2), -1)
        return self.head((x - x.mean((1, 2), keepdim=True) + x.amax((1, 2), keepdim=True)).mean(1))


class Highest(nn.Module):
    """The largest value of each channel, as text networks read convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Conv1d(3, 16, 3), nn.Conv1d(3, 16, 2), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        maps = [F.relu(conv(x)) for conv in (self.one, self.two)]
        return self.head(torch.cat([torch.max(one, dim=2)[0] for one in maps], 1))


class Held(nn.Module):
    """Parameters of its own that meet maps in several forms, and a table of numbers that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Conv1d(3, 8, 1), nn.Linear(8, 4)
        self.scale, self.gain = nn.Parameter(torch.rand(8) + 0.5), nn.Parameter(torch.tensor(1.5))
        self.places, self.token = nn.Parameter(torch.randn(20, 8)), nn.Parameter(torch.randn(8, 1))
        self.register_buffer("table", torch.randn(1, 30, 8))
        self.more = torch.randn(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) * self.scale.view(1, -1, 1)
        x = x.transpose(1, 2) + self.places[2 : x.size(2) + 2]
        first = self.token.transpose(0, 1).unsqueeze(0).expand(len(x), 2, -1)
        x = torch.cat([first, x * self.gain + self.more, self.token.t().repeat(x.shape[0], 1, 1)], dim=1)
        x = torch.tanh(x + self.table[:, : x.size(1)])
        return self.head((x * x.mean(1, keepdim=True).expand_as(x)).mean(1, keepdim=True).squeeze())


def encoder(**options: object) -> nn.Module:
    """torch's own transformer of two layers."""
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8), enable_nested_tensor=False)


def maps(*layers: nn.Module, wide: int, classes: int = 4) -> nn.Module:
    """``layers`` over maps, and a head over the ``wide`` values that come out."""
    net = nn.Sequential(*layers, nn.Flatten())
    net.add_module("head", nn.Linear(wide, classes))
    return net


class Tokens(nn.Module):
    """Kinds beside each other in one sample, of two tables of which one hides a kind, and the mean of what is there."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(20, 6, padding_idx=0), nn.Embedding(5, 6)
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words, places = x[:, 0].long(), x[:, 1].to(torch.int64)
        seen = (words != 0).float().unsqueeze(-1)
        y = self.norm(torch.tanh(self.words(words) + self.places(places))) * seen
        return self.head(y.sum(1) / seen.sum(1).clamp(min=1))


class Sentences(nn.Module):
    """A GRU over the rows of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gru = nn.Embedding(40, 6), nn.GRU(6, 5, batch_first=True)
        self.head = nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.gru(self.embed(x.long()))[0][:, -1])


class Texts(nn.Module):
    """torch's own transformer over tokens, whose padding it does not look at; its dropout is torch's default."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.words, self.encoder, self.head = nn.Embedding(4, 8, 0), encoder(**options), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = x.long()
        y = self.encoder(self.words(words), src_key_padding_mask=words == 0)
        return self.head(y.mean(1))


def adapted(net: nn.Module, where: str) -> nn.Module:
    """``net`` with low-rank adapters inside the layer ``where`` that change what it computes."""
    out = adapters.insert(net, AdapterSpec("lowrank", 2, where=(where,)))
    for key, weight in out.named_parameters():
        if key.endswith("up.weight"):
            nn.init.normal_(weight, 0, 0.3)
    return out


class Edged(nn.Module):
    """Edges as functions put them around maps, beside channels, and off again: of maps, of sequences, of features."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Conv1d(3, 16, 3), nn.Conv1d(16, 16, 3, dilation=2), nn.Conv1d(3, 20, 1)
        self.left, self.head = 4, nn.Linear(26, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.one(F.pad(x, (2, 0))))
        y = torch.tanh(self.two(F.pad(y, [self.left, 0], "constant", 0.5)))[:, :, : x.shape[-1]]
        y = F.pad(y, (0, 0, 1, 3)) + self.three(x)
        y = F.pad(y.transpose(1, 2), (2, 3, -2, 1), value=-0.3).mean(1)
        return self.head(F.pad(y, (0, 1)))


class Mirrored(nn.Module):
    """Edges of a map's own values."""

    shape = (3, 9, 8)

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 3, 3), nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.pad(self.one(x), (2, 1, 0, 3), mode="reflect")
        y = torch.tanh(self.two(F.pad(y, (1, 1, 1, 1), "circular")))
        y = F.pad(y.flatten(2), (3, 2), mode="replicate")
        return self.head(F.pad(y, (1, 0), "reflect")[:, :, 1:13].mean(1))


class Resized(nn.Module):
    """Maps made larger and smaller, by layers and functions."""

    shape = (3, 9, 8)

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Conv2d(3, 16, 3, 2, 1), nn.Conv2d(16, 16, 3), nn.Linear(16, 4)
        self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.one(x))
        y = F.interpolate(y, scale_factor=(3, 2)) - F.interpolate(self.up(y), size=(15, 8), mode="bilinear")
        y = F.interpolate(torch.tanh(self.two(y)), size=(x.shape[-2], 5))
        return self.head(F.interpolate(y.flatten(2), scale_factor=0.4, mode="linear").mean(-1))


class Stepped(nn.Module):
    """A cell that is called moment by moment; ``how`` says what it begins with and how the moments come."""

    def __init__(self, kind: type[nn.RNNCellBase], how: str, **options: object) -> None:
        super().__init__()
        self.below, self.cell, self.how = nn.Linear(3, 5), kind(5, 6, **options), how
        self.first, self.head = nn.Parameter(torch.randn(1, 6)), nn.Linear(6, 4)

    shape = (3, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.below(x.transpose(1, 2))
        both, seen = isinstance(self.cell, nn.LSTMCell), list[torch.Tensor]()
        h = self.begin(x)
        state = (h, torch.zeros_like(h)) if both and h is not None else h
        moments = {"learned": x.transpose(0, 1), "several": x.permute(1, 0, 2), "none": x.unbind(1)}.get(self.how)
        for t in range(x.size(1)):
            state = self.cell(x[:, t, :] if moments is None else moments[t], state)
            seen.append(state[0] if both else state)
        return self.head(torch.stack(seen, dim=1).mean(1) + seen[-1])

    def begin(self, x: torch.Tensor) -> torch.Tensor | None:
        if self.how == "none":
            return None
        if self.how == "learned":
            return self.first.expand(x.size(0), -1)
        if self.how == "several":
            return torch.zeros(2, x.size(0), 6, dtype=x.dtype, device=x.device)[1]
        return x.new_zeros(len(x), 6) if self.how == "new" else torch.zeros(x.size(0), 6, dtype=x.dtype)


class Chosen(nn.Module):
    """One of two maps at each place, and zeros like a map."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Conv1d(3, 8, 3), nn.Conv1d(3, 8, 3), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two = self.one(x), torch.tanh(self.two(x))
        y = torch.where(one > 0.1, one, two) + torch.where(two != 0, torch.zeros_like(two), one)
        return self.head((y + torch.maximum(two, torch.zeros_like(two))).mean(-1))


class Ordered(nn.Module):
    """Rows of tables by whole numbers that are the same for each sample, channels in an order, and lines that turn."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.head, self.far = nn.Conv1d(3, 8, 3), nn.Linear(8, 4), nn.Embedding(9, 2)
        self.rows, self.more = nn.Parameter(torch.randn(5, 8)), nn.Parameter(torch.randn(8, 6))
        self.register_buffer("steep", torch.tensor([0.5, 0.25]).view(2, 1, 1))
        self.turn = nn.Parameter(torch.randn(8, 8))
        self.register_buffer("order", torch.tensor([3, 1, 0, 2, 7, -1, 5, 3]))
        self.register_buffer("named", torch.tensor([[0, 0, 2, 4, 1], [1, 3, 2, 2, 0]]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.roll(torch.tanh(self.one(x))[:, self.order], shifts=(3, -2), dims=(2, 1)).roll(-2, -1)
        x = x.transpose(1, 2) + self.rows.tanh()[self.named.view(-1)]
        x = x * torch.index_select(self.more, 1, self.named[0]).repeat(1, 1).mean(1)
        at = torch.arange(10)
        far = self.far((at[None] - at[:, None]).clamp(-4, 4) + 4).permute(2, 0, 1)
        far = (far - self.steep * (at[None] - at[:, None]).abs()).softmax(-1)
        x = x.mT.mT @ self.turn.T
        return self.head((far[0] @ x + x.flip(2) * far[1].mean(0)[:, None]).mean(1))


def swin(size: int = 16, window: int = 2, **options: object) -> nn.Module:
    """torchvision's Swin transformer, small, whose tables of positions say something."""
    from torchvision.models.swin_transformer import SwinTransformer

    net = SwinTransformer(
        patch_size=[2, 2], embed_dim=8, depths=[2, 1], num_heads=[2, 2], window_size=[window, window], num_classes=4,
        **{"stochastic_depth_prob": 0.0, **options},
    )  # fmt: skip
    for key, weight in net.named_parameters():
        if key.endswith("bias_table"):
            nn.init.normal_(weight)
    net.shape = (3, size, size)
    return net


class Styled(nn.Module):
    """Channels scaled and shifted by halves of what a line reads of them: a mask takes alike in both."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.style = nn.Conv1d(3, 16, 3), nn.Conv1d(16, 16, 3), nn.Linear(16, 32)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.one(x))
        gamma, beta = self.style(x.mean(-1)).chunk(2, dim=1)
        x = (1 + gamma[:, :, None]) * self.two(x) + beta.unsqueeze(-1)
        return self.head(torch.tanh(x).mean(-1))


class Again(nn.Module):
    """A layer over sequences of six channels that is called three times in one pass."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.below, self.layer, self.head = nn.Linear(3, 6), layer, nn.Linear(6, 4)

    shape = (3, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.below(x.transpose(1, 2))
        for _ in range(3):
            if isinstance(self.layer, nn.Sequential):
                x = x + self.layer(x)
            else:
                x = x + self.layer(*[x] * (3 if isinstance(self.layer, nn.MultiheadAttention) else 1))[0]
        return self.head(x.mean(1))


class Strided(nn.Module):
    """Some places of each dimension, and dimensions from their end to their beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Conv2d(3, 8, 1), nn.Conv2d(2, 6, 2), nn.Linear(7, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.one(x))
        y = torch.cat([y[:, :, ::2, 1::2], y[..., 0::2, ::2].flip(2, 3)], 1)[:, ::2]
        y = torch.tanh(self.two(F.pixel_shuffle(y[:, :, 1:], 2))).flatten(2)
        y = torch.flip(y.transpose(1, 2), dims=(1, -1)) * y.transpose(1, 2).flip(1)[:, -1:]
        return self.head(torch.cat([y[:, 3::4].mean(1), y[:, 1:2:3, -1]], 1))


LINE, PLANE, SHORT = (3, 12), (3, 9, 8), BothWays.shape
NETS = {
    "linear": ((5,), lambda: maps(nn.Linear(5, 6), nn.Linear(6, 6, bias=False), wide=6)),
    "batch_norm_of_features": ((5,), lambda: maps(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), wide=6)),
    "conv1d": (LINE, lambda: maps(nn.Conv1d(3, 4, 5, 2, 2), nn.Conv1d(4, 5, 3), wide=20)),
    "conv1d_wide_stride": (LINE, lambda: maps(nn.Conv1d(3, 4, 1), nn.Conv1d(4, 5, 1, 3), wide=20)),
    "conv1d_uneven": ((3, 13), lambda: maps(nn.Conv1d(3, 4, 1), nn.Conv1d(4, 5, 3, 2), wide=30)),
    "conv2d": (PLANE, lambda: maps(nn.Conv2d(3, 4, 3, 1, 1), nn.Conv2d(4, 5, (3, 2), (2, 3), (1, 0)), wide=75)),
    "conv2d_large": (PLANE, lambda: maps(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 5, (5, 4), padding=(2, 1)), wide=315)),
    "depthwise": (PLANE, lambda: maps(nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 3, 2, 1, groups=3), wide=60)),
    "depthwise_even": (PLANE, lambda: maps(nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, (2, 5), (1, 3), (1, 2), 1, 3), wide=90)),
    "depthwise1d": (LINE, lambda: maps(nn.Conv1d(3, 3, 1), nn.Conv1d(3, 3, 5, 1, 2, groups=3), wide=36)),
    "depthwise_wide": ((3, 16, 12), lambda: maps(nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 3, 2, 1, groups=3), wide=144)),
    "few_channels": (  # of which torch adds what BatchNorm needs in float64
        (1, 9, 11),
        lambda: nn.Sequential(
            *(nn.MaxPool2d((3, 4), 2, (1, 2)), nn.BatchNorm2d(1), nn.Hardsigmoid()),
            *(nn.ConvTranspose2d(1, 3, 3, 3, (1, 0)), nn.BatchNorm2d(3), nn.Hardswish()),
            *(nn.MaxPool2d((1, 2), 2, (0, 1)), nn.GELU(), nn.Flatten(), nn.Linear(210, 4)),
        ),
    ),
    "one_place": (PLANE, lambda: maps(nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Hardswish(), wide=4)),
    "grouped": (PLANE, lambda: maps(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 6, 3, 2, 1, groups=2, bias=False), wide=120)),
    "multiplier": (PLANE, lambda: maps(nn.Conv2d(3, 3, 1), nn.Conv2d(3, 6, 3, groups=3), wide=252)),
    "batch_norm": (PLANE, lambda: maps(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), wide=168)),
    "plain_norm": (LINE, lambda: maps(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4, affine=False), wide=40)),
    "max_pool": (PLANE, lambda: maps(nn.Conv2d(3, 4, 1), nn.MaxPool2d(2), wide=64)),
    "max_pool_overlapping": (PLANE, lambda: maps(nn.Conv2d(3, 4, 1), nn.MaxPool2d(3, 2, 1), wide=80)),
    "max_pool1d": (LINE, lambda: maps(nn.Conv1d(3, 4, 1), nn.MaxPool1d(5), wide=8)),
    "max_pool_rounded_up": (
        PLANE, lambda: maps(nn.Conv2d(3, 4, 1), nn.MaxPool2d((2, 3), 2, (0, 1), ceil_mode=True), wide=100)
    ),
    "max_pool1d_rounded_up": (LINE, lambda: maps(nn.Conv1d(3, 4, 1), nn.MaxPool1d(3, 4, ceil_mode=True), wide=12)),
    "average_rounded_up": (PLANE, lambda: maps(nn.Conv2d(3, 4, 1), nn.AvgPool2d(4, 3, 1, ceil_mode=True), wide=48)),
    "average_inside_rounded_up": (
        PLANE, lambda: maps(nn.Conv2d(3, 4, 1), nn.AvgPool2d(2, ceil_mode=True, count_include_pad=False), wide=80)
    ),
    "average_pool": (PLANE, lambda: maps(nn.Conv2d(3, 4, 1), nn.AvgPool2d(3, 2, 1), wide=80)),
    "average_pool1d": (LINE, lambda: maps(nn.Conv1d(3, 4, 1), nn.AvgPool1d(12), wide=4)),
    "global_average": (PLANE, lambda: maps(nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d(1), wide=4)),
    "average_inside": (PLANE, lambda: maps(nn.Conv2d(3, 4, 1), nn.AvgPool2d(3, 2, 1, False, False), wide=80)),
    "adaptive_average": (PLANE, lambda: maps(nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d((3, None)), wide=96)),
    "adaptive_uneven": (PLANE, lambda: maps(nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d((4, 10)), wide=160)),
    "adaptive_wide": ((3, 32, 32), lambda: maps(nn.Conv2d(3, 2, 1), nn.AdaptiveAvgPool2d((9, 11)), wide=198)),
    "adaptive_larger": ((3, 2, 1), lambda: maps(nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d(5), wide=100)),
    "adaptive_max_uneven": (PLANE, lambda: maps(nn.Conv2d(3, 4, 1), nn.AdaptiveMaxPool2d((3, 4)), wide=48)),
    "adaptive_max_larger": (LINE, lambda: maps(nn.Conv1d(3, 4, 1), nn.AdaptiveMaxPool1d(17), wide=68)),
    "adaptive_max": (LINE, lambda: maps(nn.Conv1d(3, 4, 1), nn.AdaptiveMaxPool1d(4), wide=16)),
    "dilated": (PLANE, lambda: maps(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 5, (3, 2), (2, 1), 2, (2, 3)), wide=225)),
    "dilated_wide": (LINE, lambda: maps(nn.Conv1d(3, 4, 5, 1, 4, 2), nn.Conv1d(4, 4, 3, 3, 0, 3), wide=8)),
    "dilated_depthwise": (PLANE, lambda: maps(nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 3, 1, 2, 2, 3), wide=216)),
    "transposed": (LINE, lambda: maps(nn.Conv1d(3, 4, 1), nn.ConvTranspose1d(4, 5, 3, 2, 1, 1), wide=120)),
    "transposed2d": (
        (2, 4, 3),
        lambda: maps(nn.Conv2d(2, 4, 1), nn.ConvTranspose2d(4, 3, (3, 2), (1, 2), (1, 0), bias=False), wide=72),
    ),
    "transposed_short": ((2, 3, 1), lambda: maps(nn.Conv2d(2, 3, 1), nn.ConvTranspose2d(3, 4, 3, 3, (0, 1)), wide=36)),
    "rows": (
        LINE,
        lambda: maps(nn.Conv1d(3, 16, 1), nn.Conv1d(16, 17, 4, padding="same"), nn.Conv1d(17, 16, 5, 2, 2), wide=96),
    ),
    "rows_dilated": (LINE, lambda: maps(nn.Conv1d(3, 16, 1), nn.Conv1d(16, 16, 3, 3, 4, 2), wide=96)),
    "rows2d": (PLANE, lambda: maps(nn.Conv2d(3, 16, 1), nn.Conv2d(16, 18, (3, 2), (2, 3), (1, 0)), wide=270)),
    "rows2d_dilated": (
        PLANE, lambda: maps(nn.Conv2d(3, 16, 1), nn.Conv2d(16, 16, (3, 2), (2, 1), 2, (2, 3)), wide=720)
    ),
    "rows2d_large": (PLANE, lambda: maps(nn.Conv2d(3, 16, 1), nn.Conv2d(16, 17, (5, 4), padding=(2, 1)), wide=1071)),
    "rows_transposed": (LINE, lambda: maps(nn.Conv1d(3, 16, 1), nn.ConvTranspose1d(16, 17, 3, 2, 1, 1), wide=408)),
    "rows_transposed2d": (
        (2, 4, 3), lambda: maps(nn.Conv2d(2, 16, 1), nn.ConvTranspose2d(16, 16, (3, 2), (1, 2), (1, 0)), wide=384)
    ),
    "dropout": (LINE, lambda: maps(nn.Conv1d(3, 4, 3), nn.Dropout(0.3), nn.Identity(), wide=40)),
    "dropout_of_channels": (PLANE, lambda: maps(nn.Conv2d(3, 4, 3), nn.Dropout2d(0.3), wide=168)),
    "dropout_of_moments": (LINE, lambda: Sequences(nn.Linear(3, 6), nn.Dropout1d(0.3), wide=6)),
    "dropout_in_place": (LINE, lambda: maps(nn.Conv1d(3, 4, 3), nn.Dropout(0.3, inplace=True), wide=40)),
    "residual": (LINE, Residual),
    "gated": (PLANE, Gated),
    "zero_pad": (PLANE, lambda: maps(nn.Conv2d(3, 4, 1), nn.ZeroPad2d((1, 0, 2, 1)), nn.Conv2d(4, 2, 3, 2), wide=40)),
    "edges": (LINE, Edged),
    "mirrored_edges": (PLANE, Mirrored),
    "resized": (PLANE, Resized),
    "strided": (PLANE, Strided),
    "shuffled": (PLANE, lambda: maps(nn.Conv2d(3, 8, 3), nn.PixelShuffle(2), nn.Conv2d(2, 3, 3, 3), wide=48)),
    "upsampled": (
        LINE,
        lambda: maps(nn.Conv1d(3, 4, 3, 2), nn.Upsample(scale_factor=3), nn.Upsample(20, mode="linear"), wide=80),
    ),
    "upsampled2d": (
        PLANE,
        lambda: maps(
            nn.Conv2d(3, 2, 3, 3), nn.UpsamplingNearest2d(scale_factor=2), nn.UpsamplingBilinear2d((5, 7)), wide=70
        ),
    ),
    "padding_layers": (
        PLANE,
        lambda: maps(
            nn.Conv2d(3, 4, 1), nn.ConstantPad2d((1, -1, 0, 2), 0.7), nn.ReflectionPad2d((1, 2, 0, 1)), nn.Tanh(),
            nn.ReplicationPad2d((2, 0, 1, 1)), nn.CircularPad2d((0, 1, 2, 0)), nn.Conv2d(4, 2, 3, 4), wide=24,
        ),
    ),
    "padding_layers1d": (
        LINE,
        lambda: maps(
            nn.Conv1d(3, 4, 1), nn.ZeroPad1d((2, 1)), nn.ReflectionPad1d((1, 2)), nn.ReplicationPad1d(1), nn.Tanh(),
            nn.CircularPad1d((0, 3)), nn.ConstantPad1d((0, -2), 0.0), nn.Conv1d(4, 2, 3, 3), wide=14,
        ),
    ),
    "same1d": (LINE, lambda: maps(nn.Conv1d(3, 4, 4, padding="same"), nn.Conv1d(4, 3, 2, 1, "same", 3), wide=36)),
    "same2d": (
        PLANE, lambda: maps(nn.Conv2d(3, 4, (5, 4), padding="same"), nn.Conv2d(4, 3, 3, 1, "valid", 2), wide=60)
    ),
    "same_large": (PLANE, lambda: maps(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 3, (4, 6), padding="same"), wide=216)),
    "same_depthwise": (
        PLANE, lambda: maps(nn.Conv2d(3, 3, (4, 2), 1, "same", 1, 3), nn.Conv2d(3, 3, 2, 1, "same", 2, 3), wide=216)
    ),
    "padding_modes": (
        PLANE,
        lambda: maps(
            nn.Conv2d(3, 4, 3, 2, (1, 2), padding_mode="circular"), nn.Tanh(),
            nn.Conv2d(4, 4, 2, 1, "same", 1, 4, padding_mode="reflect"),
            nn.Conv2d(4, 3, 3, 1, 1, padding_mode="replicate"), wide=75,
        ),
    ),
    "stochastic_depth": (PLANE, lambda: maps(nn.Conv2d(3, 4, 1), dropped(0.4), wide=288)),
    "stochastic_depth_of_sequences": (LINE, lambda: Sequences(nn.Linear(3, 6), dropped(0.4), nn.Tanh(), wide=6)),
    "stochastic_depth_in_convnext": ((3, 16, 16), lambda: convnext(0.3)),
    "weight_norm": (
        LINE,
        lambda: maps(
            lengthened(nn.Conv1d(3, 4, 3)), nn.Tanh(), lengthened(nn.ConvTranspose1d(4, 3, 3), 1), nn.Flatten(),
            lengthened(nn.Linear(36, 8), None), nn.Tanh(), lengthened(nn.Linear(8, 6, bias=False)), wide=6,
        ),
    ),
    "weight_norm_of_planes": (
        PLANE,
        lambda: maps(
            lengthened(nn.Conv2d(3, 4, 3)), nn.Tanh(), lengthened(nn.Conv2d(4, 4, 3, 2, 1, groups=4)), nn.Tanh(),
            lengthened(nn.Conv2d(4, 6, 2, groups=2), 1), lengthened(nn.ConvTranspose2d(6, 2, 2)), wide=24,
        ),
    ),
    "convnext": ((3, 16, 16), lambda: convnext(0.0)),
    "stochastic_depth_of_features": ((5,), lambda: maps(nn.Linear(5, 6), dropped(0.4), wide=6)),
    "linear_of_sequences": (LINE, lambda: Sequences(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5), wide=5)),
    "linear_of_maps": (LINE, lambda: maps(nn.Linear(12, 5), nn.Conv1d(3, 4, 1), nn.Flatten(), wide=20)),
    "sequence_as_map": ((12, 3), lambda: Sequences(nn.Linear(3, 5), nn.Conv1d(12, 4, 1), wide=5, turn=False)),
    "flat_sequence": (LINE, lambda: maps(nn.LayerNorm(12), nn.Linear(12, 2), wide=6)),
    "layer_norm": (LINE, lambda: Sequences(nn.Linear(3, 6), nn.LayerNorm(6), nn.Linear(6, 5), wide=5, last=True)),
    "norm_read_twice": (LINE, Normalized),
    "norm_without_shift_read_twice": (LINE, lambda: Normalized(bias=False)),
    "plain_norm_read_twice": (LINE, lambda: Normalized(elementwise_affine=False)),
    "plain_layer_norm": ((5,), lambda: maps(nn.Linear(5, 6), nn.LayerNorm(6, elementwise_affine=False), wide=6)),
    "group_norm": (PLANE, lambda: maps(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), wide=168)),
    "group_norm_of_features": ((5,), lambda: maps(nn.Linear(5, 6), nn.GroupNorm(3, 6), nn.Tanh(), wide=6)),
    "prelu": (PLANE, lambda: maps(nn.Conv2d(3, 4, 3), nn.PReLU(), nn.Conv2d(4, 4, 1), nn.PReLU(4), wide=168)),
    "prelu_of_features": ((5,), lambda: maps(nn.Linear(5, 6), nn.PReLU(6), nn.Linear(6, 6), nn.PReLU(), wide=6)),
    "instance_norm": (PLANE, lambda: maps(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True), wide=168)),
    "plain_instance_norm": (LINE, lambda: maps(nn.Conv1d(3, 4, 3), nn.InstanceNorm1d(4), nn.ReLU(), wide=40)),
    "tokens": ((2, 7), Tokens),
    "sentences": ((9,), Sentences),
    "softmax": ((5,), lambda: maps(nn.Linear(5, 6), nn.Softmax(dim=-1), wide=6)),
    "softmax_of_maps": (LINE, lambda: maps(nn.Conv1d(3, 4, 1), nn.Softmax(1), nn.LogSoftmax(2), wide=48)),
    "log_softmax": ((5,), lambda: nn.Sequential(nn.Linear(5, 6), nn.LogSoftmax(-1), nn.Linear(6, 4), nn.LogSoftmax(1))),
    "padded": (LINE, Padded),
    "weighed": (LINE, Weighed),
    "beside": (LINE, Beside),
    "held": (LINE, Held),
    "squeezed": (LINE, Squeezed),
    "bent": (LINE, Bent),
    "bowed": (LINE, Bowed),
    "spoken": (LINE, Spoken),
    "ranged": (LINE, Ranged),
    "lengths": (PLANE, Lengths),
    "cosine": (LINE, Cosine),
    "scaled": (LINE, Scaled),
    **{
        f"{kind.__name__}_{how}": (Stepped.shape, lambda kind=kind, how=how: Stepped(kind, how))
        for kind, ways in ((nn.GRUCell, ("zeros", "learned", "none")), (nn.LSTMCell, ("new", "several", "none")))
        for how in ways
    },
    "dropout_again": (
        Again.shape, lambda: Again(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.Tanh(), nn.Dropout1d(0.3)))
    ),
    "dropout_in_attention_again": (
        Again.shape, lambda: Again(nn.MultiheadAttention(6, 2, dropout=0.3, batch_first=True))
    ),
    "dropout_in_gru_again": (Again.shape, lambda: Again(nn.GRU(6, 6, 3, dropout=0.3, batch_first=True))),
    "styled": (LINE, Styled),
    "ordered": (LINE, Ordered),
    "swin": ((3, 16, 16), swin),
    "swin_of_odd_windows": ((3, 14, 14), lambda: swin(14, 3)),
    "stochastic_depth_in_swin": ((3, 12, 12), lambda: swin(12, 4, stochastic_depth_prob=0.3)),
    "RNNCell_zeros": (Stepped.shape, lambda: Stepped(nn.RNNCell, "zeros", bias=False)),
    "RNNCell_none": (Stepped.shape, lambda: Stepped(nn.RNNCell, "none", nonlinearity="relu")),
    "chosen": (LINE, Chosen),
    "reckoned": (LINE, Reckoned),
    "kernels": (PLANE, Kernels),
    "equalized": (LINE, Equalized),
    "extremes": (LINE, Extremes),
    "nearest": (LINE, Nearest),
    "softmin": ((5,), lambda: maps(nn.Linear(5, 6), nn.Softmin(dim=-1), wide=6)),
    "group_norm_by_function": (PLANE, GroupedByHand),
    "instance_norm_by_function": (LINE, Instances),
    "rms_norm": (LINE, lambda: Sequences(nn.Linear(3, 6), nn.RMSNorm(6), nn.Linear(6, 5), wide=5)),
    "plain_rms_norm": ((5,), lambda: maps(nn.Linear(5, 6), nn.RMSNorm(6, 1e-3, elementwise_affine=False), wide=6)),
    **{f"rms_norm_by_{how}": (LINE, lambda how=how: RMS(how)) for how in ("rsqrt", "types", "norm", "root")},
    "layer_norm_of_maps": (PLANE, lambda: maps(nn.Conv2d(3, 4, 3), nn.LayerNorm((4, 7, 6)), nn.ReLU(), wide=168)),
    "layer_norm_of_lines": (LINE, lambda: maps(nn.Conv1d(3, 4, 3), nn.LayerNorm(10, bias=False), nn.Tanh(), wide=40)),
    "logs": (PLANE, Logs),
    "gains": (LINE, Gains),
    "attention": (LINE, Attending),
    **{
        f"attention_{way}": (LINE, lambda way=way: Asking(way.split()[-1]))
        for way in ("learned query", "across padded", "across named", "of others")
    },
    "attention_across_without_bias": (LINE, lambda: Asking("named", bias=False)),
    "dropout_in_attention_across": (LINE, lambda: Asking("padded", 0.3)),
    "adapted_attention_across": (LINE, lambda: adapted(Asking("named"), "attention")),
    "attention_written": (LINE, lambda: Written("out")),
    **{f"attention_{how}": (LINE, lambda how=how: Written(how)) for how in ("places", "unbound", "split")},
    "attention_fused": (LINE, lambda: Written("fused")),
    "attention_causal": (LINE, lambda: Written("causal")),
    **{f"attention_{how}": (LINE, lambda how=how: Biased(how)) for how in ("learned", "hidden", "ahead")},
    "einsum": (LINE, Summed),
    "attention_seen": (LINE, Seeing),
    "padded_attention": ((9,), lambda: Texts(dropout=0.0)),
    "dropout_in_padded_attention": ((9,), Texts),
    "dropout_in_adapted_attention": ((9,), lambda: adapted(Texts(), "encoder.layers.*.self_attn")),
    "adapted_attention": (LINE, lambda: adapted(Attending(), "attention")),
    "adapted_encoder": ((9,), lambda: adapted(Texts(dropout=0.0), "encoder.layers.*.self_attn")),
    "adapted_gru": (LINE, lambda: adapted(Recurrent("mean", 2), "gru")),
    "adapted_lstm": (LINE, lambda: adapted(Long("state", bias=False), "lstm")),
    "encoder": (LINE, lambda: Sequences(nn.Linear(3, 8), encoder(dropout=0.0, activation="gelu"), wide=8)),
    "dropout_in_encoder": (LINE, lambda: Sequences(nn.Linear(3, 8), encoder(dropout=0.2, norm_first=True), wide=8)),
    "gru": (LINE, lambda: Recurrent("mean")),
    "gru_layers": (LINE, lambda: Recurrent("mean", 2, bias=False)),
    "gru_out": (LINE, lambda: Recent("out", 2)),
    "gru_state": (LINE, lambda: Recent("state", 2)),
    "lstm": (LINE, lambda: Long("mean")),
    "lstm_layers": (LINE, lambda: Long("mean", 2, bias=False)),
    "lstm_state": (LINE, lambda: Long("state", 2)),
    "lstm_only": (LINE, lambda: Long("only")),
    "gru_only": (LINE, lambda: Recent("only")),
    "gru_both_mean": (SHORT, lambda: BothWays(nn.GRU, "mean", num_layers=2, bias=False)),
    "gru_both_out": (SHORT, lambda: BothWays(nn.GRU, "out", num_layers=2)),
    "gru_both_ends": (SHORT, lambda: BothWays(nn.GRU, "ends", num_layers=2)),
    "gru_both_halves": (SHORT, lambda: BothWays(nn.GRU, "halves")),
    "gru_both_all": (SHORT, lambda: BothWays(nn.GRU, "all", num_layers=3)),
    "lstm_both_mean": (SHORT, lambda: BothWays(nn.LSTM, "mean", num_layers=2)),
    "lstm_both_out": (SHORT, lambda: BothWays(nn.LSTM, "out", bias=False)),
    "lstm_both_pieces": (SHORT, lambda: BothWays(nn.LSTM, "pieces", num_layers=2, bias=False)),
    "lstm_both_pair": (SHORT, lambda: BothWays(nn.LSTM, "pair")),
    "lstm_both_parts": (SHORT, lambda: BothWays(nn.LSTM, "parts")),
    "rnn_both_all": (SHORT, lambda: BothWays(nn.RNN, "all", num_layers=2)),
    "rnn_both_out": (SHORT, lambda: BothWays(nn.RNN, "out", num_layers=2, bias=False, nonlinearity="relu")),
    "one_moment": ((3, 1), lambda: BothWays(nn.LSTM, "all")),
    "adapted_both_gru": (SHORT, lambda: adapted(BothWays(nn.GRU, "out", num_layers=2), "rnn")),
    "dropout_in_gru": (SHORT, lambda: adapted(BothWays(nn.GRU, "all", num_layers=2, dropout=0.3), "rnn")),
    "dropout_in_lstm": (SHORT, lambda: BothWays(nn.LSTM, "ends", num_layers=3, bias=False, dropout=0.3)),
    "dropout_in_rnn": (SHORT, lambda: adapted(BothWays(nn.RNN, "ends", num_layers=2, dropout=0.3), "rnn")),
    "adapted_both_lstm": (SHORT, lambda: adapted(BothWays(nn.LSTM, "ends", bias=False), "rnn")),
    "far_bounds": (LINE, lambda: maps(nn.Conv1d(3, 4, 1), nn.Hardtanh(-0.5, 1e7), wide=48)),
    "early_straight": (LINE, lambda: maps(nn.Conv1d(3, 4, 1), nn.Softplus(2.0, 0.5), wide=48)),
    "steep_below": (LINE, lambda: maps(nn.Conv1d(3, 4, 1), nn.LeakyReLU(1.5), wide=48)),
    **{
        type(layer).__name__: (LINE, lambda layer=layer: maps(nn.Conv1d(3, 4, 1), layer, wide=48))
        for layer in (
            nn.ReLU6(), nn.Hardtanh(-0.5, 0.7), nn.LeakyReLU(0.1), nn.Sigmoid(), nn.Tanh(), nn.SiLU(), nn.GELU(),
            nn.Hardswish(), nn.ELU(0.7), nn.Softplus(2.0), nn.Hardsigmoid(), nn.ReLU(inplace=True),
            nn.Mish(), nn.SELU(), nn.CELU(0.7), nn.Softsign(), nn.LogSigmoid(), nn.Tanhshrink(), nn.Softshrink(0.2),
            nn.Hardshrink(0.3), nn.Threshold(0.1, -0.2),
        )
    },
}  # fmt: skip
