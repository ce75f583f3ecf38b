"""Train models with weights in few bits, in eager mode and with zerofx, and compare what comes out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerofx
from tests.lib.models import batches, tokens
from tests.lib.models.cases import Case, adamw
from tests.lib.models.low_bits import Tuned, dora, flat, four_bits, fp8, int8, nf4, stateful
from tests.lib.runs.training import parts, world
from zerofx.ir.tensor_parts import named_buffers, named_parameters
from zerofx.scheduler.search.problem import BudgetMissedError

MAKERS: Mapping[str, Callable[[int, int], nn.Module]] = {
    "flat": flat,
    "stateful": stateful,
    "nf4": nf4,
    "int8": int8,
    "bitsandbytes": four_bits(double=False),
    "bitsandbytes, double": four_bits(double=True),
    "DoRA": dora(double=False),
    "DoRA, double": dora(double=True),
}
OF_LIBRARIES = {
    "nf4": ["torchao"],
    "int8": ["torchao"],
    "bitsandbytes": ["bitsandbytes"],
    "bitsandbytes, double": ["bitsandbytes"],
    "DoRA": ["bitsandbytes", "peft"],
    "DoRA, double": ["bitsandbytes", "peft"],
}
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
BFLOAT16 = {
    "flat": flat,
    "bitsandbytes": four_bits(double=False, dtype=torch.bfloat16),
    "bitsandbytes, double": four_bits(double=True, dtype=torch.bfloat16),
    **{f"fp8, {recipe}": fp8(recipe) for recipe in RECIPES},
}
STEPS = 3


def need(kind: str) -> None:
    """Skip the test where the libraries that a kind of weight is of are not installed."""
    for library in OF_LIBRARIES.get(kind, ()):
        pytest.importorskip(library, reason="its weights are tried too, where it is installed")


def build(kind: str, *, low: bool = False, **sizes: int) -> nn.Module:
    """A model with weights of a kind, the same on every rank; computed in bfloat16 if it is ``low``."""
    torch.manual_seed(3)
    make, dtype = (BFLOAT16[kind], torch.bfloat16) if low else (MAKERS[kind], torch.float32)
    return Tuned(make, 0.1, dtype, **sizes)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW over what is trained."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.01, foreach=False)


def values_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all tensors of a model, those of parameters in parts each by itself."""
    named = (*named_parameters(model), *named_buffers(model))
    return {name: tensor.detach().as_subclass(Tensor).clone() for name, tensor in named}


def train_eagerly(kind: str, accumulate: int, *, low: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses of this rank's batches, and all values after the last step; ranks average their gradients."""
    model = build(kind, low=low)
    optimizer = optimizer_of(model)
    torch.manual_seed(world()[0])
    losses = []
    for args, kwargs in batches(Case(nn.Identity, tokens, optimizer=adamw), world()[0], STEPS):
        optimizer.zero_grad()
        total: Tensor | None = None
        for part, _ in parts(args, kwargs, accumulate):
            loss = model(*part) / accumulate
            loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        _average_gradients(model)
        optimizer.step()
        assert total is not None
        losses.append(total)
    return losses, values_of(model)


def _average_gradients(model: nn.Module) -> None:
    """Mean gradients of all ranks, each summed in rank order."""
    ranks = world()[1]
    for parameter in model.parameters() if ranks > 1 else ():
        if parameter.grad is not None:
            each = [torch.empty_like(parameter.grad) for _ in range(ranks)]
            dist.all_gather(each, parameter.grad)
            parameter.grad = sum(each[1:], each[0]) / ranks


def options_within(options: Mapping[str, Any], kind: str, *, low: bool) -> dict[str, Any]:
    """The options, with the least budget that lets a step run where they ask for ``"least"``."""
    if options.get("memory_budget") != "least":
        return dict(options)
    model = build(kind, low=low)
    args, _ = next(batches(Case(nn.Identity, tokens), 0, 1))
    asked = {name: value for name, value in options.items() if name != "memory_budget"}
    with pytest.raises(BudgetMissedError) as refused:
        zerofx.plan(
            model, optimizer_of(model), args, machine="cpu", backend="eager", world_size=world()[1], memory_budget=1,
            **asked,
        )  # fmt: skip
    return {**options, "memory_budget": int(1.02 * refused.value.least_bytes)}


def unlike_eager_mode(kind: str, runs: Mapping[str, dict[str, Any]], *, low: bool = False) -> dict[str, list[str]]:
    """What is not as in eager mode in each of ``runs``, label to options of ``compile``; empty where all is."""
    found: dict[str, list[str]] = {}
    plain = {n: train_eagerly(kind, n, low=low) for n in {each.get("accumulate", 1) for each in runs.values()}}
    for label, options in runs.items():
        expected, values = plain[options.get("accumulate", 1)]
        model = build(kind, low=low)
        before = {name: type(parameter) for name, parameter in model.named_parameters()}
        step = zerofx.compile(model, optimizer_of(model), backend="eager", **options_within(options, kind, low=low))
        torch.manual_seed(world()[0])
        case = Case(nn.Identity, tokens)
        losses = [step(*args).clone() for args, _ in batches(case, world()[0], STEPS)]
        with step.full_parameters():
            shown = values_of(model)
        step.close()
        wrong = [f"loss {i}: {b}, not {a}" for i, (a, b) in enumerate(zip(expected, losses, strict=True)) if a != b]
        for when, ours in (("", shown), (" once it is closed", values_of(model))):
            assert ours.keys() == values.keys()
            wrong += [f"{name}{when}" for name, value in values.items() if not torch.equal(value, ours[name])]
        if {name: type(parameter) for name, parameter in model.named_parameters()} != before:
            wrong.append("parameters are of other classes")
        if wrong:
            found[f"{kind}, {label}"] = wrong
    return found


def fp8_unlike_eager_mode(recipe: str, runs: Mapping[str, dict[str, Any]]) -> dict[str, list[str]]:
    """What is not as in eager mode where products are in fp8, as ``unlike_eager_mode``."""
    return unlike_eager_mode(f"fp8, {recipe}", runs, low=True)


@dataclass(frozen=True)
class Counts:
    """Bytes of a step at stage 3: sent, and at the peak, as planned and as counted."""

    wire: tuple[int, int]
    peak: tuple[int, int]


def counts(kind: str, **sizes: int) -> Counts:
    """What a step with weights of a kind sends and takes; ``"bfloat16"`` for plain ones."""
    model = Tuned(_plain, 0.1, torch.bfloat16, **sizes) if kind == "bfloat16" else build(kind, low=True, **sizes)
    step = zerofx.compile(model, optimizer_of(model), backend="eager")
    given, _ = next(batches(Case(nn.Identity, tokens), world()[0], 1))
    args = [tensor.clone() for tensor in given]  # each in memory of its own
    torch.manual_seed(world()[0])
    step(*args)
    measured = step.measure(*args)
    plan = step.plan
    step.close()
    return Counts((plan.wire_bytes, measured.wire_bytes), (plan.peak_bytes["device"], measured.peak_bytes["device"]))


def _plain(out: int, inside: int) -> nn.Module:
    return nn.Linear(inside, out, bias=False, dtype=torch.bfloat16).requires_grad_(False)
