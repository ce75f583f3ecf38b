"""Models that differ in their parameters: who owns and reads them, which are trained, and of what sizes they are."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.lib.models.batches import DIM


class Regression(nn.Module):
    """The mean squared error of what `predict` makes of the features."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.predict(x), y)

    def predict(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Layer(nn.Module):
    """A residual layer of odd sizes: nothing in it divides by a number of ranks."""

    def __init__(self, dim: int = DIM, inner: int = 13) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, inner)
        self.down = nn.Linear(inner, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Stack(Regression):
    """Plain layers in a list."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(depth))

    def predict(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Tied(nn.Module):
    """An embedding whose weight is also the output layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(19, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(DIM, 19, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Adapted(nn.Module):
    """A frozen linear layer with a trained low-rank update beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(DIM, DIM).requires_grad_(False)
        self.a = nn.Linear(DIM, 3, bias=False)
        self.b = nn.Linear(3, DIM, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * self.b(self.a(x))


class Lora(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Adapted() for _ in range(3))

    def predict(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Frozen(Stack):
    """Some layers are not trained: the first, one in the middle, and a bias in a trained one."""

    def __init__(self) -> None:
        super().__init__(4)
        self.layers[0].requires_grad_(False)
        self.layers[2].requires_grad_(False)
        trained = self.layers[3]
        assert isinstance(trained, Layer)
        trained.down.bias.requires_grad_(False)


class Unused(Stack):
    """A layer, and a parameter within a layer, that the loss does not depend on."""

    def __init__(self) -> None:
        super().__init__(2)
        self.spare = Layer()
        self.layers[0].register_parameter("extra", nn.Parameter(torch.ones(5)))


class Repeated(Regression):
    """One layer, called several times."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([Layer()])
        self.out = nn.Linear(DIM, DIM)

    def predict(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = self.inner[0](x)
        return self.out(x)


class SharedModule(Regression):
    """One module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Layer()
        self.middle = nn.Linear(DIM, DIM)
        self.decoder = self.encoder

    def predict(self, x: Tensor) -> Tensor:
        return self.decoder(self.middle(self.encoder(x)))


class Prompt(nn.Module):
    """A module whose output is its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM) * 0.1)

    def forward(self) -> Tensor:
        return self.weight


class Borrowed(Regression):
    """Parameters used outside the modules that own them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.prompt = Prompt()

    def predict(self, x: Tensor) -> Tensor:
        first, second = self.layers
        assert isinstance(first, Layer) and isinstance(second, Layer)
        x = second(first(x + self.prompt()))
        return x + F.linear(F.linear(x, first.up.weight), second.down.weight) * self.prompt.weight


class Peeking(Stack):
    """The last layer's bias is read first as well, without a gradient.

    Its own gradient is complete long before backward needs its value for the last time.
    """

    def predict(self, x: Tensor) -> Tensor:
        last = self.layers[-1]
        assert isinstance(last, Layer)
        return super().predict(torch.tanh(self.layers[0](x)) * last.down.bias.detach())


class Parametrised(Regression):
    """Weights that are computed from other parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(parametrizations.weight_norm(nn.Linear(DIM, DIM)) for _ in range(3))

    def predict(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Odd(Regression):
    """Parameters of zero, one, and few elements, and sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0))
        self.flat = nn.Parameter(torch.empty(0, 3))
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.shift = nn.Parameter(torch.full((1,), 0.1))
        self.first = nn.Linear(DIM, 7)
        self.second = nn.Linear(7, 53)
        self.third = nn.Linear(53, DIM, bias=False)

    def predict(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.third(x) * self.scale + self.shift + self.empty.sum() + self.flat.sum()


class OnlyScalar(Regression):
    """A whole model of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.3))

    def predict(self, x: Tensor) -> Tensor:
        return x * self.scale
