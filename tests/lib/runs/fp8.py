"""Train models with products in fp8, by torchao's layers in eager mode and by zerofx's plan, and compare."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerofx
from gpt import GPT
from tests.lib.runs.training import parts, world
from zerofx.choices import Fp8Recipe
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.search.problem import BudgetMissedError

RECIPES: tuple[Fp8Recipe, ...] = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
STEPS = 3
VOCABULARY = 32


def fast_in_fp8(name: str = "cpu") -> Machine:
    """A machine that multiplies in fp8 alone at any speed: whatever CUDA has in fp8 is planned so."""
    machine = Machine.named(name)
    peak = dataclasses.replace(machine.device.peak, float32=1e3, tf32=None, bfloat16=1e3, float16=1e3, fp8=1e15)
    return dataclasses.replace(machine, device=dataclasses.replace(machine.device, peak=peak))


def _gpt() -> nn.Module:
    return GPT(vocab=VOCABULARY, dim=32, depth=2, heads=2, block=16)


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16,
    )  # fmt: skip
    return LlamaForCausalLM(config)


MODELS: Mapping[str, Callable[[], nn.Module]] = {"gpt": _gpt, "llama": _llama}


def build(kind: str, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """A model in ``dtype``, the same on every rank."""
    torch.manual_seed(3)
    return MODELS[kind]().to(dtype)


def convert(model: nn.Module, recipe: str) -> nn.Module:
    """The model with torchao's layers in the place of all linear ones but the last, as the plan has them."""
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    config = Float8LinearConfig.from_recipe_name(recipe)
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and name not in ("head", "lm_head"):
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, Float8Linear.from_float(module, config=config))
    return model


def batches(kind: str, rank: int, steps: int, rows: int = 4) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Batches of 16 tokens in each of ``rows`` rows, of which so many micro-batches have a number that 16 divides."""
    generator = torch.Generator().manual_seed(1000 + rank)
    for _ in range(steps):
        ids = torch.randint(VOCABULARY, (rows, 17), generator=generator)
        first, second = ids[:, :-1].clone(), ids[:, 1:].clone()
        yield ((first, second), {}) if kind == "gpt" else ((), {"input_ids": first, "labels": second})


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW, a tensor at a time."""
    return torch.optim.AdamW(model.parameters(), 0.01, foreach=False)


def loss_of(outputs: Any) -> Tensor:
    """The loss in what a model gives."""
    loss: Tensor = outputs if isinstance(outputs, Tensor) else outputs.loss
    return loss


def train_by_torchao(kind: str, recipe: str, accumulate: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses and parameters of torchao's layers in eager mode; ranks average their gradients."""
    model = convert(build(kind), recipe)
    optimizer, (rank, num_ranks) = optimizer_of(model), world()
    losses = []
    for args, kwargs in batches(kind, rank, STEPS):
        optimizer.zero_grad()
        total: Tensor | None = None
        for part, keywords in parts(args, kwargs, accumulate):
            loss = loss_of(model(*part, **keywords)) / accumulate
            loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        for parameter in model.parameters() if num_ranks > 1 else ():
            assert parameter.grad is not None
            each = [torch.empty_like(parameter.grad) for _ in range(num_ranks)]
            dist.all_gather(each, parameter.grad)
            parameter.grad = sum(each[1:], each[0]) / num_ranks
        optimizer.step()
        assert total is not None
        losses.append(total)
    return losses, {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def compile_in_fp8(kind: str, recipe: Fp8Recipe, model: nn.Module, **options: Any) -> Any:
    """A step whose plan has all products that CUDA has in fp8, within the least budget where that is asked for."""
    low = zerofx.Precision(fp8=recipe)
    given: dict[str, Any] = {"backend": "eager", "machine": fast_in_fp8(), "precision": low, **options}
    if given.get("memory_budget") == "least":
        args, kwargs = next(batches(kind, 0, 1))
        asked = {**given, "memory_budget": 1, "world_size": world()[1]}
        with pytest.raises(BudgetMissedError) as refused:
            zerofx.plan(model, optimizer_of(model), kwargs or args, **asked)
        given["memory_budget"] = int(1.02 * refused.value.least_bytes)
    return zerofx.compile(model, optimizer_of(model), **given)


def unlike_torchao(kind: str, recipe: Fp8Recipe, runs: Mapping[str, dict[str, Any]]) -> dict[str, list[str]]:
    """What is not as with torchao's layers in each of ``runs``, label to options of ``compile``; empty where all is."""
    wrong: dict[str, list[str]] = {}
    plain = {n: train_by_torchao(kind, recipe, n) for n in {each.get("accumulate", 1) for each in runs.values()}}
    for label, options in runs.items():
        expected, values = plain[options.get("accumulate", 1)]
        model = build(kind)
        step = compile_in_fp8(kind, recipe, model, **options)
        losses = [step(*args, **kwargs).clone() for args, kwargs in batches(kind, world()[0], STEPS)]
        with step.full_parameters():
            ours = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        num_low = sum(decision.in_fp8 for decision in step.plan.products)
        step.close()
        unlike = [f"loss {i}: {b}, not {a}" for i, (a, b) in enumerate(zip(expected, losses, strict=True)) if a != b]
        unlike += [name for name, value in values.items() if not torch.equal(value, ours[name])]
        unlike += [] if num_low else ["no product is in fp8"]
        if unlike:
            wrong[f"{kind}, {recipe}, {label}"] = unlike
    return wrong
