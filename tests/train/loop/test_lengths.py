"""Batches of any length: padded to few, with the losses that they have unpadded."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerofx
from gpt import GPT
from tests.lib.runs.pairs import compile_eager
from tests.lib.users import TOKENS, Tiny, adamw, eager_step, ids, tiny, untouched
from zerofx import MemoryBudgetError, UsageError

LENGTHS = (4, 8, 16)


class Pooled(nn.Module):
    """Tokens see one another: each is classified by itself and by all."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(TOKENS, 8), nn.Linear(16, TOKENS)

    def pooled(self, x: Tensor, attention_mask: Tensor | None) -> Tensor:
        if attention_mask is None:
            return x.mean(1, keepdim=True)
        weights = attention_mask.unsqueeze(-1).to(x.dtype)
        return (x * weights).sum(1, keepdim=True) / weights.sum(1, keepdim=True).clamp(min=1)

    def forward(self, ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        logits = self.head(torch.cat([x, self.pooled(x, attention_mask).expand_as(x)], -1))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Averaged(Tiny):
    """The mean over all positions, which no label leaves out."""

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        logits: Tensor = self.outputs(ids)
        return logits.square().mean()


class Weighted(Tiny):
    """A loss that a mask of the batch weighs."""

    def forward(self, ids: Tensor, labels: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        assert labels is not None and mask is not None
        losses = -self.outputs(ids).log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        return (losses * mask).sum() / mask.sum()


class Normed(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0] = nn.Sequential(_Channels(4), nn.Linear(4, 4))


class _Channels(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class OfSamples(nn.Module):
    """A number for each sample, compared with the mean of its tokens' own: no label is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, 4)

    def forward(self, ids: Tensor, mask: Tensor, wanted: Tensor) -> Tensor:
        means = (self.embed(ids).sum(-1) * mask).sum(1) / mask.sum(1)
        return F.mse_loss(means, wanted)


def _batch(seed: int, rows: int, length: int, model: nn.Module) -> dict[str, Tensor]:
    batch = {"ids": ids(seed, rows, length), "labels": ids(-seed, rows, length)}
    if isinstance(model, Weighted):
        batch["mask"] = torch.ones(rows, length)
    if isinstance(model, OfSamples):
        del batch["labels"]
        batch |= {"mask": torch.ones(rows, length), "wanted": torch.randn(rows)}
    return batch


def _made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return make()


@pytest.mark.sweep(1)
@pytest.mark.parametrize("make", [pytest.param(Tiny, marks=pytest.mark.slow), Pooled, Weighted, OfSamples])
def test_losses_are_those_of_eager_mode_without_padding(make: Callable[[], nn.Module]) -> None:
    model, plain = _made(make), _made(make)
    optimizer = adamw(plain)
    step = compile_eager(model, adamw(model), lengths=LENGTHS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed, (rows, length) in enumerate([(3, 5), (3, 16), (3, 1), (2, 7), (3, 8), (1, 3), (3, 12), (3, 2)]):
            batch = _batch(seed, rows, length, model)
            loss = step(**batch)
            expected = eager_step(plain, optimizer, **batch)
            assert torch.allclose(loss, expected, rtol=1e-5, atol=0), (seed, loss, expected)
    with step.full_parameters():
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-6)
    masks_samples = make is not OfSamples
    assert {(rung.length, rung.samples) for rung in step.rungs} == {(16, 3), (8, 3), (4, 3)} | (
        set() if masks_samples else {(8, 2), (4, 1)}
    )


def test_preparing_builds_all_rungs_and_the_report_has_a_row_for_each() -> None:
    model = tiny()
    step = compile_eager(model, adamw(model), lengths={4: 6, 8: 3, 16: 2}, memory_budget="1MiB")
    step.prepare(**_batch(0, 3, 5, model))
    assert [(rung.length, rung.samples, rung.num_steps) for rung in step.rungs] == [(4, 6, 0), (8, 3, 0), (16, 2, 0)]
    step(**_batch(0, 5, 3, model))
    assert [rung.num_steps for rung in step.rungs] == [1, 0, 0]
    text = str(step)
    assert "tokens a second" in text
    assert "the longest that fits memory_budget: 16 of lengths=" in text
    assert step.metrics["step"] == 1


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Averaged, "the loss of 2 samples of 3 tokens is .*, and .* when they are padded to 2 samples of 4 tokens"),
        (Normed, "layers.0.0 normalises by the statistics of all tokens"),
    ],
)
def test_a_model_whose_padding_would_count_is_told_so(make: Callable[[], nn.Module], why: str) -> None:
    model = _made(make)
    optimizer = adamw(model)
    step = compile_eager(model, optimizer, lengths=LENGTHS)
    with untouched(model, optimizer), pytest.raises(UsageError, match=f"(?s)batches can be padded.*{why}"):
        step(**_batch(0, 2, 5, model))


def test_a_layer_that_does_nothing_yet_is_seen_through() -> None:
    class Later(Pooled):
        """What tokens see of one another is multiplied by zero at first."""

        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(8))

        def pooled(self, x: Tensor, attention_mask: Tensor | None) -> Tensor:
            return super().pooled(x, None) * self.scale

    model = _made(Later)
    step = compile_eager(model, adamw(model), lengths=LENGTHS)
    with pytest.raises(UsageError, match="for which padding counts"):
        step(**_batch(0, 2, 5, model))


def test_generators_are_left_as_they_were_by_a_trial() -> None:
    class Drawing(Tiny):
        """In evaluation mode, as it is tried, a forward draws from every generator, to no effect."""

        def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
            if not self.training:
                drawn.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
            return super().forward(ids, labels)

    drawn: list[tuple[float, ...]] = []
    model = _made(Drawing)
    step = compile_eager(model, adamw(model), lengths=LENGTHS)
    batch = _batch(0, 2, 5, model)
    before = str([random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state().tolist()])
    step.prepare(**batch)
    assert len(drawn) > 1 and len(set(drawn)) == 1
    assert before == str([random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state().tolist()])


def test_a_batch_longer_than_the_longest_is_refused_and_nothing_is_changed() -> None:
    model = tiny()
    optimizer = adamw(model)
    step = compile_eager(model, optimizer, lengths=LENGTHS)
    with untouched(model, optimizer), pytest.raises(UsageError, match=r"at most 16 tokens.*found one of 17"):
        step(**_batch(0, 2, 17, model))
    step(**_batch(0, 2, 16, model))
    with pytest.raises(UsageError, match=r"at most 16 tokens.*found one of 20"):
        step(**_batch(0, 2, 20, model))
    step(**_batch(1, 2, 3, model))
    assert step.num_steps == 2


def test_the_longest_that_fits_a_budget_is_said_before_training() -> None:
    def peak(length: int) -> int:
        model = tiny()
        step = compile_eager(model, adamw(model), tile="none", recompute="none")
        step.prepare(**_batch(0, 2, length, model))
        return step.plan.peak_bytes["device"]

    model = tiny()
    optimizer = adamw(model)
    options: dict[str, Any] = {"tile": "none", "recompute": "none", "memory_budget": (peak(64) + peak(128)) // 2}
    step = compile_eager(model, optimizer, lengths=(32, 64, 128, 256), **options)
    with (
        untouched(model, optimizer),
        pytest.raises(MemoryBudgetError, match="the longest that fits is 64, not 256: give lengths up to 64"),
    ):
        step.prepare(**_batch(0, 2, 50, model))
    step.close()
    step = compile_eager(model, optimizer, lengths=(32, 64), **options)
    step.prepare(**_batch(0, 2, 50, model))
    assert max(rung.plan.peak_bytes["device"] for rung in step.rungs) <= options["memory_budget"]
    measured = [step.measure(num_steps=1, **_batch(0, 2, length, model)).peak_bytes["device"] for length in (20, 64)]
    assert max(measured) <= options["memory_budget"]


@pytest.mark.days(3)
def test_what_the_longest_has_on_the_host_stays_there_for_all() -> None:
    def made() -> GPT:
        torch.manual_seed(0)
        return GPT(vocab=64, dim=32, depth=3, heads=2, block=32)

    x, y = (torch.randint(64, (4, 32)) for _ in range(2))
    model, plain = made(), made()
    optimizer = adamw(plain)
    free_model = made()
    free = compile_eager(free_model, adamw(free_model))
    free.prepare(x, y)
    budget = int(0.5 * free.plan.peak_bytes["device"])
    step = compile_eager(model, adamw(model), lengths=(8, 32), memory_budget=budget, offload="host")
    step.prepare(x, y)
    homes = [
        sorted((found.bucket, found.tier) for decisions in (plan.states, plan.parameters) for found in decisions)
        for plan in (rung.plan for rung in step.rungs)
    ]
    assert homes[0] == homes[1] != []
    for length in (32, 5, 30, 8):
        batch = x[:, :length].contiguous(), y[:, :length].contiguous()
        assert torch.allclose(step(*batch), eager_step(plain, optimizer, *batch), rtol=1e-5, atol=0)
    for length in (5, 32, 8):
        measured = step.measure(x[:, :length].contiguous(), y[:, :length].contiguous(), num_steps=1)
        assert measured.peak_bytes == step.plan.peak_bytes
        assert measured.peak_bytes["device"] <= budget


def _terms(ids: Tensor, labels: Tensor) -> Tensor:
    return (labels != -100).sum(-1)


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.slow), 2, 4])
def test_a_smaller_last_batch_is_the_mean_over_its_tokens_in_any_micro_batches(accumulate: int) -> None:
    model, plain = tiny(), tiny()
    optimizer = adamw(plain)
    step = compile_eager(model, adamw(model), lengths=LENGTHS, accumulate=accumulate, loss_terms=_terms)
    for seed, rows in enumerate([4, 3, 1, 4, 2]):
        batch = _batch(seed, rows, 6 + seed, model)
        batch["labels"][0, : 3 + seed] = -100
        assert torch.allclose(step(**batch), eager_step(plain, optimizer, **batch), rtol=1e-5, atol=0)
    assert {rung.samples for rung in step.rungs} == {4}


def test_a_smaller_batch_in_micro_batches_asks_for_their_terms() -> None:
    model = tiny()
    step = compile_eager(model, adamw(model), lengths=LENGTHS, accumulate=2)
    step(**_batch(0, 4, 6, model))
    with pytest.raises(UsageError, match=r"expected loss_terms with lengths= and accumulate=2"):
        step(**_batch(0, 3, 6, model))


@pytest.mark.parametrize("make", [Tiny, Pooled])
def test_micro_batches_of_other_lengths_are_one_update(make: Callable[[], nn.Module]) -> None:
    model, plain = _made(make), _made(make)
    optimizer = adamw(plain)
    step = compile_eager(model, adamw(model), lengths=LENGTHS, accumulate=2, loss_terms=_terms)
    for seed in range(2):
        parts = [_batch(seed, 2, 5, model), _batch(seed + 9, 1 + seed, 9, model)]
        for part in parts:
            step.micro(**part)
        optimizer.zero_grad()
        count = sum(part["labels"].numel() for part in parts)
        loss = torch.stack([plain(**part) * part["labels"].numel() / count for part in parts]).sum()
        loss.backward()
        optimizer.step()
        assert torch.allclose(step.update(), loss.detach(), rtol=1e-5, atol=0)


def test_where_tokens_are_is_told_from_the_first_batch() -> None:
    class Wide(Tiny):
        def forward(self, ids: Tensor, labels: Tensor | None = None, wide: Tensor | None = None) -> Any:
            assert wide is not None
            return super().forward(ids, labels) + wide.square().mean() * 0

    model = _made(Wide)
    step = compile_eager(model, adamw(model), lengths=LENGTHS)
    step(**_batch(0, 2, 4, model), wide=torch.randn(2, 4))
    with pytest.raises(UsageError, match=r"expected wide of shape \[2, 6\] .*found \[2, 4\]"):
        step(**_batch(0, 2, 6, model), wide=torch.randn(2, 4))
    with pytest.raises(UsageError, match="found more"):
        step(**_batch(0, 2, 6, model), wide=torch.randn(2, 6), more=torch.randn(2, 6))


def test_auto_goes_up_to_the_first_batch() -> None:
    model = tiny()
    step = compile_eager(model, adamw(model), lengths="auto")
    step.prepare(**_batch(0, 2, 4, model))
    assert [rung.length for rung in step.rungs] == [1, 2, 3, 4]
    with pytest.raises(UsageError, match=r"at most 4 tokens.*prepare the step with the longest batch first"):
        step(**_batch(0, 2, 5, model))


@pytest.mark.parametrize("where", ["empty_init", "meta"])
@pytest.mark.parametrize("make", [Pooled, Averaged])
def test_a_model_without_values_is_tried_too(where: str, make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(3)
    with zerofx.empty_init() if where == "empty_init" else torch.device("meta"):
        model = make()
    step = compile_eager(model, adamw(model), lengths=LENGTHS)
    if make is Averaged:
        with pytest.raises(UsageError, match="for which padding counts"):
            step(**_batch(0, 2, 5, model))
        return
    loss = step(**_batch(0, 2, 5, model))
    assert loss.isfinite()
    with step.full_parameters():
        assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_what_does_not_go_with_lengths() -> None:
    model = tiny()
    with pytest.raises(UsageError, match="two dimensions or more"):
        compile_eager(model, adamw(model), lengths=16)(ids()[0], labels=ids()[0])
