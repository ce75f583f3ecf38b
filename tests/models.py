"""Models that are easy to get wrong, each with its batches: what the exactness tests train."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from gpt import GPT

DIM = 8
ROWS = 4

BatchOf = Callable[[torch.Generator], tuple[tuple[Any, ...], dict[str, Any]]]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW over all parameters, a tensor at a time."""
    return torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)


@dataclass(frozen=True)
class Case:
    """A model, its batches, and how it is trained.

    Batches are drawn from the generator given, so that every rank and step has its own. `loss` is how a person would
    find the loss in what the model returns (and in the batch, where the model leaves it to a loss function).
    """

    model: Callable[[], nn.Module]
    batch: BatchOf
    loss: Callable[[Any], Tensor] = lambda outputs: outputs
    loss_fn: Callable[..., Tensor] | None = None
    find_unused: bool = False
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw
    steps: int = 20
    tags: frozenset[str] = field(default_factory=frozenset)


def rows(generator: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Features [ROWS, DIM] and targets of the same shape."""
    x = torch.randn(ROWS, DIM, generator=generator)
    return (x, torch.randn(ROWS, DIM, generator=generator)), {}


def tokens(generator: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Token ids [2, 7] below 19, and the ids that follow."""
    ids = torch.randint(19, (2, 8), generator=generator)
    return (ids[:, :-1], ids[:, 1:]), {}


def images(generator: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Images [4, 3, 8, 8] and classes below 5."""
    x = torch.randn(4, 3, 8, 8, generator=generator)
    return (x, torch.randint(5, (4,), generator=generator)), {}


def labelled(generator: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What language models of transformers take: `input_ids` [2, 8] below 32 and `labels`, by keyword."""
    ids = torch.randint(1, 32, (2, 8), generator=generator)
    return (), {"input_ids": ids, "labels": ids.clone()}


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


class ManyArguments(Stack):
    """Positional and keyword arguments, nested containers, and leaves that are no tensors."""

    def forward(  # type: ignore[override]  # a batch of another form
        self, x: Tensor, parts: list[Any], *, target: dict[str, Any], repeat: int, mode: str, mask: Tensor | None = None
    ) -> Tensor:
        for _ in range(repeat):
            x = self.predict(x)
        if mode == "shift":
            x = x + parts[0] * parts[1]["scale"]
        if mask is not None:
            x = x * mask
        flag, values = target["pair"]
        return F.mse_loss(x, values) if flag else x.sum()


def many_arguments(generator: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    (x, y), _ = rows(generator)
    shift = torch.randn(DIM, generator=generator)
    return (x, [shift, {"scale": 0.5}]), {
        "target": {"pair": (True, y), "name": "y"}, "repeat": 2, "mode": "shift", "mask": None,
    }  # fmt: skip


@dataclass
class Output:
    loss: Tensor
    logits: Tensor


class Returning(Stack):
    """Returns its loss in a container."""

    def __init__(self, wrap: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__(1)
        self.wrap = wrap

    def forward(self, x: Tensor, y: Tensor) -> Any:
        logits = self.predict(x)
        return self.wrap(F.mse_loss(logits, y), logits)


class Predicting(Stack):
    """Returns predictions only; the loss is a function of them and the batch."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # a batch of another form
        return self.predict(x)


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


class FlatLoss(Stack):
    """Its loss is a view of a prediction."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.predict(x)[:1, :1].view(())


class SharedModule(Regression):
    """One module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Layer()
        self.middle = nn.Linear(DIM, DIM)
        self.decoder = self.encoder

    def predict(self, x: Tensor) -> Tensor:
        return self.decoder(self.middle(self.encoder(x)))


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


class Parametrised(Regression):
    """Weights that are computed from other parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(parametrizations.weight_norm(nn.Linear(DIM, DIM)) for _ in range(3))

    def predict(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


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


def decayed(model: nn.Module) -> torch.optim.Optimizer:
    """Weight decay for matrices alone, and a learning rate of its own for norms: three groups inside one layer."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    norms = [p for name, p in model.named_parameters() if "norm" in name]
    biases = [p for name, p in model.named_parameters() if p.dim() <= 1 and "norm" not in name]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": biases, "weight_decay": 0.0},
        {"params": norms, "weight_decay": 0.0, "lr": 0.003, "betas": (0.8, 0.99)},
    ]
    return torch.optim.AdamW(groups, lr=0.01, foreach=False)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)


def _mse(outputs: Tensor, _x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(outputs, y)


def _loss(outputs: Any) -> Tensor:
    found: Tensor = outputs.loss
    return found


def _gpt() -> nn.Module:
    return GPT(vocab=19, dim=16, depth=3, heads=2, block=7)


def _llama(**options: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, **options,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _gpt2(dropout: float = 0.0) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=dropout, embd_pdrop=dropout,
        attn_pdrop=dropout, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(  # type: ignore[call-arg]  # its base class takes the rest
        vocab_size=32, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def _bert(dropout: float = 0.0) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=16, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return BertForMaskedLM(config)


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(  # type: ignore[call-arg]  # its base class takes the rest
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, image_size=8, patch_size=4,
        num_labels=5,
    )  # fmt: skip
    return ViTForImageClassification(config)


def _pixels(generator: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    (x, y), _ = images(generator)
    return (), {"pixel_values": x, "labels": y}


def _masked(generator: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    _, batch = labelled(generator)
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, 5:] = 0
    return (), {**batch, "attention_mask": mask}


CASES: dict[str, Case] = {
    "gpt": Case(_gpt, tokens),
    "batchnorm": Case(Convolutions, images),
    "stack": Case(Stack, rows),
    "tied": Case(Tied, tokens),
    "lora": Case(Lora, rows),
    "frozen": Case(Frozen, rows),
    "unused": Case(Unused, rows, find_unused=True),
    "repeated": Case(Repeated, rows),
    "odd sizes": Case(Odd, rows),
    "one scalar": Case(OnlyScalar, rows),
    "channels last": Case(lambda: Convolutions(channels_last=True), images),
    "buffers": Case(Buffered, rows),
    "swapped buffers": Case(Swapped, rows),
    "arguments": Case(ManyArguments, many_arguments),
    "returns dict": Case(lambda: Returning(lambda a, b: {"logits": b, "loss": a}), rows, lambda o: o["loss"]),
    "returns tuple": Case(lambda: Returning(lambda a, b: (a, b)), rows, lambda o: o[0]),
    "returns list": Case(lambda: Returning(lambda a, b: [b, a]), rows, lambda o: o[1]),
    "returns dataclass": Case(lambda: Returning(Output), rows, _loss),
    "loss function": Case(Predicting, rows, loss_fn=_mse),
    "borrowed": Case(Borrowed, rows),
    "peeking": Case(lambda: Peeking(5), rows),
    "view as loss": Case(FlatLoss, rows),
    "shared module": Case(SharedModule, rows),
    "mixed dtypes": Case(MixedDtypes, rows),
    "mixed in layer": Case(MixedInLayer, rows),
    "parametrised": Case(Parametrised, rows),
    "param groups": Case(Stack, rows, optimizer=decayed),
    "dropout": Case(Dropping, rows),
    "evaluating": Case(lambda: nn.Module.eval(Convolutions()), images),
    "evaluating dropout": Case(lambda: nn.Module.eval(Dropping()), rows),
    "torch layers": Case(Everything, tokens),
    "image layers": Case(Zoo, images),
    "llama": Case(_llama, labelled, _loss),
    "gpt2": Case(_gpt2, labelled, _loss),
    "gpt2 dropout": Case(lambda: _gpt2(0.1), labelled, _loss),
    "llama masked": Case(lambda: _llama(tie_word_embeddings=True), _masked, _loss, steps=8),
    "t5": Case(_t5, labelled, _loss, steps=8),
    "bert": Case(_bert, _masked, _loss, steps=8),
    "bert dropout": Case(lambda: _bert(0.1), labelled, _loss, steps=8),
    "vit": Case(_vit, _pixels, _loss, steps=8),
}


def batches(case: Case, rank: int, steps: int) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """`steps` batches of their own for `rank`, the same in every run."""
    generator = torch.Generator().manual_seed(1000 + rank)
    for _ in range(steps):
        yield case.batch(generator)
