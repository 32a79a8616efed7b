"""More networks as people write them, by what each is about."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LINE, WORDS = (3, 12), (9,)


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


NETS = {
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
