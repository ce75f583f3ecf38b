"""The graph of a third size is made of those of two, to the last name; where it does not follow, it is captured."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt import GPT
from zerofx.capture.by_layer.by_layer import capture_by_layer
from zerofx.capture.by_size import KnownSizes
from zerofx.capture.trace import capture_forward
from zerofx.capture.traceable import Forward
from zerofx.ir.batch import Batch
from zerofx.ir.serialise import same_graph

VOCAB = 48
MADE, CAPTURED = "made of what was captured at other sizes", ""
Size = tuple[int, int]


def small() -> nn.Module:
    """Its width, its vocabulary and the product of samples and tokens are lengths too."""
    return GPT(vocab=VOCAB, dim=16, depth=2, heads=2, block=64)


def deep() -> nn.Module:
    return GPT(vocab=VOCAB, dim=8, depth=9, heads=2, block=64)


class Tokens(nn.Module):
    """Embeds tokens and does what a subclass says."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.mixed(self.embed(ids)))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def mixed(self, x: Tensor) -> Tensor:
        return x


class Shifted(Tokens):
    """Pads, drops, looks up by position, and attends with a mask made of the length."""

    def mixed(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        mask = places[:, None] >= places
        x = x + F.dropout(F.pad(x, (0, 0, 1, 0))[:, :-1], 0.5)
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)


class Averaged(Tokens):
    """Divides by the length as a fraction, which stands in the graph."""

    def mixed(self, x: Tensor) -> Tensor:
        return x * (1 / x.shape[1])


class Halved(Tokens):
    """Does otherwise below a length."""

    def mixed(self, x: Tensor) -> Tensor:
        return x.sin() if x.shape[1] < 12 else x.cos()


def transformers_llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64,
    )  # fmt: skip
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def batch_of(model: nn.Module, size: Size) -> Batch:
    ids = torch.zeros(size, dtype=torch.long)
    if isinstance(model, GPT):
        return Batch.from_call((ids, ids), {})
    return Batch.from_call((), {"ids" if isinstance(model, Tokens) else "input_ids": ids, "labels": ids})


def said_of_last(make: Callable[[], nn.Module], sizes: list[Size]) -> str:
    """How the last of some sizes was captured; its graph is the one that a capture gives."""
    torch.manual_seed(0)
    model, known = make(), KnownSizes()
    said: list[str] = []
    for size in sizes:
        said.clear()
        whole = Forward(model, batch_of(model, size))
        graph = capture_by_layer(whole, say=said.append, sizes=known)
    assert same_graph(graph, capture_forward(whole))
    return next((text for text in said if text == MADE), CAPTURED)


WIDTH = [(3, 32), (3, 24), (3, 16)]  # a length that the width is
SIZES = [
    WIDTH,
    [(3, 32), (3, 24), (3, 48)],  # one that the vocabulary is
    [(2, 24), (3, 16), (6, 8)],  # as many tokens in each batch
]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("make", [small, Shifted, transformers_llama])
@pytest.mark.parametrize("sizes", SIZES)
def test_a_third_size_follows_from_two(make: Callable[[], nn.Module], sizes: list[Size]) -> None:
    assert said_of_last(make, sizes) == MADE


@pytest.mark.days(3)
@pytest.mark.parametrize("sizes", [WIDTH, *(pytest.param(each, marks=pytest.mark.slow) for each in SIZES[1:])])
def test_a_third_size_of_a_deep_model_follows_from_two(sizes: list[Size]) -> None:
    assert said_of_last(deep, sizes) == MADE


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("make", "sizes"),
    [
        (small, [(3, 32), (3, 24), (3, 1)]),  # operators broadcast a length of one
        (small, [(3, 32), (3, 24), (2, 16)]),  # samples have not varied before
        (Averaged, [(3, 32), (3, 24), (3, 16)]),
        (Halved, [(3, 32), (3, 24), (3, 8)]),
    ],
)
def test_what_does_not_follow_is_captured(make: Callable[[], nn.Module], sizes: list[Size]) -> None:
    assert said_of_last(make, sizes) == CAPTURED
