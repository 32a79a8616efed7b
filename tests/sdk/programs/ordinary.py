"""More networks as people write them, by what each is about."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

LINE, WORDS, IMAGE = (3, 12), (9,), (3, 12, 12)


class AttentionPool(nn.Module):
    """A learned query weighs the moments of a sequence, written in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.embed, self.query, self.how = nn.Linear(3, 8), nn.Parameter(torch.randn(1, 1, 8) * 0.2), how
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True) if how == "layer" else None
        self.key, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.transpose(1, 2))
        if self.attention is not None:
            return self.head(self.attention(self.query.expand(len(x), -1, -1), x, x, need_weights=False)[0].squeeze(1))
        if self.how == "function":
            query = self.query.repeat(x.size(0), 1, 1)
            return self.head(F.scaled_dot_product_attention(query, self.key(x), x)[:, 0])
        if self.how == "vector":
            share = (self.key(x) @ self.query[0, 0]).softmax(1)
            return self.head((share.unsqueeze(-1) * x).sum(1))
        return self.head((torch.softmax(x @ self.query.transpose(1, 2), 1) * x).sum(1))


class OneByOne(nn.Module):
    """Words, or numbers, of which each is taken from the sample."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.words, self.whole, self.head, self.how = nn.Embedding(3, 8), nn.Linear(9, 4), nn.Linear(8, 4), how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "last":
            return self.head(self.words(x.long())[:, -1] + self.words(x.long()[:, -1]))
        if self.how == "each":
            whole, words = 0, x.long()
            for t in range(x.shape[1]):
                whole = whole + self.words(words[:, t]) * (t + 1)
            return self.head(whole)
        return self.whole(x) * x[:, -1].unsqueeze(1) + self.head(torch.stack([x[:, i] for i in range(8)], 1))


class Twins(nn.Module):
    """Two views of a sample by one body, and a number that says how near they are, in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.body, self.both, self.near = nn.Linear(18, 8), nn.Linear(8, 4), nn.Linear(1, 4)
        self.towards, self.scale, self.shift = (
            nn.Parameter(torch.randn(8) * 0.3),
            nn.Parameter(torch.tensor(0.7)),
            nn.Parameter(torch.ones(1)),
        )
        self.one, self.drop, self.how = nn.Linear(8, 1), nn.Dropout(0.3), how

    def forward(self, x: Tensor) -> Tensor:
        a, b = (torch.tanh(self.body(half.flatten(1))) for half in x.chunk(2, 2))
        return self.both(a - b) + self.near(self.nearness(a, b).unsqueeze(-1))

    def nearness(self, a: Tensor, b: Tensor) -> Tensor:
        if self.how == "sizes":
            return (a - b).abs().sum(1)
        if self.how == "cosine":
            return F.cosine_similarity(a, b)
        if self.how == "norm":
            return torch.norm(a - b, dim=1) + a.std(1) - b.mean(1)
        if self.how == "extremes":
            return a.max(1)[0] / (2 + b.amin(1)) + a.logsumexp(1) - torch.maximum(a[:, 1], b[:, 2])
        if self.how == "towards":
            return torch.sigmoid(a @ self.towards * self.scale + self.shift)
        if self.how == "squeezed":
            return self.drop(self.one(a).squeeze(1)) * self.one(b).view(-1) - self.one(a * b).flatten()
        if self.how == "products":
            return torch.bmm(a.unsqueeze(1), b.unsqueeze(2)).squeeze(2).squeeze(1)
        return torch.einsum("bi,bi->b", a, b) + (a[:, 0] > 0).float()


