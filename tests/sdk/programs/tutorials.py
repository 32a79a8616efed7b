"""Networks as newcomers write them, after tutorials and papers: what of them is ordinary trains by programs."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

IMAGE = (1, 8, 8)


class ViT(nn.Module):
    """A small vision transformer: patches by a strided convolution, a class token, learned positions."""

    def __init__(
        self, how: str = "expand", image: int = 8, patch: int = 4, wide: int = 8, dropout: float = 0.0
    ) -> None:
        super().__init__()
        many = (image // patch) ** 2
        self.patch_embed = nn.Conv2d(1, wide, kernel_size=patch, stride=patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, wide))
        self.pos_embed = nn.Parameter(torch.randn(1, many + (2 if how == "longer" else 1), wide) * 0.02)
        layer = nn.TransformerEncoderLayer(
            wide, 2, 2 * wide, dropout=dropout, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head, self.how = nn.LayerNorm(wide), nn.Linear(wide, 4), how

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        b, n, d = x.shape
        if self.how == "repeat":
            cls = self.cls_token.repeat(x.size(0), 1, 1)
        elif self.how == "len":
            cls = self.cls_token.expand(len(x), -1, -1)
        else:
            cls = self.cls_token.expand(b, 1, d) if self.how == "sizes" else self.cls_token.expand(x.shape[0], -1, -1)
        x = torch.cat((cls, x), dim=1)
        x = x + (self.pos_embed[:, : n + 1] if self.how == "longer" else self.pos_embed)
        return self.head(self.norm(self.encoder(x)[:, 0]))


class Mnist(nn.Module):
    """Two convolutions and two linear layers, all else in functions, log_softmax at the end for a likelihood loss."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3, 1), nn.Conv2d(4, 6, 3, 1)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(24, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = self.dropout1(F.max_pool2d(x, 2))
        x = torch.flatten(x, 1)
        x = self.dropout2(F.relu(self.fc1(x)))
        return F.log_softmax(self.fc2(x), dim=1)


class LeNet(nn.Module):
    """Two convolutions and what is over them, flattened by ``view``."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 16, 3)
        self.fc1, self.fc2 = nn.Linear(16, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), (2, 2))
        x = F.relu(self.conv2(x))
        x = F.max_pool2d(x, 2).view(-1, self.num_flat_features(x) // 4)
        return self.fc2(F.relu(self.fc1(x)))

    def num_flat_features(self, x: Tensor) -> int:
        many = 1
        for size in x.size()[1:]:
            many *= size
        return many


class Viewed(nn.Module):
    """A map of several places, read by one linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.fc = nn.Conv2d(1, 6, 3), nn.Linear(216, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        return self.fc(x.view(x.size(0), -1))


class Recurrent(nn.Module):
    """A convolution, a recurrent layer that is given zeros to begin with, and its last output."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.hidden, self.layers = 8, 1
        self.conv, self.recurrent = nn.Conv1d(3, 6, 3, padding=1), kind(6, self.hidden, self.layers, batch_first=True)
        self.fc = nn.Linear(self.hidden, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool1d(F.relu(self.conv(x)), 2).permute(0, 2, 1)
        h0 = torch.zeros(self.layers, x.size(0), self.hidden).to(x.device)
        if not isinstance(self.recurrent, nn.LSTM):
            out, _ = self.recurrent(x, h0)
        else:
            c0 = torch.zeros(self.layers, len(x), self.hidden, device=x.device)
            out, _ = self.recurrent(x, (h0, c0))
        return self.fc(out[:, -1, :])


class Text(nn.Module):
    """A transformer over words, whose positions are looked up in a table of their own."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.words, self.places, self.how = nn.Embedding(3, 8), nn.Embedding(20, 8), how
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder, self.fc = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.long()
        if self.how == "for each":
            at = torch.arange(0, x.size(1)).expand(len(x), x.shape[1]).to(x.device)
        else:
            at = torch.arange(x.size(1), device=x.device).unsqueeze(0)
        x = self.words(x) * math.sqrt(8) + self.places(at)
        return self.fc(self.encoder(x).mean(dim=1))


class Chomp(nn.Module):
    """Takes off what a causal convolution reads beyond the end."""

    def __init__(self, many: int) -> None:
        super().__init__()
        self.many = many

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :, : -self.many].contiguous()


