"""The models of the benchmarks, by name, with a batch and what repeats in each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Shape:
    """A model and the batch of one rank: ``sequences`` of ``tokens`` each.

    ``inner`` is the width inside the MLP (a GPT's is four times ``dim``), ``num_kv_heads`` as in a Llama; ``memory_gb``
    is what one rank of a contender is taken to need, for how many fit next to each other.
    """

    family: str
    vocab: int
    dim: int
    depth: int
    num_heads: int
    tokens: int
    sequences: int
    inner: int = 0
    num_kv_heads: int = 0
    memory_gb: float = 1.5


SHAPES: Mapping[str, Shape] = {
    "tiny": Shape("gpt", vocab=512, dim=32, depth=2, num_heads=2, tokens=64, sequences=2, memory_gb=0.5),
    "tiny-llama": Shape("llama", 512, 32, 2, 2, tokens=64, sequences=2, inner=88, num_kv_heads=2, memory_gb=0.6),
    "27m": Shape("gpt", vocab=8192, dim=512, depth=6, num_heads=8, tokens=256, sequences=2, memory_gb=1.2),
    "110m": Shape("gpt", vocab=16_384, dim=768, depth=12, num_heads=12, tokens=256, sequences=2, memory_gb=2.8),
    "llama": Shape("llama", 8192, 512, 6, 8, tokens=256, sequences=2, inner=1408, num_kv_heads=8, memory_gb=1.3),
    # TinyLlama 1.1B (arXiv 2401.02385) and Llama 3 8B (arXiv 2407.21783, table 3), also with a quarter of its layers.
    "llama-1b": Shape(
        "llama", 32_000, 2048, 22, 32, tokens=2048, sequences=4, inner=5632, num_kv_heads=4, memory_gb=30
    ),
    "llama-8b": Shape(
        "llama", 128_256, 4096, 32, 32, tokens=2048, sequences=1, inner=14_336, num_kv_heads=8, memory_gb=80
    ),
    "llama-8b-8": Shape(
        "llama", 128_256, 4096, 8, 32, tokens=2048, sequences=1, inner=14_336, num_kv_heads=8, memory_gb=32
    ),
}


@dataclass(frozen=True)
class Workload:
    """A model with its batch: ``model(**batch)`` gives a loss, or what has one as ``.loss``."""

    model: nn.Module
    batch: dict[str, torch.Tensor]

    @property
    def blocks(self) -> nn.ModuleList:
        """The list of the model's repeated layers."""
        return next(module for module in self.model.modules() if isinstance(module, nn.ModuleList))

    def loss(self, called: Callable[..., Any]) -> torch.Tensor:
        """The loss of the batch under ``called``, which is the model or a wrapper of it."""
        outputs: Any = called(**self.batch)
        value = outputs if isinstance(outputs, torch.Tensor) else outputs.loss
        assert isinstance(value, torch.Tensor)
        return value


def make_workload(shape: Shape, device: torch.device, dtype: torch.dtype, rank: int = 0) -> Workload:
    """The model, the same on every rank, and the batch of ``rank``; no weight is tied to another."""
    return Workload(make_model(shape, device, dtype), make_batch(shape, device, rank))


def make_model(shape: Shape, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The model alone, with the values of seed 0."""
    torch.manual_seed(0)
    with device:
        model = llama(shape) if shape.family == "llama" else _gpt(shape)
    return model.to(dtype)


def make_batch(shape: Shape, device: torch.device, rank: int = 0) -> dict[str, torch.Tensor]:
    """The batch of ``rank``: random tokens, and what is to come of each."""
    ids = torch.randint(shape.vocab, (shape.sequences, shape.tokens + 1), generator=torch.Generator().manual_seed(rank))
    ids = ids.to(device)
    if shape.family == "llama":
        tokens = ids[:, :-1].contiguous()
        return {"input_ids": tokens, "labels": tokens.clone()}
    return {"tokens": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}


def _gpt(shape: Shape) -> nn.Module:
    from gpt import GPT  # of the examples' folder, which workers have on their path

    model = GPT(shape.vocab, shape.dim, shape.depth, shape.num_heads, shape.tokens)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return model


def llama(shape: Shape) -> nn.Module:
    """An unmodified Llama of transformers with random values."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.dim,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.depth,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=shape.tokens,
        use_cache=False,  # the key-value cache is for generating text
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


def model_flops(shape: Shape, num_parameters: int) -> int:
    """FLOPs of one rank's step: 6 N + 12 L d t for each of its tokens (PaLM, arXiv 2204.02311, appendix B).

    N are the parameters but those of the embeddings, L layers, d their width, t tokens of a sequence.
    """
    embeddings = shape.vocab * shape.dim + (shape.tokens * shape.dim if shape.family == "gpt" else 0)
    each = 6 * (num_parameters - embeddings) + 12 * shape.depth * shape.dim * shape.tokens
    return each * shape.sequences * shape.tokens
