"""Every model with its batches, and how it is trained: what the exactness tests run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt import GPT
from tests.lib.models.batches import BatchOf, images, labelled, many_arguments, masked, pixels, rows, tokens
from tests.lib.models.calls import FlatLoss, ManyArguments, Output, Predicting, Returning
from tests.lib.models.huggingface import bert, gpt2, llama, mixtral, qwen3_next, t5, vit
from tests.lib.models.operators import Convolutions, Dropping, Everything, Zoo
from tests.lib.models.parameters import (
    Borrowed,
    Frozen,
    Lora,
    Odd,
    OnlyScalar,
    Parametrised,
    Peeking,
    Repeated,
    SharedModule,
    Stack,
    Tied,
    Unused,
)
from tests.lib.models.values import Buffered, MixedDtypes, MixedInLayer, Swapped


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW over all parameters, a tensor at a time."""
    return torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)


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


def _mse(outputs: Tensor, _x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(outputs, y)


def _loss(outputs: Any) -> Tensor:
    found: Tensor = outputs.loss
    return found


def _gpt() -> nn.Module:
    return GPT(vocab=19, dim=16, depth=3, heads=2, block=7)


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
    "llama": Case(llama, labelled, _loss),
    "gpt2": Case(gpt2, labelled, _loss),
    "gpt2 dropout": Case(lambda: gpt2(0.1), labelled, _loss),
    "llama masked": Case(lambda: llama(tie_word_embeddings=True), masked, _loss, steps=8),
    "qwen3 next": Case(qwen3_next, labelled, _loss, steps=8),
    "mixtral": Case(mixtral, labelled, _loss, steps=8),
    "t5": Case(t5, labelled, _loss, steps=8),
    "bert": Case(bert, masked, _loss, steps=8),
    "bert dropout": Case(lambda: bert(0.1), labelled, _loss, steps=8),
    "vit": Case(vit, pixels, _loss, steps=8),
}


def batches(case: Case, rank: int, steps: int) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """`steps` batches of their own for `rank`, the same in every run."""
    generator = torch.Generator().manual_seed(1000 + rank)
    for _ in range(steps):
        yield case.batch(generator)