class Bounded(nn.Module):
    """Maps that are bounded by parameters, tables and other maps, mixed and chosen among."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.conv, self.head, self.how = nn.Conv1d(3, 6, 3, padding=1), nn.Linear(72, 4), how
        self.wide, self.high = nn.Parameter(torch.rand(6, 1) * 0.5 + 0.1), nn.Parameter(torch.tensor(0.3))
        self.register_buffer("low", torch.linspace(-0.5, 0.4, 12))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.bounded(self.conv(x)).flatten(1))

    def bounded(self, x: Tensor) -> Tensor:
        mean = x.mean(2, keepdim=True)
        if self.how == "clamped":
            return x.clamp(-self.wide, self.wide) * torch.clamp(x, min=self.low, max=self.high) + x.clamp(max=mean)
        if self.how == "chosen":
            y = torch.where(x > mean, x, self.wide * 1.5) + torch.where(x < self.low, self.low, x * self.high)
            return y + x.where(self.wide > x, mean) * (x <= self.high)
        if self.how == "mixed":
            y = torch.lerp(x, x.tanh(), torch.sigmoid(self.wide)) + torch.lerp(self.wide, x, self.high)
            return torch.addcmul(y, self.wide, x, value=0.5) - torch.addcdiv(x, mean, 2 + x.abs()).add(x, alpha=0.3)
        if self.how == "multiplied":
            return x + x.prod(1, keepdim=True) - torch.prod(x[:, :3], dim=1)[:, None] * torch.ones_like(x)
        if self.how == "quantized":
            return x + ((x / self.wide).round() * self.wide - x).detach()
        y = x.movedim(1, 2).movedim(-1, 1).narrow(1, 1, 5).view_as(x[:, 1:])
        return torch.cat(
            [y.select(1, 0)[:, None], x[:, :1].tile(1, 3, 1) + torch.full_like(x[:, :3], 0.2), y[:, :2]], 1
        )


class Responding(nn.Module):
    """Local response normalization, as AlexNet had it, and a channel shuffle, as ShuffleNet has it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.norm = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=2), nn.LocalResponseNorm(3, 0.2)
        self.shuffle, self.head = nn.ChannelShuffle(2), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.norm(F.relu(self.one(x))), 2)
        return self.head(F.local_response_norm(self.shuffle(self.two(x)), 2).mean((2, 3)))


class Spoken(nn.Module):
    """Words, padded, by a GRU, of which the states are weighed, or the last one is taken by the number of words."""

    def __init__(self, how: str, ways: int = 1) -> None:
        super().__init__()
        self.words, self.gru = (
            nn.Embedding(3, 8, padding_idx=0),
            nn.GRU(8, 6, batch_first=True, bidirectional=ways == 2),
        )
        self.score, self.head, self.how = nn.Linear(6 * ways, 1), nn.Linear(6 * ways, 4), how

    def forward(self, x: Tensor) -> Tensor:
        x = x.long()
        said, (out, _) = x != 0, self.gru(self.words(x))
        if self.how == "weighed":
            score = self.score(out).squeeze(-1).masked_fill(~said, -1e9)
            return self.head(torch.einsum("bl,bld->bd", score.softmax(-1), out))
        last = said.sum(1) - 1
        if self.how == "picked":  # of no word at all the last one there is
            return self.head(out[torch.arange(len(x)), last] + out[torch.arange(x.size(0)), (last * 0).long()])
        at = last.clamp(min=0).long().view(-1, 1, 1).expand(-1, 1, out.size(-1))
        return self.head(out.gather(1, at).squeeze(1) + torch.gather(out[:, 0], 1, x[:, :6]))