class Temporal(nn.Module):
    """A block of dilated causal convolutions beside a shortcut; ``wrap`` is what is made of each."""

    def __init__(
        self, inputs: int, outputs: int, dilation: int, wrap: Callable[[nn.Module], nn.Module] = lambda layer: layer
    ) -> None:
        super().__init__()
        pad = 2 * dilation
        self.conv1 = wrap(nn.Conv1d(inputs, outputs, 3, padding=pad, dilation=dilation))
        self.conv2 = wrap(nn.Conv1d(outputs, outputs, 3, padding=pad, dilation=dilation))
        self.net = nn.Sequential(  # who holds both convolutions once more, as people write it
            self.conv1, Chomp(pad), nn.ReLU(), nn.Dropout(0.2), self.conv2, Chomp(pad), nn.ReLU(), nn.Dropout(0.2)
        )
        self.downsample = nn.Conv1d(inputs, outputs, 1) if inputs != outputs else None
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        rest = x if self.downsample is None else self.downsample(x)
        return self.relu(self.net(x) + rest)


class TCN(nn.Module):
    """Two temporal blocks, and their last moment."""

    def __init__(self, *wrap: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.network, self.linear = nn.Sequential(Temporal(3, 8, 1, *wrap), Temporal(8, 8, 2, *wrap)), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.network(x)[:, :, -1])


class WaveNet(nn.Module):
    """Gated causal convolutions, each padded on the left, beside a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Conv1d(3, 8, 3, padding="same")
        self.filters = nn.ModuleList(nn.Conv1d(8, 8, 2, dilation=2**i) for i in range(3))
        self.gates = nn.ModuleList(nn.Conv1d(8, 8, 2, dilation=2**i) for i in range(3))
        self.outward = nn.ModuleList(nn.Conv1d(8, 8, 1) for _ in range(3))
        self.linear = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inward(x)
        for i in range(3):
            past = F.pad(x, (2**i, 0))
            x = x + self.outward[i](torch.tanh(self.filters[i](past)) * torch.sigmoid(self.gates[i](past)))
        return self.linear(F.relu(x)[:, :, -1])


class Causal(nn.Module):
    """Convolutions that look back alone, by functions and by layers that pad."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv1d(3, 16, 3), nn.Conv1d(16, 16, 3, dilation=2)
        self.pad, self.three = nn.ConstantPad1d((2, 0), 0.0), nn.Conv1d(16, 16, 3)
        self.around, self.linear = nn.Conv1d(16, 16, 3, padding=1, padding_mode="circular"), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.one(F.pad(x, (2, 0))))
        x = F.relu(self.two(F.pad(x, [4, 0], mode="constant", value=0)))
        return self.linear(F.relu(self.around(F.relu(self.three(self.pad(x))))).mean(-1))


class Scratch(nn.Module):
    """Attention by hand over words, without their padding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.head = nn.Embedding(3, 8), nn.LayerNorm(8), nn.Linear(8, 4)
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        mask = x != 0
        e = self.words(x.long())
        met = torch.matmul(self.q(e), self.k(e).transpose(-2, -1)) / 8**0.5
        share = F.softmax(met.masked_fill(~mask.unsqueeze(1), -1e9), dim=-1)
        e = self.norm(e + torch.matmul(share, self.v(e)))
        kept = torch.where(mask.unsqueeze(-1), e, 0.0)
        return self.head(kept.sum(1) / mask.unsqueeze(-1).float().sum(1).clamp(min=1))


class Leftovers(nn.Module):
    """Layers that no pass calls, as they stay when a network is changed."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.rest = nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8), nn.BatchNorm1d(8)
        self.old, self.fc = nn.Linear(5, 5), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.relu(self.norm(self.conv(x))).mean(-1))


class DeepConvLSTM(nn.Module):
    """Convolutions over time for each sensor, whose maps an LSTM reads moment by moment."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(8 if i else 1, 8, (3, 1)) for i in range(2))
        self.lstm, self.fc = nn.LSTM(8 * 3, 8, num_layers=2, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 1).unsqueeze(1)
        for conv in self.convs:
            x = F.relu(conv(x))
        x = x.permute(0, 2, 1, 3)
        states, _ = self.lstm(x.reshape(x.shape[0], x.shape[1], -1))
        return self.fc(states[:, -1])


class Heeding(nn.Module):
    """A GRU in both directions, whose states are weighed by a score of each."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(3, 6, batch_first=True, bidirectional=True)
        self.score, self.head = nn.Linear(12, 1), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.rnn(x.transpose(1, 2))
        shares = torch.softmax(self.score(states).squeeze(-1), dim=1)
        return self.head(torch.bmm(shares.unsqueeze(1), states).squeeze(1))


