"""The norms of each layer's gradients, of a step and in eager mode."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import zerofx
from tests.lib.models import CASES, Case
from tests.lib.runs.adversarial import average_gradients
from tests.lib.runs.evaluating import own_batches
from tests.lib.runs.training import build, world


def in_eager_mode(model: nn.Module, layers: list[str]) -> dict[str, float]:
    """By layer, or by the modules between layers that are named together: the norm of what `backward` has left."""
    squares = dict.fromkeys(layers, 0.0)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        (layer,) = (layer for layer in layers if any(f"{name}.".startswith(f"{part}.") for part in layer.split("+")))
        squares[layer] += parameter.grad.double().square().sum().item()
    return {layer: total**0.5 for layer, total in squares.items()}


def unlike_eager_mode(name: str, stage: int, **options: Any) -> list[str]:
    """What of the norms of layers is not as in eager mode, in words, step by step; and of a training without them."""
    case: Case = CASES[name]
    models = [build(case) for _ in range(3)]
    plain, *ours = models
    optimizer = case.optimizer(plain)
    step, without = (
        zerofx.compile(
            model, case.optimizer(model), stage, loss_fn=case.loss_fn, grad_norms=asks, backend="eager", **options
        )
        for model, asks in zip(ours, (True, False), strict=True)
    )
    wrong: list[str] = []
    for args, kwargs in own_batches(case, world()[0], 2):
        optimizer.zero_grad()
        outputs = plain(*args, **kwargs) if case.loss_fn is None else case.loss_fn(plain(args[0]), *args)
        loss = case.loss(outputs) if case.loss_fn is None else outputs
        loss.backward()
        average_gradients(plain)
        same = torch.equal(step(*args, **kwargs), without(*args, **kwargs))
        wrong += [] if same else ["the loss is another than without norms"]
        found = {key.removeprefix("grad_norm/"): n for key, n in step.metrics.items() if key.startswith("grad_norm/")}
        expected = in_eager_mode(plain, list(found))
        wrong += [
            f"{layer}: {found[layer]}, not {n}" for layer, n in expected.items() if abs(found[layer] - n) > 1e-6 * n
        ]
        limit = options.get("max_grad_norm")
        if limit is not None:
            total = sum(n**2 for n in found.values()) ** 0.5
            wrong += [] if abs(total - step.grad_norm) < 1e-5 * total else [f"together {total}, not {step.grad_norm}"]
            nn.utils.clip_grad_norm_(plain.parameters(), limit)
        optimizer.step()
    measured = step.measure(*args, num_steps=1, **kwargs).peak_bytes
    return wrong + ([] if measured == step.plan.peak_bytes else [f"{measured} are taken, not {step.plan.peak_bytes}"])
