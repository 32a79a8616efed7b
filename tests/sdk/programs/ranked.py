"""Networks that put values in their order, add them up, and merge the batch with time."""

import torch
from torch import Tensor, nn

LINE, WORDS = (3, 12), (9,)


class Ranked(nn.Module):
    """Maps of which values are chosen by their order, in one of the ways in which people do it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.conv, self.head, self.how = nn.Conv1d(3, 6, 3, padding=1), nn.Linear(6, 4), how
        self.apart = nn.Unflatten(2, (4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.read(self.conv(x)))

    def read(self, x: Tensor) -> Tensor:
        if self.how == "k-max":
            places = x.topk(3, dim=2)[1].sort(dim=2)[0]
            return (x.gather(2, places) * torch.tensor([1.0, 2.0, 3.0])).sum(2)
        if self.how == "topk":
            values, _ = torch.topk(x, 4, dim=-1)
            return values.mean(-1) + x.topk(2, 2, largest=False).values[:, :, 1]
        if self.how == "sort":
            return (torch.sort(x, dim=2, descending=True)[0] * torch.arange(12.0)).mean(2) + x.sort().values[:, :, 3]
        if self.how == "median":
            return x.median(dim=2).values + torch.kthvalue(x, 4, 2)[0] + x.median(2, keepdim=True)[0].squeeze(2)
        if self.how == "ties":
            return (torch.relu(x).topk(5, 2).values * torch.arange(1.0, 6.0)).sum(2)
        if self.how == "sums":
            return torch.cumsum(x, dim=2).amax(2) + x.transpose(1, 2).cumsum(1).mean(1) * x[:, 0].cumsum(-1).mean(
                1, keepdim=True
            )
        if self.how == "sums alone":  # so that a mask takes channels
            return x.cumsum(2).amax(2)
        if self.how == "deviation":
            return x.std(2)
        if self.how == "ends":
            most = x.max(dim=2).values
            ends = x.split(5, 2)[-1].mean(2) + x.chunk(3, dim=2)[-2].mean(2) + torch.std_mean(x, 2)[-1]
            return (
                most.view(len(most), -1).view(-1, *(1,) * (most.dim() - 2), 6)
                + ends * x.max(2)[-2].sigmoid()
                + most.unbind(1)[-1][:, None]
            )
        if self.how == "sizes":
            chosen = x.gather(dim=2, index=x.topk(2, dim=2)[1]).squeeze(2)
            ordered = torch.take_along_dim(x, x.argsort(2), 2)
            pairs = self.apart(torch.swapaxes(ordered, 1, 2).transpose(2, 1))
            return torch.tile(chosen.view(len(chosen), *chosen.shape[1:])[:, :, :1], (3,)).mean(2) + pairs.amax((2, 3))
        if self.how == "scattered":
            gate = x.mean(2)
            values, places = gate.topk(2, dim=-1)
            share = torch.full_like(gate, float("-inf")).scatter(-1, places, values)
            return torch.softmax(share, -1) * x.amax(2) + torch.zeros_like(gate).scatter(1, places, 0.5)
        gate = x.mean(2)  # which experts are asked
        least = gate.topk(2, 1)[0][:, 1:]
        return torch.softmax(gate.masked_fill(gate < least, -1e9), 1) * x.amax(2)


class Graph(nn.Module):
    """Convolutions over a graph: features of each node, mixed by how near nodes are."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.one, self.two, self.head, self.how = nn.Linear(3, 8), nn.Linear(8, 6), nn.Linear(6, 4), how
        self.register_buffer("near", torch.softmax(torch.randn(12, 12), 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        if self.how == "kept":  # to be looked at
            self.share = torch.softmax(self.one(x) @ self.one(x).mT, 2)
            return self.head(torch.relu(self.two(self.share @ self.one(x))).mean(1))
        if self.how == "named":
            x = torch.relu(torch.einsum("nm,bmc->bnc", self.near, self.one(x)))
        else:
            x = torch.relu(self.near @ self.one(x))
        return self.head(torch.relu(self.two(self.near @ x)).mean(1))


class TimeDistributed(nn.Module):
    """A module over each step, as people write it who come from Keras."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        y = self.module(x.contiguous().view(-1, x.size(-1)))
        return y.contiguous().view(x.size(0), -1, y.size(-1))


class Merged(nn.Module):
    """Batch and time as one, and apart again."""

    def __init__(self, how: str) -> None:
        super().__init__()
        each = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 6))
        self.each, self.how, self.norm = TimeDistributed(each), how, nn.LayerNorm(6)
        self.gru, self.head = nn.GRU(6, 6, batch_first=True), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.each(x.transpose(1, 2))
        b, t, c = x.shape
        if self.how == "gru":
            return self.head(self.gru(x)[0][:, -1])
        if self.how == "flatten":
            return self.head(x.flatten(0, 1)).view(-1, t, 4).amax(1)
        y = x.reshape(b * t, c)
        return self.head(torch.tanh(self.norm(y)) * y + y).view(b, t, 4).mean(1)


NETS = {
    **{
        how: (LINE, lambda how=how: Ranked(how))
        for how in (
            "k-max",
            "topk",
            "sort",
            "median",
            "ties",
            "sums",
            "sums alone",
            "experts",
            "scattered",
            "ends",
            "sizes",
        )
    },
    **{f"graph, {how}": (LINE, lambda how=how: Graph(how)) for how in ("product", "named", "kept")},
    **{f"merged, {how}": (LINE, lambda how=how: Merged(how)) for how in ("gru", "flatten", "sizes")},
}
