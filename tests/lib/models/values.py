"""Models with buffers that forward changes, and with more than one dtype."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.lib.models.batches import DIM
from tests.lib.models.parameters import Layer, Regression


class Buffered(Regression):
    """Buffers of its own that every forward changes: a counter, a running mean, and the mean before."""

    count: Tensor
    mean: Tensor
    previous: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(DIM))
        self.register_buffer("previous", torch.zeros(DIM), persistent=False)

    def predict(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.count += 1
        self.previous.copy_(self.mean)
        self.mean.lerp_(y.detach().mean(0), 0.1)
        return y - self.mean + self.previous / self.count


class Swapped(Regression):
    """Two buffers that change places."""

    a: Tensor
    b: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.register_buffer("a", torch.zeros(DIM))
        self.register_buffer("b", torch.ones(DIM))

    def predict(self, x: Tensor) -> Tensor:
        y = self.linear(x) + self.a
        before = self.a.clone()
        self.a.copy_(self.b)
        self.b.copy_(before)
        return y


class MixedDtypes(Regression):
    """Layers in fp64 and bf16 in an fp32 model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.in_double = nn.Linear(DIM, DIM).double()
        self.in_half = nn.Linear(DIM, DIM).bfloat16()

    def predict(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        x = x + self.in_double(x.double()).float()
        return x + self.in_half(x.bfloat16()).float()


class MixedInLayer(Regression):
    """Layers that hold two dtypes each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        for layer in self.layers:
            assert isinstance(layer, Layer)
            layer.norm.double()

    def predict(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            assert isinstance(layer, Layer)
            x = x + layer.down(torch.tanh(layer.up(layer.norm(x.double()).float())))
        return x