class Shuffled(nn.Module):
    """Half of the channels goes by, both are shuffled; a convolution answers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.branch, self.last = nn.Conv2d(1, 8, 3), nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        one, two = F.relu(self.stem(x)).chunk(2, dim=1)
        x = torch.cat((one, F.relu(self.branch(two))), dim=1)
        n, c, h, w = x.shape
        x = x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)
        few, most = torch.split(x, [2, 6], dim=1)
        return torch.flatten(F.adaptive_avg_pool2d(self.last(torch.cat((most, few), 1)), (1, 1)), 1)


class Dropping(nn.Module):
    """Dropout as functions, several in one pass, beside a layer of it and a module with one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 3), nn.Conv2d(6, 8, 3)
        self.inner, self.rest, self.fc2 = Inner(8), nn.Dropout(0.2), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout2d(F.max_pool2d(F.relu(self.conv1(x)), 2), 0.1, self.training)
        x = F.relu(self.conv2(x)).flatten(1)
        x = self.rest(self.inner(x))
        if self.training:
            x = F.dropout(x, p=0.3)
        return self.fc2(F.dropout(x, training=self.training))


class Inner(nn.Module):
    """A linear layer with dropout of its own."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.fc = nn.Linear(wide, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.dropout(F.relu(self.fc(x)), 0.25, self.training)


class RMSNorm(nn.Module):
    """As language models write it."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(dim))

    def _norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x.float()).type_as(x) * self.weight


class Llama(nn.Module):
    """A block of a language model: RMSNorm before causal attention and before a gated layer, over words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.qkv, self.out = nn.Embedding(3, 8), nn.Linear(8, 24, bias=False), nn.Linear(8, 8, bias=False)
        self.w1, self.w3 = nn.Linear(8, 12, bias=False), nn.Linear(8, 12, bias=False)
        self.w2, self.one, self.two, self.norm = nn.Linear(12, 8, bias=False), RMSNorm(8), RMSNorm(8), nn.RMSNorm(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x.long())
        b, n, d = x.shape
        q, k, v = (one.view(b, n, 2, d // 2).transpose(1, 2) for one in self.qkv(self.one(x)).chunk(3, dim=-1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, n, d))
        y = self.two(x)
        x = x + self.w2(F.silu(self.w1(y)) * self.w3(y))
        return self.head(self.norm(x).mean(1))


class Level(nn.Module):
    """A sequence that torch's own RMSNorm normalizes."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.norm, self.head = nn.Linear(3, 8), nn.RMSNorm(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.gelu(self.norm(self.below(x.transpose(1, 2)))).mean(1))


