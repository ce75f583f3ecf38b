"""Train a case with zerofx, or without it, and compare what comes out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map

import zerofx
from tests.lib.models import CASES, Case, Layer, batches, rows


@dataclass(frozen=True)
class Trained:
    """This rank's losses, the model's whole state after the last step, and each step's norm of all gradients if they
    were clipped."""

    losses: list[Tensor]
    state: dict[str, Tensor]
    norms: list[Tensor] = field(default_factory=list)


def world() -> tuple[int, int]:
    """`(rank, number of ranks)`."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def build(case: Case) -> nn.Module:
    """The case's model, with the same values on every rank and in every run."""
    torch.manual_seed(7)
    return case.model()


def train_plain(
    case: Case,
    steps: int | None = None,
    accumulate: int = 1,
    max_grad_norm: float | None = None,
    *,
    each: bool = False,
) -> Trained:
    """Eager training under `DistributedDataParallel`, or by itself where there is one rank.

    With `accumulate` each batch is divided into as many micro-batches, whose gradients add up as in any loop that does
    so; ranks reduce them once, or `each` micro-batch's by themselves. With `max_grad_norm` torch clips the gradients to
    it.
    """
    rank, num_ranks = world()
    model = build(case)
    optimizer = case.optimizer(model)
    runner: nn.Module = model
    if num_ranks > 1:
        runner = DistributedDataParallel(model, find_unused_parameters=case.find_unused)
    torch.manual_seed(rank)
    losses, norms = [], []
    for args, kwargs in batches(case, rank, steps or case.steps):
        optimizer.zero_grad()
        total = torch.zeros(())
        sums: list[Tensor | None] = []
        for number, (part, keywords) in enumerate(parts(args, kwargs, accumulate)):
            wait = isinstance(runner, DistributedDataParallel) and number < accumulate - 1
            with runner.no_sync() if wait else contextlib.nullcontext():  # type: ignore[operator]  # of DDP alone
                if case.loss_fn is None:
                    loss = case.loss(runner(*part, **keywords))
                else:
                    loss = case.loss_fn(runner(part[0]), *part, **keywords)
                loss = loss / accumulate
                loss.backward()
            if each:
                sums = _reduced(model, sums, wait=wait)
            total = loss.detach().clone() if number == 0 else total + loss.detach()
        for parameter, gradient in zip(model.parameters(), sums, strict=False):
            parameter.grad = gradient
        if max_grad_norm is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm))
        optimizer.step()
        losses.append(total)
    return Trained(losses, {name: tensor.clone() for name, tensor in model.state_dict().items()}, norms)


def _reduced(model: nn.Module, sums: list[Tensor | None], *, wait: bool) -> list[Tensor | None]:
    """`sums` and the gradients that the last backward has left in a model, which is then without; ranks average them
    here if they `wait` for `DistributedDataParallel` to do so."""
    found: list[Tensor | None] = []
    for number, parameter in enumerate(model.parameters()):
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None and wait:
            dist.all_reduce(gradient)
            gradient = gradient / world()[1]
        before = sums[number] if sums else None
        found.append(gradient if before is None or gradient is None else before + gradient)
    return found


