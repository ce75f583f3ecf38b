"""Gradients by name, of a step and in eager mode."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import zerofx
from tests.lib.models import CASES, Case
from tests.lib.runs.adversarial import average_gradients
from tests.lib.runs.evaluating import own_batches
from tests.lib.runs.training import build, world


def unlike_eager_mode(name: str, stage: int, bound: float = 0.0, **options: Any) -> list[str]:
    """What of the gradients of a step is not as in eager mode, in words; and of a training that keeps none.

    ``bound``: how far they may be apart, of the largest.
    """
    case: Case = CASES[name]
    plain, kept, without = (build(case) for _ in range(3))
    optimizer = case.optimizer(plain)
    options = {"loss_fn": case.loss_fn, "backend": "eager", **options}
    keeping = zerofx.compile(kept, case.optimizer(kept), stage, keep_gradients=("*",), **options)
    other = zerofx.compile(without, case.optimizer(without), stage, **options)
    wrong: list[str] = []
    for args, kwargs in own_batches(case, world()[0] // options.get("mesh", {}).get("model", 1), 2):
        optimizer.zero_grad()
        outputs = plain(*args, **kwargs) if case.loss_fn is None else case.loss_fn(plain(args[0]), *args)
        (case.loss(outputs) if case.loss_fn is None else outputs).backward()
        average_gradients(plain)
        same = torch.equal(keeping(*args, **kwargs), other(*args, **kwargs))
        wrong += [] if same else ["the loss is another than without gradients"]
        for path, parameter in plain.named_parameters():
            assert parameter.grad is not None
            with keeping.full(path, "grad") as gradient:
                apart = (gradient - parameter.grad).abs().max()
            wrong += [] if apart <= bound * parameter.grad.abs().max() else [f"{path} is {apart} apart"]
        if "max_grad_norm" in options:
            nn.utils.clip_grad_norm_(plain.parameters(), options["max_grad_norm"])
        optimizer.step()
    measured = keeping.measure(*args, num_steps=1, **kwargs).peak_bytes
    return wrong + ([] if measured == keeping.plan.peak_bytes else [f"{measured}, not {keeping.plan.peak_bytes}"])
