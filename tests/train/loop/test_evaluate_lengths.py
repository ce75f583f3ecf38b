"""Evaluations with ``lengths=``: padded to the rungs, with the outputs that batches have without padding."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerofx
from tests.lib.runs.pairs import compile_eager
from tests.lib.users import TOKENS, Tiny, adamw, ids

LENGTHS = (4, 8, 16)
SIZES = [(3, 5), (3, 16), (3, 1), (2, 7), (1, 3), (3, 12), (4, 4)]


class Several(Tiny):
    """Returns a loss, a tensor of each token, one of pairs of tokens, one of each sample, and one of neither."""

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.outputs(ids)
        pairs = (logits @ logits.mT).tril()
        outputs = {
            "logits": logits, "pairs": pairs, "transposed": logits.movedim(1, 0), "first": logits[:, 0],
            "weight": self.head.weight.sum(0), "name": "several",
        }  # fmt: skip
        if labels is None:
            return outputs
        return outputs | {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


class Flat(Tiny):
    """Logits of samples and tokens in one dimension."""

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.outputs(ids).flatten(0, 1)
        return logits if labels is None else F.cross_entropy(logits, labels.flatten())


class Pooled(Tiny):
    """Evaluated, the mean of all positions."""

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.outputs(ids)
        return logits.mean(1) if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def prepared(make: Callable[[], nn.Module], **options: Any) -> tuple[Any, nn.Module]:
    torch.manual_seed(3)
    model = make()
    step = compile_eager(model, adamw(model), lengths=LENGTHS, **options)
    step(ids=ids(0, 3, 16), labels=ids(1, 3, 16))
    return step, model


def in_eager_mode(step: Any, model: nn.Module, batch: dict[str, Tensor]) -> Any:
    with step.full_parameters(), torch.no_grad():
        model.eval()
        outputs = model(**batch)
        model.train()
    return outputs


def check(found: Any, expected: Any) -> None:
    found, expected = (each if isinstance(each, dict) else {"all": each} for each in (found, expected))
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        if isinstance(wanted, Tensor):
            torch.testing.assert_close(found[name], wanted, rtol=1e-5, atol=1e-6)
        else:
            assert found[name] == wanted


# Each two values together before the rest of all three.
SETTINGS = [(Tiny, 0, False), (Tiny, 3, True), (Several, 0, True), (Several, 3, False)]
OTHERS = [(make, stage, not labelled) for make, stage, labelled in SETTINGS]


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("make", "stage", "labelled"), [*SETTINGS, *(pytest.param(*each, marks=pytest.mark.slow) for each in OTHERS)]
)
def test_outputs_are_those_without_padding(make: Callable[[], nn.Module], stage: int, labelled: bool) -> None:
    step, model = prepared(make, stage=stage)
    plans = set()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed, (rows, length) in enumerate(SIZES):
            batch = {"ids": ids(seed, rows, length)} | ({"labels": ids(-seed, rows, length)} if labelled else {})
            check(step.evaluate(**batch), in_eager_mode(step, model, batch))
            plans.add(step.evaluation.source_path)
    assert len(plans) <= 5, "one for each rung, and one for each with more samples than the rung had before"


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Flat, r"output 0 of shape \[6, 11\] is one of \[8, 11\]"),
        (Pooled, r"an output of shape \[2, 11\] of 2 samples of 3 tokens has other values"),
    ],
)
def test_outputs_that_padding_would_change_are_of_batches_without(make: Callable[[], nn.Module], why: str) -> None:
    step, model = prepared(make)
    batch = {"ids": ids(0, 3, 5)}
    with pytest.warns(zerofx.ZeroFXWarning, match=why):
        check(step.evaluate(**batch), in_eager_mode(step, model, batch))


def test_a_longer_batch_than_the_longest_has_a_shape_of_its_own() -> None:
    step, model = prepared(Tiny)
    for length in (5, 20):
        batch = {"ids": ids(0, 3, length)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check(step.evaluate(**batch), in_eager_mode(step, model, batch))
    assert step.evaluate(ids=ids(0, 3, 6)).shape == (3, 6, TOKENS)