def parts(
    args: tuple[Any, ...], kwargs: dict[str, Any], count: int
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The batch in `count` equal parts: tensors whose first size is that of the first tensor are divided along it."""
    num_rows = next(leaf.shape[0] for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
    for number in range(count):

        def part(leaf: Any, number: int = number) -> Any:
            divided = isinstance(leaf, Tensor) and leaf.shape[:1] == (num_rows,)
            return leaf.chunk(count)[number] if divided else leaf

        yield tree_map(part, args), tree_map(part, kwargs)


def train_compiled(case: Case, stage: int, steps: int | None = None, **options: Any) -> Trained:
    """Training through `zerofx.compile`; the eager backend unless `options` say otherwise."""
    rank, _ = world()
    model = build(case)
    torch.manual_seed(rank)
    step = zerofx.compile(model, case.optimizer(model), stage, loss_fn=case.loss_fn, **{"backend": "eager", **options})
    losses, norms = [], []
    for args, kwargs in batches(case, rank, steps or case.steps):
        losses.append(step(*args, **kwargs).clone())
        norms += [] if options.get("max_grad_norm") is None else [step.grad_norm]
    return Trained(losses, step.full_state_dict(), norms)


def step_of(name: str, stage: int = 0, **options: Any) -> tuple[zerofx.Step, tuple[Any, ...]]:
    """A step of a case, on the eager backend unless ``options`` differ, and what its first batch gives by position."""
    case = CASES[name]
    model = build(case)
    ((args, _),) = batches(case, world()[0], 1)
    options = {"loss_fn": case.loss_fn, "backend": "eager", **options}
    return zerofx.compile(model, case.optimizer(model), stage, **options), args


def plan_of(name: str, **options: Any) -> zerofx.PlannedStep:
    """The plan of a case's step, for a CPU and the eager backend unless ``options`` differ."""
    case = CASES[name]
    model = build(case)
    ((args, _),) = batches(case, 0, 1)
    return zerofx.plan(model, case.optimizer(model), args, **{"machine": "cpu", "backend": "eager", **options})


def differences(expected: Trained, found: Trained, tolerance: float = 0.0) -> list[str]:
    """What is not the same, in words; `tolerance` is relative to the largest value of a tensor."""
    pairs = {f"loss {i}": pair for i, pair in enumerate(zip(expected.losses, found.losses, strict=True))}
    if expected.state.keys() != found.state.keys():
        return [f"names {sorted(expected.state.keys() ^ found.state.keys())}"]
    if len(expected.norms) != len(found.norms):
        return [f"{len(expected.norms)} norms and {len(found.norms)}"]
    pairs |= {f"norm {i}": pair for i, pair in enumerate(zip(expected.norms, found.norms, strict=True))}
    pairs |= {name: (expected.state[name], found.state[name]) for name in expected.state}
    pairs = {name: (a.cpu(), b.cpu()) for name, (a, b) in pairs.items()}
    return [
        f"{name} {_distance(a, b):.1e}" if a.shape == b.shape else f"{name} {list(a.shape)} {list(b.shape)}"
        for name, (a, b) in pairs.items()
        if not _close(a, b, tolerance)
    ]


def _close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) if not tolerance else a.numel() == 0 or _distance(a, b) <= tolerance


def without_key_biases(trained: Trained) -> Trained:
    """Softmax takes their gradients away: Adam divides what is left of them, which is rounding, by itself."""
    thirds = {name: value.chunk(3) for name, value in trained.state.items() if name.endswith("attention.qkv.bias")}
    kept = {name: torch.cat([query, value]) for name, (query, _key, value) in thirds.items()}
    return replace(trained, state=trained.state | kept)


def _distance(a: Tensor, b: Tensor) -> float:
    if not a.numel():
        return 0.0
    largest = a.double().abs().max().clamp(min=1e-30)
    return float((a.double() - b.double()).abs().max() / largest)


def compare_runs(
    names: Iterable[str],
    runs: Mapping[str, dict[str, Any]],
    tolerance: float = 0.0,
    steps: int | None = None,
    accumulate: int = 1,
    *,
    each: bool = False,
) -> dict[str, list[str]]:
    """Train each case plainly and in each of `runs` (label to options of `compile`); what went wrong, by case and run.

    All of them take `accumulate` micro-batches before an update, of which `each` is reduced, or all at once. Runs on
    every rank; a failure is recorded, and the next case runs.
    """
    found: dict[str, list[str]] = {}
    for name in names:
        case = CASES[name]
        expected = train_plain(case, steps, accumulate, each=each)
        for label, options in runs.items():
            try:
                reduce = "each" if each else "once"
                found_here = train_compiled(
                    case, steps=steps, **{"accumulate": accumulate, "reduce": reduce, **options}
                )
                wrong = differences(expected, found_here, tolerance)
            except zerofx.ZeroFXError as error:
                wrong = [f"{type(error).__name__}: {error}"]
            if wrong:
                found[f"{name}, {label}"] = wrong
    return found


class _Applied(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = Layer()
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.function(self.layer(x)).square().mean() + F.mse_loss(self.layer(x), y)


def compare_function(function: Callable[[Tensor], Tensor]) -> list[str]:
    """What differs from eager mode when a layer is trained through `function`, on one rank."""
    case = Case(lambda: _Applied(function), rows, steps=4)
    return differences(train_plain(case), train_compiled(case, 3))
