"""What torch's exporter does not know is exported by what it knows, and answers as torch does at any batch."""

import pytest
import torch
from tolerance import roundings
from torch import nn
from torch.nn import functional as F

from talaria_export import export_onnx
from talaria_export.runtime.session import Session


class Asked(nn.Module):
    """A learned query over a sequence (batch, width, length), laid out by the length of the batch."""

    def __init__(self, how):
        super().__init__()
        self.query, self.head, self.how = nn.Parameter(torch.randn(1, 2, 6)), nn.Linear(12, 4), how
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.register_buffer("seen", torch.ones(2, 5).tril(3) > 0)

    def forward(self, x):
        x = x.transpose(1, 2)
        query = self.query.repeat(len(x), 1, 1) if self.how == "repeat" else self.query.expand(len(x), -1, -1)
        if self.how == "function":
            y = F.scaled_dot_product_attention(query, x, x)
        elif self.how == "masked":
            y = F.scaled_dot_product_attention(query, x, x, self.seen.expand(len(x), -1, -1))
        else:
            y, _ = self.attention(query, x, x)
        return self.head(y.flatten(1)) * len([1, 2])


class Pooled(nn.Module):
    """Maxima under windows of different sizes."""

    def __init__(self, layer, wide):
        super().__init__()
        self.pool, self.head = layer, nn.Linear(wide, 4)

    def forward(self, x):
        return self.head(self.pool(x).flatten(1))


NETS = {
    **{how: ((6, 5), lambda how=how: Asked(how)) for how in ("expand", "repeat", "function", "masked")},
    "line": ((3, 7), lambda: Pooled(nn.AdaptiveMaxPool1d(5), 15)),
    "larger": ((3, 7), lambda: Pooled(nn.AdaptiveMaxPool1d(9), 27)),
    "even": ((3, 6), lambda: Pooled(nn.AdaptiveMaxPool1d(3), 9)),
    "plane": ((2, 7, 8), lambda: Pooled(nn.AdaptiveMaxPool2d((3, None)), 48)),
    "bounds": ((2, 4), lambda: Pooled(lambda x: x.clamp(-1, 0.5) * x.clip(max=1.5, min=0), 8)),
    "bounds in place": ((2, 4), lambda: Pooled(lambda x: torch.clamp_(2 * x, -1, 0.5).clamp_(-0.5, 1), 8)),
    "plane, larger": ((2, 3, 8), lambda: Pooled(nn.AdaptiveMaxPool2d(5), 50)),
}


@pytest.mark.parametrize("name", NETS)
def test_a_network_answers_as_torch_does_at_any_batch(name):
    shape, make = NETS[name]
    torch.manual_seed(0)
    net, x = make().eval(), torch.randn(5, *shape)
    session = Session(export_onnx(net, x[:1]))
    for count in (1, 5):
        with torch.no_grad():
            wanted = net(x[:count])
        assert roundings(torch.from_numpy(session(x[:count].numpy())), wanted) <= 100
    assert "len" not in globals()
