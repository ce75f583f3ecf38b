"""Batches of any length on several ranks, which are padded to one length in each step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutput

import zerofx
from tests.lib.compiling import needs_compiler
from tests.lib.distributed import run_ranks
from tests.lib.runs.sharing import SHARING
from tests.lib.runs.training import world
from tests.lib.users import adamw
from zerofx import RankMismatchError, UsageError

TOKENS = 64
SIZES: dict[str, Any] = {
    "vocab_size": TOKENS, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 64,
}  # fmt: skip


def _llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=1))


def _bert() -> nn.Module:
    return BertForMaskedLM(BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


class Pooled(nn.Module):
    """Tokens see one another, as far as a mask lets them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(TOKENS, 8), nn.Linear(8, TOKENS)

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> Any:
        x = self.embed(input_ids)
        weights = torch.ones_like(x[..., :1]) if attention_mask is None else attention_mask.unsqueeze(-1)
        logits = self.head(x + (x * weights).sum(1, keepdim=True) / weights.sum(1, keepdim=True))
        return CausalLMOutput(loss=F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits=logits)


MODELS = {"llama": (_llama, 1), "bert": (_bert, 0), "pooled": (Pooled, 0)}


def batch_of(number: int, rank: int, shift: int) -> dict[str, Tensor]:
    """Other lengths on each rank, labels left out among them, and now and then fewer samples."""
    generator = torch.Generator().manual_seed(10 * number + rank)
    length = int(torch.randint(3, 33, (), generator=generator))
    samples = 4 if (number + rank) % 3 else 3
    ids = torch.randint(TOKENS, (samples, length), generator=generator)
    labels = ids.clone()
    labels[:, : shift + number % 2] = -100
    return {"input_ids": ids, "labels": labels}


def _trained(name: str, options: dict[str, Any]) -> list[str]:
    """What differs from the mean over all tokens of all ranks, in eager mode without padding."""
    rank, num_ranks = world()
    if "model" in options.get("mesh", {}):  # whose ranks share the computation of one batch
        rank, num_ranks = 0, 1
        options = options | {"machine": SHARING}
    make, shift = MODELS[name]
    torch.manual_seed(0)
    model = make()
    plain = copy.deepcopy(model)
    optimizer = adamw(plain)

    def terms(input_ids: Tensor, labels: Tensor) -> Tensor:
        return (labels[:, shift:] != -100).sum(-1)

    step = zerofx.compile(model, adamw(model), backend="eager", lengths=32, loss_terms=terms, **options)
    wrong = []
    for number in range(1, 6):
        mine = batch_of(number, rank, shift)
        optimizer.zero_grad()
        count = sum(int(terms(**batch_of(number, other, shift)).sum()) for other in range(num_ranks))
        expected = plain(**mine).loss * int(terms(**mine).sum()) / count
        expected.backward()
        for parameter in plain.parameters():
            assert parameter.grad is not None
            if num_ranks > 1:
                dist.all_reduce(parameter.grad)
        optimizer.step()
        loss = step(**mine) / num_ranks
        total, wanted = loss.clone(), expected.detach().clone()
        if num_ranks > 1:
            dist.all_reduce(total)
            dist.all_reduce(wanted)
        if not torch.allclose(total, wanted, rtol=1e-5, atol=0):
            wrong.append(f"step {number}: a loss of {float(total)}, not {float(wanted)}")
    if len({rung.length for rung in step.rungs}) > 8 or {rung.samples for rung in step.rungs} - {4}:
        wrong.append(f"rungs of {[(rung.length, rung.samples) for rung in step.rungs]}")
    return wrong


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("pooled", {"stage": 2, "accumulate": 2}),
        *(
            pytest.param("pooled", {"stage": 1, "mesh": mesh, "accumulate": number}, marks=pytest.mark.slow)
            for mesh in ({"shard": 2}, {"replicate": 2}, {"model": 2})
            for number in (1, 2)
        ),
        pytest.param("llama", {"stage": 1, "accumulate": 4}, marks=pytest.mark.slow),
        pytest.param("llama", {"stage": 3}, marks=pytest.mark.slow),
        pytest.param("bert", {"stage": 3}, marks=pytest.mark.slow),
    ],
)
def test_losses_are_means_over_all_tokens_of_all_ranks(name: str, options: dict[str, Any]) -> None:
    for rank, wrong in enumerate(run_ranks(_trained, 2, name, options)):
        assert wrong == [], f"rank {rank}"


