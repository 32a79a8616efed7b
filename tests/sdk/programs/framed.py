"""Networks that merge the batch with time for what reads each frame alone."""

import torch
from torch import Tensor, nn

FRAMES, IMAGES, LINE = (4, 3, 12), (3, 2, 8, 8), (3, 12)


class Frames(nn.Module):
    """Windows of a signal, each through convolutions, and what is told of all."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.conv = nn.Sequential(
            nn.Conv1d(3, 6, 3, padding=1), nn.BatchNorm1d(6), nn.ReLU(), nn.MaxPool1d(2), nn.Dropout(0.2)
        )
        self.alone = nn.Sequential(nn.Conv1d(1, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.ReLU(), nn.Dropout1d(0.3))
        self.gru = nn.GRU(36, 6, batch_first=True)
        self.steps = nn.GRU(6, 6, 2, batch_first=True, dropout=0.2)
        self.attend = nn.MultiheadAttention(6, 2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "gru":
            b, t, c, n = x.shape
            y = self.conv(x.view(b * t, c, n))
            return self.head(self.gru(y.view(b, t, -1))[0][:, -1])
        if self.how == "flatten":
            y = self.conv(x.flatten(0, 1)).flatten(1)
            return self.head(self.gru(y.unflatten(0, (-1, x.size(1))))[1][-1])
        if self.how == "mean":
            y = self.conv(x.reshape(-1, *x.shape[2:])).mean(-1)
            return self.head(y.view(x.size(0), x.size(1), -1).mean(1))
        if self.how == "told":  # what all windows say, to each of them
            y = self.conv(x.flatten(0, 1)).mean(2)
            whole = torch.stack(y.view(x.size(0), x.size(1), 6).unbind(1)).mean(0)
            return self.head((y + whole.repeat_interleave(x.size(1), dim=0)).view(x.size(0), -1, 6).amax(1))
        if self.how == "logits":
            y = self.head(self.conv(x.reshape(-1, *x.shape[2:])).amax(2))
            return y.view(x.size(0), x.size(1), -1).mean(dim=1)
        if self.how == "channels":  # each of a signal on its own, as PatchTST has it
            b, c, n = x.shape
            y = self.alone(x.reshape(b * c, 1, n)).mean(2)
            return self.head(y.reshape(b, c, -1).mean(1))
        if self.how == "windows":
            b = x.size(0)
            y = self.conv(x.view(b, 3, 3, 4).permute(0, 2, 1, 3).reshape(b * 3, 3, 4)).amax(-1)
            return self.head(self.steps(y.view(b, 3, -1))[1][-1])
        b, t, c, n = x.shape
        y = self.conv(x.view(b * t, c, n)).transpose(1, 2)  # frames of which each is a sequence
        y = self.steps(y)[1][-1] if self.how == "each a sequence" else self.attend(y, y, y)[0].mean(1)
        return self.head(y.view(b, t, -1).amax(1))


class Video(nn.Module):
    """A convolutional network over each picture, and a recurrent layer over what it makes of these."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.conv1, self.norm1 = nn.Conv2d(2, 4, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.norm2 = nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.BatchNorm2d(4)
        self.pool, self.drop = nn.AdaptiveAvgPool2d(1), nn.Dropout2d(0.2)
        self.squeeze, self.excite = nn.Linear(4, 2), nn.Linear(2, 4)
        self.lstm, self.head = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c, h, w = x.size()
        x = x.contiguous().view(b * t, c, h, w)
        y = torch.relu(self.norm1(self.conv1(x)))
        y = self.drop(y + torch.relu(self.norm2(self.conv2(y))))
        if self.how == "gated":
            gate = torch.sigmoid(self.excite(torch.relu(self.squeeze(self.pool(y).view(b * t, 4)))))
            y = y * gate.view(b * t, 4, 1, 1)
        y = self.pool(y)
        y = y.view(y.size(0), -1)
        out, _ = self.lstm(y.view(b, t, -1))
        return self.head(out[:, -1, :])


NETS = {
    **{
        f"frames, {how}": (FRAMES, lambda how=how: Frames(how))
        for how in ("gru", "flatten", "mean", "logits", "told", "each a sequence", "attended")
    },
    **{f"frames, {how}": (LINE, lambda how=how: Frames(how)) for how in ("channels", "windows")},
    **{f"video, {how}": (IMAGES, lambda how=how: Video(how)) for how in ("pooled", "gated")},
}