class Apart(nn.Module):
    """Two halves of a sample by one body, and how far they are apart."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveMaxPool1d(1), nn.Flatten())
        self.far, self.head = nn.PairwiseDistance(p=1, keepdim=True), nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.body(x[:, :, :6]), self.body(x[:, :, 6:])
        return self.head(torch.cat([torch.abs(a - b), F.pairwise_distance(a, b, keepdim=True), self.far(a, b)], 1))


class Again(nn.Module):
    """One block for both halves of a sample, or for each moment, which keeps statistics of all that it has seen."""

    def __init__(self, momentum: float | None) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Conv1d(3, 6, 3, padding=1), nn.BatchNorm1d(6, momentum=momentum), nn.ReLU())
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.block(x[:, :, :6]).mean(2), self.block(x[:, :, 6:]).amax(2)
        return self.head(torch.cat([one * other, torch.abs(one - other)], 1))


class StateSpace(nn.Module):
    """A diagonal state space: for each channel a kernel as long as the sample, made of few parameters."""

    def __init__(self, wide: int = 3, states: int = 4) -> None:
        super().__init__()
        self.rate, self.step = nn.Parameter(torch.zeros(wide, states)), nn.Parameter(torch.rand(wide) - 2)
        self.read, self.past = nn.Parameter(torch.randn(wide, states)), nn.Parameter(torch.randn(wide))
        self.out, self.head = nn.Linear(wide, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        long = x.size(-1)
        decay = -torch.exp(self.rate) * torch.exp(self.step).unsqueeze(-1)
        powers = torch.exp(decay.unsqueeze(-1) * torch.arange(long, device=x.device))
        kernel = torch.einsum("hn,hnl->hl", self.read * (torch.exp(decay) - 1), powers)
        y = F.conv1d(F.pad(x, (long - 1, 0)), kernel.flip(-1).unsqueeze(1), groups=x.size(1))
        return self.head(torch.relu(self.out(F.gelu(y + x * self.past.unsqueeze(-1)).transpose(1, 2))).mean(1))


class Spectral(nn.Module):
    """Layers whose weights are divided by their largest singular value, the head's too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = spectral_norm(nn.Conv1d(3, 6, 3, padding=1)), nn.BatchNorm1d(6)
        self.second = spectral_norm(nn.Conv1d(6, 8, 3, padding=1, bias=False), n_power_iterations=3)
        self.drop, self.head = nn.Dropout(0.2), spectral_norm(nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.second(torch.relu(self.norm(self.first(x)))))
        return self.head(self.drop(x.mean(2)))


class Named(nn.Module):
    """All that a layer reads is given to it by name."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.conv = nn.Embedding(3, 6), nn.Conv1d(6, 6, 3, padding=1)
        self.norm, self.drop = nn.BatchNorm1d(6), nn.Dropout(0.2)
        self.attend = nn.MultiheadAttention(6, 2, batch_first=True, dropout=0.1)
        self.gru, self.head = nn.GRU(6, 6, 2, batch_first=True, dropout=0.2), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(input=self.conv(input=self.words(input=x.long()).transpose(1, 2)))
        y = self.drop(input=y.relu()).transpose(1, 2)
        y = y + self.attend(key=y, value=y, query=y, need_weights=False)[0]
        return self.head(input=self.gru(input=y)[0].mean(1))


class Heard(nn.Module):
    """The logarithm of energies in bands that a buffer holds: of weights drawn at random there is none."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.rand(5, 3))
        self.conv, self.norm, self.head = nn.Conv1d(5, 8, 3), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.log(self.bank @ x.square() + 1e-3)
        return self.head(torch.relu(self.norm(self.conv(x))).mean(2))


NETS = {
    "energies": (LINE, Heard),
    "called by names": (WORDS, Named),
    "spectral_norm": (LINE, Spectral),
    "state space": (LINE, StateSpace),
    "one block for both": (LINE, lambda: Again(0.1)),
    "one block for both, means": (LINE, lambda: Again(None)),
    "halves apart": (LINE, Apart),
    "words weighed both ways": (WORDS, lambda: Spoken("weighed", 2)),
    **{f"words {how}": (WORDS, lambda how=how: Spoken(how)) for how in ("picked", "gathered")},
    "local responses": (IMAGE, Responding),
    **{
        f"bounds, {how}": (LINE, lambda how=how: Bounded(how))
        for how in ("clamped", "chosen", "mixed", "multiplied", "quantized", "moved")
    },
    **{
        f"attention pool by {how}": (LINE, lambda how=how: AttentionPool(how))
        for how in ("layer", "function", "vector", "product")
    },
    **{f"words one by one, {how}": (WORDS, lambda how=how: OneByOne(how)) for how in ("last", "each", "numbers")},
    **{
        f"twins by {how}": (LINE, lambda how=how: Twins(how))
        for how in ("sizes", "cosine", "norm", "extremes", "towards", "squeezed", "products", "sums")
    },
}
