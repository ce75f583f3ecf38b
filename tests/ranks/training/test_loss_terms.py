"""A loss that counts its terms is the mean over those of all micro-batches and ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerofx
from tests.lib.distributed import run_ranks
from tests.lib.runs.training import world
from zerofx import UsageError

ROWS, LENGTH, CLASSES = 12, 6, 7


class Tagger(nn.Module):
    """Logits for each token, and the mean loss of those with a label."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.embedding(tokens)))
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return losses / (labels != -100).sum().clamp(min=1)


def valid_tokens(tokens: Tensor, labels: Tensor) -> Tensor:
    return (labels != -100).sum(-1)


def batch(step: int = 0) -> tuple[Tensor, Tensor]:
    """Rows with 0 to 6 labels, in an order that leaves micro-batches very unlike."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(CLASSES, (ROWS, LENGTH), generator=generator)
    labels = torch.randint(CLASSES, (ROWS, LENGTH), generator=generator)
    keep = torch.arange(LENGTH) < torch.tensor([0, 0, 0, 1, 6, 6, 2, 6, 5, 6, 6, 1])[:, None]
    return tokens, torch.where(keep, labels, -100)


def _step(
    stage: int, accumulate: int, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[Tagger, zerofx.Step]:
    torch.manual_seed(0)
    model = Tagger().to(dtype)
    given = {"backend": "eager", "loss_terms": valid_tokens, "accumulate": accumulate, **options}
    return model, zerofx.compile(model, torch.optim.SGD(model.parameters(), lr=0.5), stage, **given)


def _train(stage: int, accumulate: int, options: dict[str, Any], dtype: torch.dtype = torch.float32) -> list[float]:
    """How far the trained parameters are from those trained on the whole batch at once; and the losses."""
    rank, num_ranks = world()
    torch.manual_seed(0)
    plain = Tagger().to(dtype)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    _, step = _step(stage, accumulate, dtype, **options)
    apart = []
    for number in range(3):
        whole = batch(number)
        loss = plain(*whole)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        own = step(*(tensor.chunk(num_ranks)[rank] for tensor in whole))
        mean = sum(run_sum(float(own))) / num_ranks
        apart.append(abs(mean - float(loss.detach())))
    with step.full_parameters() as model:
        apart += [
            float((a - b).detach().abs().max()) for a, b in zip(model.parameters(), plain.parameters(), strict=True)
        ]
    return apart


def run_sum(value: float) -> list[float]:
    if world()[1] == 1:
        return [value]
    values: list[Any] = [None] * world()[1]
    torch.distributed.all_gather_object(values, value)
    return values


@pytest.mark.parametrize(("stage", "accumulate"), [(0, 1), (3, 2), (3, 6)])
def test_one_process_trains_as_on_one_large_batch(stage: int, accumulate: int) -> None:
    assert max(_train(stage, accumulate, {})) < 1e-6


def test_a_loss_in_float64_is_weighed_in_float64() -> None:
    assert max(_train(0, 6, {}, torch.float64)) < 1e-14


def _all() -> list[list[float]]:
    return [
        _train(stage, accumulate, options)
        for stage, accumulate, options in (
            (0, 1, {}), (1, 2, {"reduce": "once"}), (2, 3, {}), (3, 6, {}), (3, 6, {"reduce": "once"}),
        )
    ]  # fmt: skip


def test_two_ranks_train_as_on_one_large_batch() -> None:
    for found in run_ranks(_all, 2):
        assert max(map(max, found)) < 1e-6


def test_without_counts_they_do_not() -> None:
    assert max(_train(0, 6, {"loss_terms": None})) > 1e-2


def test_low_precision_rounds_no_counts() -> None:
    _, step = _step(0, 2, precision="bf16")
    step(*batch())
    counts = [tensor for tensor in step.compiled.arguments.placeholders.values() if "terms" in tensor.name]
    assert len(counts) == 3
    text = step.stages[0].text
    assert "terms" in text and "bfloat16[] input **['terms" not in text
    step.close()


def test_a_plan_for_it_is_taken() -> None:
    model = Tagger()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    plan = zerofx.plan(
        model, optimizer, batch(), machine="cpu", accumulate=2, loss_terms=valid_tokens, backend="eager"
    ).plan
    step = zerofx.compile(
        model, optimizer, plan=plan, machine="cpu", accumulate=2, loss_terms=valid_tokens, backend="eager"
    )
    step(*batch())
    assert step.plan.decisions_hash() == plan.decisions_hash()


def test_micro_batches_one_by_one_are_counted_too() -> None:
    one, other = (_step(0, 3)[1] for _ in range(2))
    for parts in zip(*(tensor.chunk(3) for tensor in batch()), strict=True):
        one.micro(*parts)
    assert torch.equal(one.update(), other(*batch()))


@pytest.mark.parametrize(
    ("loss_terms", "message"),
    [
        (lambda tokens, labels: (labels != -100).sum(), r"shape \[12\], found torch.int64 \[\]"),
        (lambda tokens, labels: (labels != -100).float().sum(-1), r"found torch.float32 \[12\]"),
        (lambda tokens, labels: 3, "found int"),
    ],
)
def test_what_counts_no_terms_is_refused(loss_terms: Any, message: str) -> None:
    model, step = _step(0, 1, loss_terms=loss_terms)
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(UsageError, match=message):
        step(*batch())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