def _refused() -> list[str]:
    """What both ranks are told where one has a batch that is too long, or none that can be padded."""
    rank, _ = world()
    texts = []
    torch.manual_seed(0)
    model = Pooled()
    step = zerofx.compile(model, adamw(model), backend="eager", lengths=(8, 16))
    ids = torch.randint(TOKENS, (2, 20 if rank else 5))
    with pytest.raises(UsageError) as too_long:
        step(input_ids=ids, labels=ids)
    texts.append(str(too_long.value))
    ids = torch.randint(TOKENS, (2, 12 if rank else 5))
    step(input_ids=ids, labels=ids)
    with pytest.raises((UsageError, RankMismatchError)) as malformed:
        step(input_ids=ids, labels=ids[:, : 3 + 2 * rank])
    texts.append(str(malformed.value))
    return texts


def test_all_ranks_are_told_of_a_batch_that_one_of_them_has() -> None:
    of_ranks = run_ranks(_refused, 2)
    assert all("at most 16 tokens, the longest of lengths=, found one of 20" in texts[0] for texts in of_ranks)
    assert all("expected labels of shape" in texts[1] for texts in of_ranks)


def _evaluated(name: str) -> list[str]:
    """What differs in evaluations of batches that have other lengths on each rank."""
    rank, _ = world()
    make, shift = MODELS[name]
    torch.manual_seed(0)
    model = make()
    step = zerofx.compile(model, adamw(model), 3, backend="eager", lengths=32)
    step(**batch_of(0, rank, shift))
    wrong = []
    for number in range(4):
        mine = batch_of(number, rank, shift)
        found = step.evaluate(**mine)
        with step.full_parameters(), torch.no_grad():
            model.eval()
            expected = model(**mine)
            model.train()
        for what in ("loss", "logits"):
            value, wanted = found[what], expected[what]
            if value.shape != wanted.shape or not torch.allclose(value, wanted, rtol=1e-5, atol=1e-5):
                wrong.append(f"batch {number}: {what} {value} is not {wanted}")
    if step.evaluation.plan.stage != 3:
        wrong.append("evaluated at another stage")
    return wrong


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", ["pooled", pytest.param("llama", marks=pytest.mark.slow), "bert"])
def test_ranks_evaluate_batches_of_their_own_lengths(name: str) -> None:
    for rank, wrong in enumerate(run_ranks(_evaluated, 2, name)):
        assert wrong == [], f"rank {rank}"


def _compiled() -> list[str]:
    """What differs from eager mode where kernels are shared, and built before the first step runs."""
    rank, _ = world()
    make, _ = MODELS["pooled"]
    torch.manual_seed(0)
    model = make()
    plain = copy.deepcopy(model)
    optimizer = adamw(plain)
    step = zerofx.compile(model, adamw(model), 2, lengths=(16, 32))
    wrong = []
    for number, length in enumerate((32, 10, 20)):
        ids = torch.randint(TOKENS, (4, length), generator=torch.Generator().manual_seed(10 * number + rank))
        optimizer.zero_grad()
        expected = plain(ids, ids).loss
        expected.backward()
        for parameter in plain.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= 2
        optimizer.step()
        loss = step(input_ids=ids, labels=ids)
        if not torch.allclose(loss, expected, rtol=1e-4):
            wrong.append(f"step {number}: a loss of {float(loss)}, not {float(expected)}")
    evaluated = step.evaluate(input_ids=ids, labels=ids).logits
    if evaluated.shape != (4, 20, TOKENS):
        wrong.append(f"logits of shape {list(evaluated.shape)}")
    return wrong


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@needs_compiler
def test_ranks_share_the_kernels_of_rungs() -> None:
    for rank, wrong in enumerate(run_ranks(_compiled, 2)):
        assert wrong == [], f"rank {rank}"