class XVector(nn.Module):
    """Frames of speech by dilated convolutions, and the statistics of all of them (Snyder et al. 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv1d(3, 16, 3), nn.Conv1d(16, 16, 3, dilation=2)
        self.segment, self.out = nn.Linear(32, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.two(F.relu(self.one(x))))
        return self.out(F.relu(self.segment(torch.cat([x.mean(-1), x.std(-1)], 1))))


class Heed(nn.Module):
    """Statistics of speech weighed by attention to each frame, which sees those of the whole (ECAPA-TDNN)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv1d(3, 16, 3), nn.BatchNorm1d(32), nn.Linear(32, 4)
        self.attention = nn.Sequential(
            nn.Conv1d(48, 8, 1), nn.ReLU(), nn.BatchNorm1d(8), nn.Tanh(), nn.Conv1d(8, 16, 1), nn.Softmax(dim=2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv(x))
        t = x.size()[-1]
        mean = torch.mean(x, dim=2, keepdim=True).repeat(1, 1, t)
        spread = torch.sqrt(torch.var(x, dim=2, keepdim=True).clamp(min=1e-4)).repeat(1, 1, t)
        w = self.attention(torch.cat((x, mean, spread), dim=1))
        mu = torch.sum(x * w, dim=2)
        sg = torch.sqrt((torch.sum((x**2) * w, dim=2) - mu**2).clamp(min=1e-4))
        return self.out(self.norm(torch.cat((mu, sg), 1)))


class CosineHead(nn.Module):
    """Classes by directions, as heads for faces and few shots have them."""

    def __init__(self, wide: int, classes: int) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(classes, wide)), nn.Parameter(torch.tensor(4.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * F.linear(F.normalize(x, dim=-1), F.normalize(self.weight, dim=-1))


class Read(nn.Module):
    """A head of which the pass reads the weight alone."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv1d(3, 16, 3), nn.Linear(16, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.relu(self.conv(x)).mean(-1), F.normalize(self.fc.weight, dim=-1))


class Compared(nn.Module):
    """A small network under a head that compares directions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc, self.head = nn.Conv1d(3, 16, 3), nn.Linear(16, 8), CosineHead(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.fc(F.relu(self.conv(x)).mean(-1)))


class Annotated(nn.Module):
    """LayerNorm by hand, with the deviation of one value less (the Annotated Transformer)."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.head = nn.Linear(3, 8), nn.Linear(8, 4)
        self.a_2, self.b_2 = nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.below(x.transpose(1, 2))
        mean, std = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
        return self.head((self.a_2 * (x - mean) / (std + 1e-6) + self.b_2).mean(1))


class GeM(nn.Module):
    """Generalized mean pooling with a learned power (Radenovic et al. 2018), above scaled input."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.1]).view(1, 1, 1))
        self.register_buffer("std", torch.tensor([0.9]).view(1, 1, 1))
        self.conv, self.p, self.head = nn.Conv2d(1, 16, 3), nn.Parameter(torch.ones(1) * 3), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv((x - self.mean) / self.std))
        x = F.avg_pool2d(x.clamp(min=1e-6).pow(self.p), (x.size(-2), x.size(-1))).pow(1.0 / self.p)
        return self.head(x.flatten(1))


class GRN(nn.Module):
    """Global response normalization."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.zeros(1, 1, 1, dim)), nn.Parameter(torch.zeros(1, 1, 1, dim))

    def forward(self, x: Tensor) -> Tensor:
        gx = torch.norm(x, p=2, dim=(1, 2), keepdim=True)
        nx = gx / (gx.mean(dim=-1, keepdim=True) + 1e-6)
        return self.gamma * (x * nx) + self.beta + x


class ChannelsFirst(nn.Module):
    """LayerNorm over the channels of a map, by hand."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        x = (x - u) / torch.sqrt(s + self.eps)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class ConvNeXtV2(nn.Module):
    """One block of it between a stem and a head (Woo et al. 2023)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first, self.head = nn.Conv2d(1, 8, 2, 2), ChannelsFirst(8), nn.Linear(8, 4)
        self.dwconv, self.norm = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.LayerNorm(8, eps=1e-6)
        self.pwconv1, self.grn, self.pwconv2 = nn.Linear(8, 32), GRN(32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(self.stem(x))
        x = self.norm(self.dwconv(first).permute(0, 2, 3, 1))
        x = self.pwconv2(self.grn(F.gelu(self.pwconv1(x))))
        return self.head((first + x.permute(0, 3, 1, 2)).mean([-2, -1]))


def convnext() -> nn.Module:
    """torchvision's, with its stochastic depth, narrow."""
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    return ConvNeXt([CNBlockConfig(8, 12, 1), CNBlockConfig(12, None, 1)], stochastic_depth_prob=0.3, num_classes=4)


class FullyConvolutional(nn.Module):
    """Classes by a convolution, averaged over a long series: the slopes of all its places are alike."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(3, 16, 3, padding=1), nn.BatchNorm1d(16), nn.ReLU())
        self.head = nn.Conv1d(16, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)).mean(-1)


class UNet(nn.Module):
    """Down and up again, each level beside what it was before; ``up`` says how it is made larger."""

    def __init__(self, up: str) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Conv1d(n, 8, 3, padding=1) for n in (3, 8, 8))
        self.four, self.five, self.pool = (
            nn.Conv1d(16, 8, 3, padding=1),
            nn.Conv1d(16, 8, 3, padding=1),
            nn.MaxPool1d(2),
        )
        self.layer, self.up = nn.Upsample(scale_factor=2, mode="linear", align_corners=False), up
        if up == "learned":
            self.layer = nn.ConvTranspose1d(8, 8, 2, stride=2)
        self.norm, self.last = nn.BatchNorm1d(8), nn.Conv1d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = F.relu(self.norm(self.one(x)))
        two = F.relu(self.two(self.pool(one)))
        three = F.relu(self.three(self.pool(two)))
        two = F.relu(self.four(torch.cat([self.larger(three, two), two], dim=1)))
        return self.last(F.relu(self.five(torch.cat([self.larger(two, one), one], dim=1)))).mean(-1)

    def larger(self, x: Tensor, like: Tensor) -> Tensor:
        if self.up in ("layer", "learned"):
            return self.layer(x)
        if self.up == "size":
            return F.interpolate(x, size=like.shape[2:], mode="linear", align_corners=True)
        return F.interpolate(x, scale_factor=2, mode="nearest")


class Reversed(nn.Module):
    """What comes and what has been, of which every second moment is read."""

    def __init__(self) -> None:
        super().__init__()
        self.ahead, self.back = nn.Conv1d(3, 8, 3, padding=1), nn.Conv1d(3, 8, 3, padding=1)
        self.gru, self.head = nn.GRU(16, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([F.relu(self.ahead(x)), F.relu(self.back(x.flip(-1))).flip(-1)], dim=1)
        return self.head(self.gru(x[:, :, ::2].transpose(1, 2))[0][:, -1])


class SubPixel(nn.Module):
    """Channels that become places, and places read again."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.PixelShuffle(2), nn.Conv2d(2, 8, 3, 2))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.body(x)).mean((2, 3)))


class Normed(nn.Module):
    """Convolutions normalized by functions: groups of channels, then each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.fc = nn.Conv1d(3, 16, 5, padding=2), nn.Conv1d(16, 16, 3), nn.Linear(16, 4)
        self.weight, self.bias = nn.Parameter(torch.ones(16)), nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(F.group_norm(self.conv1(x), num_groups=4, weight=self.weight, bias=self.bias))
        return self.fc(F.relu(F.instance_norm(self.conv2(x))).max(dim=-1).values)


class Prototypes(nn.Module):
    """Gaussian bumps around learned centres, and how alike features are to learned directions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv1d(3, 16, 3), nn.Linear(16, 8)
        self.centres, self.log_sigmas = nn.Parameter(torch.randn(6, 8)), nn.Parameter(torch.zeros(6))
        self.alike = nn.CosineSimilarity(dim=-1)
        self.prototypes, self.head = nn.Parameter(torch.randn(6, 8)), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        z = self.fc(torch.maximum(self.conv(x).amax(-1), torch.zeros(1)))
        z = F.normalize(z, p=1, dim=1) * 8
        far = (z.unsqueeze(1) - self.centres.unsqueeze(0)).pow(2).sum(-1)
        alike = self.alike(z.unsqueeze(1), self.prototypes.unsqueeze(0))
        return self.head(torch.exp(-far / self.log_sigmas.exp()) + alike - torch.logsumexp(alike, 1, keepdim=True))


class Graph(nn.Module):
    """Sensors as the nodes of a graph whose edges are learned, as a product of two tables."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(4, 3))
        self.w1, self.w2, self.head = nn.Linear(12, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        adj = F.softmax(F.relu(self.source @ self.target), dim=1)
        x = F.relu(self.w1(torch.matmul(adj, x)))
        return self.head(F.relu(torch.einsum("nm,bmc->bnc", adj, self.w2(x))).mean(1))


class Sinc(nn.Module):
    """Band-pass filters of which the edges are learned, and a layer whose weight is of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.band = nn.Parameter(torch.rand(8, 1) * 0.2), nn.Parameter(torch.rand(8, 1) * 0.2)
        self.register_buffer("n", 2 * math.pi * (torch.arange(5) - 2).float().view(1, -1) + 1e-3)
        self.register_buffer("window", torch.hamming_window(5))
        self.conv, self.head = nn.Conv1d(8, 16, 3), nn.Linear(8, 4)
        self.up, self.down, self.bias = (
            nn.Parameter(torch.randn(8, 2)),
            nn.Parameter(torch.randn(2, 16) * 0.2),
            nn.Parameter(torch.zeros(8)),
        )

    def forward(self, x: Tensor) -> Tensor:
        low = 0.01 + torch.abs(self.low)
        high = torch.clamp(low + 0.02 + torch.abs(self.band), max=0.5)
        filters = (torch.sin(high @ self.n) - torch.sin(low @ self.n)) / (self.n / 2) * self.window
        x = F.conv1d(x[:, :1], filters.view(8, 1, 5), stride=1, padding=2).abs()
        x = F.relu(self.conv(x)).mean(-1)
        return self.head(F.relu(F.linear(x, self.up @ self.down, self.bias)))


class StdConv2d(nn.Conv2d):
    """A convolution whose weights are standardized."""

    def forward(self, x: Tensor) -> Tensor:
        v, m = torch.var_mean(self.weight, dim=[1, 2, 3], keepdim=True, unbiased=False)
        weight = (self.weight - m) / torch.sqrt(v + 1e-5)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class BigTransfer(nn.Module):
    """Two of them, each behind a normalization of groups."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = StdConv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.conv2, self.head = StdConv2d(8, 16, 3, stride=2, padding=1), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.conv2(F.relu(self.norm1(self.conv1(x))))).mean((2, 3)))


class HandGRU(nn.Module):
    """A GRU by two linear layers."""

    def __init__(self, wide: int = 8) -> None:
        super().__init__()
        self.wide = wide
        self.x2h, self.h2h, self.fc = nn.Linear(3, 3 * wide), nn.Linear(wide, 3 * wide), nn.Linear(wide, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 1)
        h = torch.zeros(x.size(0), self.wide, device=x.device)
        for t in range(x.size(1)):
            (xr, xz, xn), (hr, hz, hn) = self.x2h(x[:, t]).chunk(3, 1), self.h2h(h).chunk(3, 1)
            z = torch.sigmoid(xz + hz)
            h = (1 - z) * torch.tanh(xn + torch.sigmoid(xr + hr) * hn) + z * h
        return self.fc(h)


class ConvLSTMCell(nn.Module):
    """An LSTM whose gates are a convolution."""

    def __init__(self, inputs: int, wide: int) -> None:
        super().__init__()
        self.wide, self.conv = wide, nn.Conv2d(inputs + wide, 4 * wide, 3, padding=1)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        h, c = state
        i, f, o, g = torch.split(self.conv(torch.cat([x, h], dim=1)), self.wide, dim=1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c

    def begin(self, many: int, height: int, width: int) -> tuple[Tensor, Tensor]:
        zeros = torch.zeros(many, self.wide, height, width, device=self.conv.weight.device)
        return zeros, zeros


class Film(nn.Module):
    """Pictures one by one, of which a cell keeps what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = ConvLSTMCell(1, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        many, pictures, height, width = x.shape
        state = self.cell.begin(many, height, width)
        for t in range(pictures):
            state = self.cell(x[:, t : t + 1], state)
        return self.head(state[0].mean((2, 3)))


class Cells(nn.Module):
    """Two LSTM cells one over the other, with dropout between them, over words; padding leaves the state as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.drop = nn.Embedding(3, 8, padding_idx=0), nn.Dropout(0.2)
        self.cells, self.head = nn.ModuleList(nn.LSTMCell(8, 8) for _ in range(2)), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        seen, e = x != 0, self.words(x.long())
        h, c = ([x.new_zeros(x.size(0), 8) for _ in self.cells] for _ in range(2))
        for t in range(x.size(1)):
            y = e[:, t]
            for i, cell in enumerate(self.cells):
                after, c[i] = cell(y, (h[i], c[i]))
                h[i] = torch.where(seen[:, t : t + 1], after, h[i])
                y = self.drop(h[i])
        return self.head(h[-1])


class LooksAgain(nn.Module):
    """A cell that looks at all states of a GRU, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.cell = nn.GRU(3, 8, batch_first=True), nn.GRUCell(8, 8)
        self.score, self.head = nn.Linear(16, 1), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.encoder(x.transpose(1, 2))
        h = torch.zeros_like(states[:, 0])
        for _ in range(2):
            beside = torch.cat([states, h.unsqueeze(1).expand(-1, states.size(1), -1)], -1)
            h = self.cell((F.softmax(self.score(beside), 1) * states).sum(1), h)
        return self.head(h)


class Residue(nn.Module):
    """A block with dropout by a function and by a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.drop = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.two(F.dropout(F.relu(self.one(x)), 0.3, training=self.training)))


class Shared(nn.Module):
    """Blocks that are called again and again: torch's own, and one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.own, self.head = nn.Linear(3, 8), Residue(), nn.Linear(8, 4)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.transpose(1, 2))
        for _ in range(2):
            x = self.own(self.layer(x))
        return self.head(x.mean(1))


class Window(nn.Module):
    """Attention over a window of a picture, biased by how far two places are apart, as Swin has it."""

    def __init__(self, side: int = 4, wide: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.scale = heads, (wide // heads) ** -0.5
        self.relative_position_bias_table = nn.Parameter(torch.randn((2 * side - 1) ** 2, heads) * 0.02)
        coords = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")).flatten(1)
        far = (coords[:, :, None] - coords[:, None, :]).permute(1, 2, 0) + side - 1
        self.register_buffer("relative_position_index", far[..., 0] * (2 * side - 1) + far[..., 1])
        self.embed, self.qkv, self.proj = nn.Conv2d(1, wide, 2, 2), nn.Linear(wide, 3 * wide), nn.Linear(wide, wide)
        self.norm, self.head = nn.LayerNorm(wide), nn.Linear(wide, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        b, n, c = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        bias = self.relative_position_bias_table[self.relative_position_index.view(-1)].view(n, n, -1)
        attn = (q * self.scale) @ k.transpose(-2, -1) + bias.permute(2, 0, 1).contiguous().unsqueeze(0)
        x = x + self.proj((attn.softmax(dim=-1) @ v).transpose(1, 2).reshape(b, n, c))
        return self.head(x.mean(1))


class GPT(nn.Module):
    """Two blocks of attention that looks back alone, by hand or by the function; ``how`` says which."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.embed, self.places = nn.Linear(3, 8), nn.Parameter(torch.randn(1, 20, 8) * 0.02)
        self.blocks, self.norm, self.head = (
            nn.ModuleList(Block(how) for _ in range(2)),
            nn.LayerNorm(8),
            nn.Linear(8, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        x = self.embed(x) + self.places[:, : x.size(1)]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, -1])


class Block(nn.Module):
    """One block of it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.before, self.between, self.all, self.out = (
            nn.LayerNorm(8),
            nn.LayerNorm(8),
            nn.Linear(8, 24),
            nn.Linear(8, 8),
        )
        self.feed, self.dropped, self.dropout, self.how = nn.Linear(8, 8), nn.Dropout(0.1), 0.1, how
        self.register_buffer("bias", torch.tril(torch.ones(20, 20)).view(1, 1, 20, 20))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.all(self.before(x)).split(C, dim=2)
        q, k, v = (one.view(B, T, 2, C // 2).transpose(1, 2) for one in (q, k, v))
        if self.how == "by hand":
            met = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            met = met.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
            y = self.dropped(F.softmax(met, dim=-1)) @ v
        else:
            share, mask = self.dropout if self.training else 0, None
            if self.how == "masked":
                mask = torch.triu(torch.ones(T, T, device=x.device) * float("-inf"), diagonal=1)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=share, is_causal=mask is None)
        x = x + self.out(y.transpose(1, 2).contiguous().view(B, T, C))
        return x + F.gelu(self.feed(self.between(x)))


class Heads(nn.Module):
    """Attention whose products are named, over channels and places of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.all = nn.Conv2d(1, 8, 3, 2), nn.Conv2d(8, 24, 1)
        self.out, self.fc = nn.Conv2d(8, 8, 1), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        b, c, h, w = x.shape
        q, k, v = (one.reshape(b, 2, c // 2, h * w) for one in self.all(x).chunk(3, dim=1))
        share = (torch.einsum("bhdi,bhdj->bhij", q, k) * (c // 2) ** -0.5).softmax(dim=-1)
        x = x + self.out(torch.einsum("bhij,bhdj->bhdi", share, v).reshape(b, c, h, w))
        return self.fc(x.mean((2, 3)))


class LooksBack(nn.Module):
    """torch's own encoder under a mask that hides what comes."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.embed, self.fc = nn.Linear(3, 8), nn.Linear(8, 4)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.transpose(1, 2))
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1), device=x.device)
        return self.fc(self.encoder(x, mask=mask, is_causal=True)[:, -1])


class OneDropout(nn.Module):
    """One layer of dropout behind three others, and one of channels behind two."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.fc1, self.fc2 = (
            nn.Conv1d(3, 8, 3),
            nn.Conv1d(8, 8, 3),
            nn.Linear(8, 8),
            nn.Linear(8, 4),
        )
        self.drop, self.maps, self.relu = nn.Dropout(0.3), nn.Dropout1d(0.2), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.maps(self.relu(self.conv1(x)))
        x = self.drop(self.maps(self.relu(self.conv2(x)))).mean(-1)
        return self.fc2(self.drop(self.relu(self.fc1(self.drop(x)))))


class Distances(nn.Module):
    """Waves of the places are added, and what is far away is scored lower: both are made of sizes in the pass."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.fc = nn.Linear(3, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.transpose(1, 2))
        n, at = x.size(1), torch.arange(x.size(1), device=x.device)
        waves = at.float()[:, None] * torch.exp(torch.arange(0, 8, 2, device=x.device, dtype=x.dtype) * -1.2)
        q = (x + torch.cat([waves.sin(), waves.cos()], dim=-1)).view(-1, n, 2, 4).transpose(1, 2)
        far = (at[None] - at[:, None]).abs() * torch.tensor([0.5, 0.25]).view(2, 1, 1)
        y = (q @ q.transpose(-2, -1) / 2 - far).softmax(-1) @ q
        return self.fc(y.transpose(1, 2).flatten(2).mean(1))


NETS = {
    "convnext": ((3, 16, 16), convnext),
    "convnext v2": (IMAGE, ConvNeXtV2),
    "generalized mean": (IMAGE, GeM),
    "annotated": ((3, 12), Annotated),
    "cosine head": ((3, 12), Compared),
    "window": (IMAGE, Window),
    "shared blocks": ((3, 12), Shared),
    "gru by hand": ((3, 12), HandGRU),
    "lstm of convolutions": ((3, 6, 6), Film),
    "cells": ((5,), Cells),
    "looks again": ((3, 12), LooksAgain),
    "learned graph": ((3, 12), Graph),
    "learned filters": ((3, 12), Sinc),
    "standardized weights": (IMAGE, BigTransfer),
    "prototypes": ((3, 12), Prototypes),
    "normalized by functions": ((3, 12), Normed),
    "ecapa": ((3, 12), Heed),
    "x-vector": ((3, 12), XVector),
    "llama": ((9,), Llama),
    "distances": ((3, 12), Distances),
    "one dropout": ((3, 12), OneDropout),
    "named products": (IMAGE, Heads),
    "gpt by hand": ((3, 12), lambda: GPT("by hand")),
    "gpt": ((3, 12), lambda: GPT("by function")),
    "gpt under a mask": ((3, 12), lambda: GPT("masked")),
    "looks back": ((3, 12), LooksBack),
    "reversed": ((3, 12), Reversed),
    "sub-pixel": (IMAGE, SubPixel),
    "classes by a convolution": ((3, 128), lambda: FullyConvolutional(4)),
    "u-net": ((3, 12), lambda: UNet("times")),
    "u-net by layers": ((3, 12), lambda: UNet("layer")),
    "u-net by learned filters": ((3, 12), lambda: UNet("learned")),
    "u-net by sizes": ((3, 14), lambda: UNet("size")),
    "dropout as functions": (IMAGE, Dropping),
    "attention by hand": ((9,), Scratch),
    "leftovers": ((3, 12), Leftovers),
    "deep conv lstm": ((3, 12), DeepConvLSTM),
    "heeding": ((3, 12), Heeding),
    "shuffled": (IMAGE, Shuffled),
    "causal": ((3, 12), Causal),
    "wavenet": ((3, 12), WaveNet),
    "tcn": ((3, 12), TCN),
    "tcn with weight_norm": ((3, 12), lambda: TCN(weight_norm)),
    "places looked up": ((9,), lambda: Text("for all")),
    "places looked up for each": ((9,), lambda: Text("for each")),
    "lstm from zeros": ((3, 12), lambda: Recurrent(nn.LSTM)),
    "rnn from zeros": ((3, 12), lambda: Recurrent(nn.RNN)),
    "gru from zeros": ((3, 12), lambda: Recurrent(nn.GRU)),
    "vit with torch's own dropout": (IMAGE, lambda: ViT("sizes", dropout=0.1)),
    "lenet": (IMAGE, LeNet),
    "viewed": (IMAGE, Viewed),
    "mnist": (IMAGE, Mnist),
}
