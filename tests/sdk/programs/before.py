"""Networks whose sequences stand before the batch, (length, batch, width), as torch reads them by default."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LINE, WORDS, IMAGE = (3, 12), (9,), (3, 12, 12)


class Waves(nn.Module):
    """Waves of the places, for sequences before the batch."""

    def __init__(self, wide: int, longest: int = 20) -> None:
        super().__init__()
        at, rate = torch.arange(longest).unsqueeze(1), torch.exp(torch.arange(0, wide, 2) * (-math.log(1e4) / wide))
        waves = torch.zeros(longest, 1, wide)
        waves[:, 0, 0::2], waves[:, 0, 1::2] = torch.sin(at * rate), torch.cos(at * rate)
        self.register_buffer("waves", waves)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x + self.waves[: x.size(0)])


class Translated(nn.Module):
    """torch's own encoder over words with waves, as its tutorial has it."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.waves, self.head = nn.Embedding(3, 8), Waves(8), nn.Linear(8, 4)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.1), 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.waves(self.words(x.long().t()) * math.sqrt(8))
        return self.head(self.encoder(x).mean(0))


class Columns(nn.Module):
    """The columns of a picture, walked both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.rnn = (
            nn.Conv2d(3, 4, 3, stride=2, padding=1),
            nn.LSTM(24, 6, 2, dropout=0.2, bidirectional=True),
        )
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv(x))
        b, c, h, w = x.size()
        out, _ = self.rnn(x.view(b, c * h, w).permute(2, 0, 1))
        return self.head(out[-1])


class Before(nn.Module):
    """A sequence before the batch, read in one of the ways in which people read it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.embed, self.gru, self.norm, self.how = nn.Linear(3, 8), nn.GRU(8, 8), nn.LayerNorm(8), how
        self.attention, self.score, self.head = nn.MultiheadAttention(8, 2, 0.1), nn.Linear(8, 1), nn.Linear(8, 4)
        self.query, self.token = nn.Parameter(torch.randn(2, 8) * 0.3), nn.Parameter(torch.randn(1, 1, 8) * 0.3)
        self.places, self.gains = nn.Parameter(torch.randn(20, 1, 8) * 0.2), nn.Parameter(torch.randn(12) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.read(self.embed(x.permute(2, 0, 1))))

    def read(self, x: Tensor) -> Tensor:
        length, many, wide = x.shape
        if self.how == "attention":
            hidden = (x[:, :, 0] > 0.5).transpose(0, 1)
            return self.norm(x + self.attention(x, x, x, key_padding_mask=hidden)[0]).mean(0)
        if self.how == "query":
            query = self.query.unsqueeze(1).repeat(1, many, 1)
            return self.attention(query, x, x, need_weights=False)[0].sum(0)
        if self.how == "token":
            x = torch.cat([self.token.expand(-1, x.size(1), -1), x], dim=0)
            return self.attention(x + self.places[: x.size(0)], x, x)[0][0]
        if self.how == "states":
            out, h = self.gru(x)
            halves = out.view(length, many, 2, 4).mean(2)
            return h[-1] + out.max(0)[0] - torch.cat([halves, halves * 2], -1).mean(0)
        if self.how == "turned":
            out = self.gru(x)[0].transpose(0, 1)
            return out.reshape(many, length, wide).mean(1) + F.adaptive_avg_pool1d(x.permute(1, 2, 0), 1).squeeze(2)
        if self.how == "weighed":
            share = F.softmax(self.score(torch.tanh(x)), dim=0)
            return (share * x).sum(dim=0) + (x * self.gains.view(-1, 1, 1)).mean(0) + (x * torch.sigmoid(x[-1])).sum(0)
        if self.how == "pieces":
            a, b = x.chunk(2, dim=-1)
            y = torch.cat((a * torch.sigmoid(b), a), 2).mean(0) + x.std(0) * x.norm(dim=0)
            return y + (x[2:10] - x[1:9]).masked_fill(x[:8] < 0, 0.0).mean(0) + x[0, :, :]
        whole = torch.zeros_like(x[0])
        for number, moment in enumerate(x):
            whole = whole + torch.tanh(moment) * number
        return whole


class Stacked(nn.Module):
    """What several heads, or the moments of a cell, give, one behind the other before the batch."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.cell, self.gate, self.how = nn.GRUCell(3, 8), nn.Linear(36, 3), how
        self.heads, self.head = nn.ModuleList(nn.Linear(8, 4) for _ in range(3)), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h, moments = torch.zeros(x.size(0), 8), []
        for t in range(4):
            h = self.cell(x[:, :, t], h)
            moments.append(h)
        if self.how == "moments":
            whole = torch.stack(moments)
            return self.head(whole.mean(0) + whole.permute(1, 0, 2).amax(1) + whole[-1] + whole[1:3].sum(0))
        answers = torch.stack([head(h) for head in self.heads])
        if self.how == "gated":
            share = torch.softmax(self.gate(x.flatten(1)), -1)
            return (share.t().unsqueeze(-1) * answers).sum(0) + self.head(h)
        return answers.mean(0) + answers.max(0)[0] * answers.std(0) + self.head(h)


class Asked(nn.Module):
    """torch's own decoder, which asks a sequence, with the batch first or second."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(8, 2, 16, 0.1, batch_first=first, norm_first=first)
        self.embed, self.query, self.first = nn.Linear(3, 8), nn.Parameter(torch.randn(2, 8)), first
        self.decoder, self.head = nn.TransformerDecoder(layer, 2, nn.LayerNorm(8)), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.transpose(1, 2))
        if self.first:
            return self.head(self.decoder(self.query.unsqueeze(0).repeat(x.size(0), 1, 1), x).mean(1))
        query = self.query.unsqueeze(1).expand(-1, x.size(0), -1)
        return self.head(self.decoder(query, x.transpose(0, 1)).mean(0))


NETS = {
    "translated": (WORDS, Translated),
    "columns": (IMAGE, Columns),
    "asked": (LINE, lambda: Asked(True)),
    "asked, before the batch": (LINE, lambda: Asked(False)),
    **{f"stacked {how}": (LINE, lambda how=how: Stacked(how)) for how in ("heads", "moments", "gated")},
    **{
        f"before the batch, {how}": (LINE, lambda how=how: Before(how))
        for how in ("attention", "query", "token", "states", "turned", "weighed", "pieces", "moments")
    },
}
