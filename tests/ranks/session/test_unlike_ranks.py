"""Each thing in which ranks may differ has words of its own: what was expected, which rank has another, what to do."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerofx
from tests.lib.distributed import run_ranks
from zerofx import RankMismatchError

pytestmark = pytest.mark.filterwarnings("ignore:a batch of another:zerofx.errors.ZeroFXNotice")


class Read(nn.Module):
    """Reads plain values and a function of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.0)
        self.kinds = {"first": "mean", "other": "none"}
        self.act: Callable[[Tensor], Tensor] = _same

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.act(self.inner(x)))
        loss: Tensor = y.mean() if self.kinds["first"] == "mean" else y.sum()
        return loss


def _same(x: Tensor) -> Tensor:
    return x


def _doubled(x: Tensor) -> Tensor:
    return x * 2


def _is_last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


@contextmanager
def _last_has(values: Any, key: Any, value: Any) -> Iterator[None]:
    """While open, the last rank has another value under ``key``."""
    before = values[key]
    values[key] = value if _is_last() else before
    try:
        yield
    finally:
        values[key] = before


def _disagree() -> dict[str, str]:
    os.environ["ZEROFX_TIMEOUT"] = "60"
    model = Read()
    groups: list[dict[str, Any]] = [{"params": [model.inner.weight]}, {"params": [model.inner.bias], "lr": 0.5}]
    optimizer = torch.optim.AdamW(groups, lr=0.1, foreach=False)
    step = zerofx.compile(model, optimizer, backend="eager", accumulate=2)
    texts: dict[str, str] = {}

    def refused(name: str, call: Callable[[], Any] = lambda: step(torch.ones(2, 4))) -> None:
        before = step.num_steps
        with pytest.raises(RankMismatchError) as caught:
            call()
        texts[name] = str(caught.value)
        assert step.num_steps == before

    step(torch.ones(2, 4))
    step.evaluate(torch.ones(2, 4))
    refused("shape", lambda: step(torch.ones(4 if _is_last() else 2, 4)))
    refused("dtype", lambda: step(torch.ones(2, 4, dtype=torch.float64 if _is_last() else torch.float32)))
    refused("evaluated", lambda: step.evaluate(torch.ones(4 if _is_last() else 2, 4)))
    model.drop.train(not _is_last())
    refused("mode")
    model.drop.train()
    with torch.autocast("cpu", torch.bfloat16, enabled=_is_last()):
        refused("autocast")
    with _last_has(optimizer.param_groups[1], "lr", 0.25):
        refused("lr")
    with _last_has(optimizer.param_groups[0], "maximize", True):
        refused("maximize")
    with _last_has(optimizer.param_groups[0], "amsgrad", True), pytest.raises(zerofx.ZeroFXError) as refusal:
        step(torch.ones(2, 4))
    assert isinstance(refusal.value, zerofx.OptimizerError if _is_last() else RankMismatchError), refusal.value
    assert _is_last() or "raise OptimizerError: expected AdamW.step() to run with" in str(refusal.value)
    model.inner.bias.requires_grad_(not _is_last())
    refused("frozen")
    model.inner.bias.requires_grad_()
    with _last_has(model.kinds, "first", "sum"):
        refused("value")
        refused("evaluated value", lambda: step.evaluate(torch.ones(2, 4)))
    with _last_has(vars(model), "act", _doubled):
        refused("function")
    for _ in range(1 if _is_last() else 2):
        step.micro(torch.ones(1, 4))
    refused("micro-batches", lambda: step.update(partial=True))
    refused("order", lambda: step.evaluate(torch.ones(2, 4)) if _is_last() else step(torch.ones(2, 4)))
    step(torch.ones(2, 4))
    assert step.num_steps == 2
    return texts


@pytest.mark.sweep(1)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_are_told_in_what_they_differ_and_which_of_them(num_ranks: int) -> None:
    of_ranks = run_ranks(_disagree, num_ranks)
    assert all(texts == of_ranks[0] for texts in of_ranks)
    usual, last = "rank 0" if num_ranks == 2 else "ranks 0, 1", f"rank {num_ranks - 1}"
    expected = {
        "shape": ("shapes, dtypes and constants of a batch", "batch[0]: float32[2, 4] on cpu",
                  "batch[0]: float32[4, 4] on cpu", "by padding"),
        "dtype": ("shapes, dtypes and constants of a batch", "batch[0]: float32[2, 4] on cpu",
                  "batch[0]: float64[2, 4] on cpu", "by padding"),
        "mode": ("training mode and settings of torch", "training mode: train",
                 "training mode: train, but eval in drop", "model.eval()"),
        "autocast": ("training mode and settings of torch", "autocast to: none", "autocast to: torch.bfloat16 on cpu",
                     "torch.autocast"),
        "lr": ("optimizer options", "lr of param group 1: 0.5", "lr of param group 1: 0.25", "scheduler"),
        "maximize": ("optimizer options", "maximize of param group 0: False", "maximize of param group 0: True",
                     "alike"),
        "frozen": ("parameters to be trained", "those of the step before", "inner.bias to be frozen", "requires_grad"),
        "value": ("Python values for the forward to read", "model.kinds['first']: 'mean'",
                  "model.kinds['first']: 'sum'", "pass what is to differ by rank as a tensor"),
        "function": ("Python values for the forward to read", "model.act: _same (line", "model.act: _doubled (line",
                     "alike"),
        "micro-batches": ("number of micro-batches", "number of micro-batches: as accumulate= says",
                          "number of micro-batches: 1", "step.micro(batch)"),
        "order": ("call", "call step(batch)", "call step.evaluate(batch)", "in the same order"),
    }  # fmt: skip
    expected |= {"evaluated": expected["shape"], "evaluated value": expected["value"]}
    assert of_ranks[0].keys() == expected.keys()
    for name, (what, most, other, advice) in expected.items():
        pattern = (
            rf"expected the same {re.escape(what)} on every rank, found another on {last}:\n"
            rf"  {usual}: {re.escape(most)}.*\n  {last}: {re.escape(other)}(?s:.*)\n.*{re.escape(advice)}"
        )
        assert re.match(pattern, of_ranks[0][name]), of_ranks[0][name]
