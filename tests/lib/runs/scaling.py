"""Eager training with ``torch.amp.GradScaler``, and with zerofx, whose scales, losses and values are compared."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerofx
from tests.lib.models import CASES, Case, batches
from tests.lib.runs.training import Trained, build, differences, parts, world
from zerofx.choices import PrecisionWord, ReduceDtype

# Small intervals, so that a few steps see growth and back-off.
QUICK: Mapping[str, Any] = {"init_scale": 1024.0, "growth_interval": 4}
SCALE = zerofx.LossScale(**QUICK)


class Spiky(nn.Module):
    """Two layers whose gradient is multiplied by ``1 + spike``, and whose loss is not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor, spike: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        y: Tensor = self.head(x)
        return (y + spike * (y - y.detach())).square().mean()


def spiky_batches(steps: int, rank: int, num_ranks: int, chance: float = 0.15) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of which some, on one rank each, have gradients that float16 does not have."""
    draw, generator = random.Random(11), torch.Generator().manual_seed(rank)
    for _ in range(steps):
        whose = draw.randrange(num_ranks) if draw.random() < chance else None
        yield torch.randn(4, 6, generator=generator), torch.tensor(6e4 if whose == rank else 0.0)


@dataclass(frozen=True)
class Scaled:
    """Training with a scale before each step, and the numbers of the steps that were left out, which have no norms."""

    trained: Trained
    scales: list[float]
    skipped: list[int]


def unlike(expected: Scaled, found: Scaled, tolerance: float = 0.0) -> list[str]:
    """What is not the same, in words."""
    wrong = differences(expected.trained, found.trained, tolerance)
    for what in ("scales", "skipped"):
        one, other = getattr(expected, what), getattr(found, what)
        wrong += [] if one == other else [f"{what}: {one} and {other}"]
    return wrong


def case_batches(name: str, steps: int) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """This rank's batches of a case, or of the spiky model."""
    if name == "spiky":
        return [(batch, {}) for batch in spiky_batches(steps, *world())]
    return list(batches(CASES[name], world()[0], steps))


def case_of(name: str) -> Case:
    """A case by name, the spiky model among them."""
    return Case(Spiky, lambda _: ((), {}), optimizer=CASES["stack"].optimizer) if name == "spiky" else CASES[name]


def train_by_hand(
    name: str,
    steps: int,
    *,
    accumulate: int = 1,
    max_grad_norm: float | None = None,
    low: torch.dtype | None = torch.float16,
    scaling: Mapping[str, Any] = QUICK,
) -> Scaled:
    """A copy in ``low`` of masters in float32, whose gradients are averaged as DistributedDataParallel does, unscaled
    in float32, clipped and applied as the documentation of ``GradScaler`` has it. Without ``low``, one model whose
    forward runs under autocast."""
    case = case_of(name)
    masters = build(case)
    model = masters if low is None else copy.deepcopy(masters).to(low)
    optimizer, scaler = case.optimizer(masters), torch.amp.GradScaler("cpu", **scaling)
    losses, norms, scales, skipped = [], [], [], []
    torch.manual_seed(world()[0])
    for number, (args, kwargs) in enumerate(case_batches(name, steps)):
        scales.append(scaler.get_scale())
        total = torch.zeros(())
        for index, (part, keywords) in enumerate(parts(args, kwargs, accumulate)):
            with torch.autocast("cpu", torch.float16, enabled=low is None):
                loss = case.loss(model(*(_lowered(each, low) for each in part), **keywords)) / accumulate
            scaler.scale(loss).backward()
            total = loss.detach() if index == 0 else total + loss.detach()
        _average(model)
        for master, its_low in zip(masters.parameters(), model.parameters(), strict=True):
            if low is not None:
                assert its_low.grad is not None
                master.grad, its_low.grad = its_low.grad.float(), None
        if max_grad_norm is not None:
            scaler.unscale_(optimizer)
            norms.append(nn.utils.clip_grad_norm_(masters.parameters(), max_grad_norm))
        scaler.step(optimizer)
        scaler.update()
        skipped += [number] if scaler.get_scale() < scales[-1] else []
        norms = norms[:-1] if number in skipped else norms
        optimizer.zero_grad()
        if low is not None:
            with torch.no_grad():
                for master, its_low in zip(masters.parameters(), model.parameters(), strict=True):
                    its_low.copy_(master)
        losses.append(total)
    return Scaled(Trained(losses, dict(masters.state_dict()), norms), scales, skipped)


def _lowered(given: Any, low: torch.dtype | None) -> Any:
    return given.to(low) if low is not None and isinstance(given, Tensor) and given.is_floating_point() else given


def _average(model: nn.Module) -> None:
    """What DistributedDataParallel does: each rank's gradient is divided, and the sum is taken."""
    if dist.is_initialized():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(dist.get_world_size())
            dist.all_reduce(parameter.grad)


def train_scaled(
    name: str,
    stage: int,
    steps: int,
    precision: PrecisionWord | None = "fp16",
    loss_scale: zerofx.LossScale | float | None = SCALE,
    reduce_dtype: ReduceDtype | None = None,
    **options: Any,
) -> Scaled:
    """The same through ``zerofx.compile``, on the eager backend unless ``options`` say otherwise.

    Without a precision the step is called under autocast.
    """
    case = case_of(name)
    model = build(case)
    given = {"backend": "eager", "loss_fn": case.loss_fn, **options}
    given["precision"] = zerofx.Precision(precision, reduce_dtype=reduce_dtype, loss_scale=loss_scale)
    torch.manual_seed(world()[0])
    step = zerofx.compile(model, case.optimizer(model), stage, **given)
    losses, norms, scales, skipped = [], [], [], []
    for number, (args, kwargs) in enumerate(case_batches(name, steps)):
        scales.append(step.loss_scale)
        num_skipped = step.num_skipped
        with torch.autocast("cpu", torch.float16, enabled=precision is None):
            losses.append(step(*args, **kwargs).clone())
        skipped += [number] if step.num_skipped > num_skipped else []
        if given.get("max_grad_norm") is not None:
            assert step.grad_norm.isfinite() == (number not in skipped)
            norms += [step.grad_norm] if number not in skipped else []
    assert step.num_steps + step.num_skipped == steps
    found = Scaled(Trained(losses, step.full_state_dict(), norms), scales, skipped)
    step.close()
    return found
