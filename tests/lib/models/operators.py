"""Models of many kinds of operators: convolutions, normalisation, dropout, recurrence, attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.lib.models.batches import DIM, ROWS
from tests.lib.models.parameters import Layer, Regression


class Convolutions(nn.Module):
    """A convolution network with batch normalisation, its weights in channels-last order if asked for."""

    def __init__(self, *, channels_last: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Conv2d(6, 6, 3, padding=1, stride=2),
            nn.BatchNorm2d(6),
            nn.ReLU(),
        )
        self.head = nn.Linear(6, 5)
        if channels_last:
            self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in its stub

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.layers(x).mean((2, 3))), y)


class Dropping(Regression):
    """Dropout as a module, as a function, on whole channels, and inside attention."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.drop = nn.Dropout(0.3)

    def predict(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.drop(layer(x))
        x = F.dropout(x, 0.1, self.training) + F.dropout1d(x[None], 0.2, self.training)[0]
        heads = x.view(1, ROWS, 2, DIM // 2).transpose(1, 2)
        drop = 0.15 if self.training else 0.0
        return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=drop).transpose(1, 2).reshape(ROWS, DIM)


class Zoo(nn.Module):
    """Layers for images whose operators tracing likes to take apart."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1, padding_mode="reflect"),
            nn.GroupNorm(2, 6),
            nn.PReLU(6),
            nn.Conv2d(6, 6, 3, groups=3, dilation=2, padding="same"),
            nn.InstanceNorm2d(6, affine=True),
            nn.Hardswish(),
            nn.MaxPool2d(2),
            nn.Upsample(scale_factor=2, mode="bilinear"),
            nn.ConvTranspose2d(6, 4, 2, stride=2),
            nn.SiLU(),
            nn.AdaptiveAvgPool2d(3),
            nn.PixelShuffle(1),
            nn.Flatten(),
        )
        self.bilinear = nn.Bilinear(36, 36, 5)
        self.rnn = nn.GRU(36, 7, 2, bidirectional=True)
        self.head = nn.Linear(14, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.layers(x)
        states, _ = self.rnn(x[None])
        logits = F.rms_norm(self.bilinear(x, x), (5,)) + self.head(states[0])
        return F.cross_entropy(logits, y) + F.huber_loss(logits.cumsum(1).softmax(1), logits.sigmoid())


class Everything(nn.Module):
    """A stack of torch's own transformer layers with a few kinds of operators before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(19, DIM, padding_idx=0)
        self.rnn = nn.GRU(DIM, DIM, batch_first=True)
        layer = nn.TransformerEncoderLayer(DIM, 2, 12, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(DIM, 19)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x, _ = self.rnn(self.embed(ids))
        x = self.encoder(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten(), label_smoothing=0.1)
