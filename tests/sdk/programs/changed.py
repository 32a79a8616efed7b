"""Networks that change values in place, and reckon with whole numbers and with what masks say together."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LINE = (3, 12)
HOW: dict[str, Callable[[Tensor], Tensor]] = {}


def named(name: str) -> Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]]:
    """Keeps what a network does with a map (N, 6, 12) under a name."""

    def keep(how: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        HOW[name] = how
        return how

    return keep


@named("filled")
def filled(x: Tensor) -> Tensor:
    """Answers that are put into zeros one by one."""
    out = torch.zeros(x.size(0), 5, 6).to(x.device, x.dtype)
    for t in range(5):
        out[:, t] = torch.tanh(x[:, :, t])
    return out.mean(1)


@named("filled, moments first")
def filled_moments_first(x: Tensor) -> Tensor:
    out = torch.empty(12, len(x), 6)
    for t in range(12):
        out[t] = torch.tanh(x[:, :, t])
    return out.mean(0)


@named("filled, read between")
def filled_read_between(x: Tensor) -> Tensor:
    out = torch.zeros(x.size(0), 5, 6)
    for t in range(1, 5):
        out[:, t] = torch.tanh(x[:, :, t]) + out[:, t - 1] * 0.5
    return out.mean(1)


@named("shifted")
def shifted(x: Tensor) -> Tensor:
    """A piece of the channels one moment on, and one back, as temporal shift modules have it."""
    y = torch.zeros_like(x)
    y[:, :2, :-1] = x[:, :2, 1:]
    y[:, 2:4, 1:] = x[:, 2:4, :-1]
    y[:, 4:] = x[:, 4:]
    return y.amax(2)


@named("pieces")
def pieces(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, :, 2:5] = x[:, :, 3:6] * 2
    y[..., 0] = y[..., 1]
    y[:, :, -1] = 0.5
    return y.mean(2)


@named("added to a piece")
def added_to_a_piece(x: Tensor) -> Tensor:
    y = x.clone()
    y[..., 0] += y[..., 1]
    return y.amax(2)


@named("masked")
def masked(x: Tensor) -> Tensor:
    y = x * 1.0
    y[y < -1] = 0.0
    y.masked_fill_((y > 1) & (y < 2), 1.0)
    return y.mean(2)


@named("scattered")
def scattered(x: Tensor) -> Tensor:
    gate = x.mean(2)
    chosen = torch.zeros_like(gate)
    chosen.scatter_(1, gate.topk(2, 1)[1], 1.0)
    return gate * chosen + x.index_fill(2, torch.tensor([0, 3]), 0.0).amax(2)


@named("by methods")
def by_methods(x: Tensor) -> Tensor:
    y = x.mean(2).to(x)
    same = y
    y.add_(x.amax(2)).mul_(0.5).clamp_(-1, 1)
    y.sub_(x.mean(2), alpha=0.5)
    return y + same


@named("numbers")
def numbers(x: Tensor) -> Tensor:
    """Where the largest value is, softly, and moments weighed by their number."""
    where = (F.softmax(x, 2) * torch.arange(x.shape[-1], device=x.device)).sum(2)
    return where + (x * torch.arange(12).view(1, 1, -1)).mean(2) + (torch.arange(6)[None, :, None] * x).mean(2)


@named("lengths")
def lengths(x: Tensor) -> Tensor:
    """A mean over as many moments as a sample has."""
    many = (x[:, 0] > 0).sum(1)
    there = torch.arange(x.size(2), device=x.device)[None, :] < many[:, None]
    also = torch.arange(x.size(2)).expand(len(x), x.size(2)) < many.unsqueeze(1)
    return (x * (there & also).unsqueeze(1)).sum(2) / many.clamp(min=1).unsqueeze(1)


@named("masks together")
def masks_together(x: Tensor) -> Tensor:
    between, beyond = (x > 0) & (x < 1), torch.logical_or(x > 1, x < -1)
    return x.masked_fill(beyond, 0).sum(2) + (x * between).sum(2) + (between ^ beyond).any(2).float() * x.mean(2)


@named("largest place")
def largest_place(x: Tensor) -> Tensor:
    most = F.one_hot(x.mean(2).argmax(1), 6).float()
    return most * x.amax(2) + F.one_hot(x.argmin(2), 12).float().mean(2)


@named("windows")
def windows(x: Tensor) -> Tensor:
    return x.unfold(2, 4, 2).mean(-1).amax(2) + x.unfold(2, 3, 3).amax(-1).mean(2) + torch.diff(x, dim=2).amax(2)


@named("triangles")
def triangles(x: Tensor) -> Tensor:
    met = x.transpose(1, 2) @ x
    return ((torch.tril(met) - torch.triu(met, 1)) @ x.transpose(1, 2)).mean(1)


class Changed(nn.Module):
    """A convolution, and what is done with its map."""

    def __init__(self, how: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.head, self.how = nn.Conv1d(3, 6, 3, padding=1), nn.Linear(6, 4), how

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.how(self.conv(x)))


NETS = {f"changed, {name}": (LINE, lambda how=how: Changed(how)) for name, how in HOW.items()}
