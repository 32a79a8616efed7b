"""Recurrent layers over sequences that end before others, begun with what is given, and last states of all layers."""

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

LINE, WORDS = (3, 12), (9,)


class Sentiment(nn.Module):
    """Words before the batch, packed, both ways through two layers, as a well-known tutorial has it."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.words, self.drop = nn.Embedding(3, 8, padding_idx=0), nn.Dropout(0.2)
        self.rnn, self.head = kind(8, 6, num_layers=2, bidirectional=True, dropout=0.3), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        text = x.long().t()
        lengths = (x != 0).sum(1).clamp(min=1)
        embedded = self.drop(self.words(text))
        packed = nn.utils.rnn.pack_padded_sequence(embedded, lengths.to("cpu"), enforce_sorted=False)
        _, hidden = self.rnn(packed)
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        return self.head(self.drop(torch.cat((hidden[-2, :, :], hidden[-1, :, :]), dim=1)))


class Packed(nn.Module):
    """Words, packed, of which the states are read in one of the ways in which people read them."""

    def __init__(self, how: str, kind: type[nn.Module] = nn.GRU, ways: int = 1, **options: object) -> None:
        super().__init__()
        self.words, self.how = nn.Embedding(3, 8, padding_idx=0), how
        self.rnn = kind(8, 6, batch_first=True, bidirectional=ways == 2, **options)
        self.score, self.head = nn.Linear(6 * ways, 1), nn.Linear(6 * ways, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.long()
        said = x != 0
        lengths = said.sum(1).clamp(min=1)
        packed = pack_padded_sequence(self.words(x), lengths.cpu(), batch_first=True, enforce_sorted=False)
        out, last = self.rnn(packed)
        total = x.size(1) if self.how in ("mean", "weighed") else None
        out, _ = pad_packed_sequence(out, batch_first=True, total_length=total)
        if self.how == "mean":
            return self.head(out.mean(1) + out[:, -1])
        if self.how == "weighed":
            score = self.score(torch.tanh(out)).masked_fill(~said.unsqueeze(-1), -1e9)
            return self.head((torch.softmax(score, 1) * out).sum(1))
        if self.how == "summed":
            return self.head(out.sum(1) / lengths.unsqueeze(1))
        if self.how == "picked":
            return self.head(out[torch.arange(len(x)), lengths - 1])
        if self.how == "both":
            return self.head(out.sum(1) - last[-1])
        h, c = last
        return self.head(h[0] * c[1] + h.mean(0) + c.permute(1, 0, 2).amax(1) + out.sum(1))


class Begun(nn.Module):
    """A recurrent layer that begins with what the network gives it."""

    def __init__(self, how: str, kind: type[nn.Module] = nn.GRU, layers: int = 1) -> None:
        super().__init__()
        self.rnn, self.how, self.layers = kind(3, 6, layers, batch_first=True), how, layers
        self.first, self.cell = nn.Parameter(torch.randn(layers, 1, 6)), nn.Parameter(torch.randn(6) * 0.3)
        self.start, self.head = nn.Linear(3, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        out, last = self.rnn(x, self.begin(x))
        if self.how == "variable":
            return self.head(last.view(-1, 6) + last.squeeze())
        return self.head(out.mean(1))

    def begin(self, x: Tensor) -> object:
        if self.how == "parameter":
            return self.first.expand(-1, x.size(0), -1).contiguous()
        if self.how == "repeated":
            return self.first.repeat(1, len(x), 1), self.cell.expand(self.layers, len(x), -1).contiguous()
        if self.how == "sample":
            return torch.tanh(self.start(x[:, 0])).unsqueeze(0)
        if self.how == "zero cells":
            h = self.start(x.mean(1)).unsqueeze(0).repeat(self.layers, 1, 1)
            return h, torch.zeros(self.layers, x.size(0), 6)
        if self.how == "one more dimension":
            return torch.tanh(self.start(x))[None, :, 0]
        if self.how == "variable":
            return Variable(torch.zeros(self.layers, x.size(0), 6))
        if self.how == "zeros and a parameter":
            zeros = torch.zeros(self.layers, x.size(0), 6, device=x.device)
            return zeros + self.first, self.cell + zeros
        if self.how == "as before":  # as the first tutorials had it
            weight = next(self.parameters()).data
            return Variable(weight.new(self.layers, len(x), 6).zero_()), weight.new_full((self.layers, len(x), 6), 0.5)
        if self.how == "ones":
            first = self.first.repeat_interleave(x.size(0), dim=1)
            return first * torch.ones(self.layers, x.size(0), 6), torch.full((self.layers, x.size(0), 6), 0.1)
        if self.how == "stacked":
            return torch.stack([self.start(x[:, i]) for i in range(self.layers)], 0)
        zeros = torch.zeros(self.layers, x.size(0), 6).requires_grad_().to(x.device)
        return zeros.detach(), torch.zeros_like(zeros).detach()


class Translating(nn.Module):
    """An encoder, packed or not, of which a decoder goes on with the last states."""

    def __init__(self, kind: type[nn.Module], packed: bool = False, ways: int = 1) -> None:
        super().__init__()
        self.words, self.packed, self.ways = nn.Embedding(3, 8), packed, ways
        self.encoder = kind(8, 5, 2, batch_first=True, bidirectional=ways == 2)
        self.decoder, self.head = kind(8, 5, 2, batch_first=True, bidirectional=ways == 2), nn.Linear(5 * ways, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.long()
        y = self.words(x)
        if self.packed:
            y = pack_padded_sequence(y, (x != 0).sum(1).clamp(min=1).cpu(), batch_first=True, enforce_sorted=False)
        _, hidden = self.encoder(y)
        return self.head(self.decoder(self.words(x[:, :4]), hidden)[0][:, -1])


class Last(nn.Module):
    """Last states of all layers and both directions."""

    def __init__(self, how: str, kind: type[nn.Module] = nn.LSTM) -> None:
        super().__init__()
        self.rnn, self.how = kind(3, 6, 2, batch_first=True, bidirectional=True), how
        self.cell, self.wide, self.head = nn.LSTMCell(3, 6), nn.Linear(24, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        out, (h, c) = self.rnn(x)
        if self.how == "viewed":
            h = h.view(2, 2, x.size(0), 6)
            return self.head(h[-1, 0] + h[-1][1] + c.view(2, 2, -1, 6)[0].mean(0))
        if self.how == "flat":
            return self.head(self.wide(h.transpose(0, 1).reshape(len(x), -1)) + c.sum(0))
        if self.how == "joined":
            return self.head(self.wide(torch.cat([h[i] for i in range(4)], dim=1)) + c[-1] + out[:, 3, :6])
        h, c = h[0], c[2]
        for t in range(3):
            h, c = self.cell(x[:, t], (h, c))
        return self.head(h + c)


BEGUN = ("repeated", "zero cells", "zeros", "zeros and a parameter", "as before", "ones")
NETS = {
    **{f"sentiment by {kind.__name__}": (WORDS, lambda kind=kind: Sentiment(kind)) for kind in (nn.LSTM, nn.GRU)},
    **{
        f"packed, {how}": (WORDS, lambda how=how: Packed(how))
        for how in ("mean", "weighed", "summed", "picked", "both")
    },
    "packed, summed both ways": (WORDS, lambda: Packed("summed", nn.LSTM, 2)),
    "packed, weighed both ways": (WORDS, lambda: Packed("weighed", nn.RNN, 2, num_layers=2)),
    "packed, cells": (WORDS, lambda: Packed("cells", nn.LSTM, num_layers=2, dropout=0.3)),
    **{
        f"begun, {how}": (LINE, lambda how=how: Begun(how))
        for how in ("parameter", "sample", "one more dimension", "variable")
    },
    "begun, parameter, rnn": (LINE, lambda: Begun("parameter", nn.RNN, 2)),
    "begun, stacked": (LINE, lambda: Begun("stacked", nn.GRU, 2)),
    **{f"begun, {how}": (LINE, lambda how=how: Begun(how, nn.LSTM, 2)) for how in BEGUN},
    "translating": (WORDS, lambda: Translating(nn.LSTM)),
    "translating, packed both ways": (WORDS, lambda: Translating(nn.LSTM, True, 2)),
    "translating, packed": (WORDS, lambda: Translating(nn.GRU, True)),
    **{f"last states, {how}": (LINE, lambda how=how: Last(how)) for how in ("viewed", "flat", "joined", "cells")},
}
