"""The tensors that a step is called with, by the names of its placeholders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zerofx.capture.outside import Outside
from zerofx.ir.batch import Batch, micro_batch
from zerofx.ir.facts import Placeholder, Role, placeholder
from zerofx.ir.graph import StepGraph, num_bodies
from zerofx.runtime.state.loss_scaler import LossScaler
from zerofx.runtime.state.state import TrainingState


@dataclass(frozen=True)
class StepArguments:
    """What a step asks for when it is called: what its placeholders stand for, by name, and its constants by theirs."""

    placeholders: Mapping[str, Placeholder]
    constants: Mapping[str, torch.Tensor]
    num_micro_batches: int

    @staticmethod
    def of(step: StepGraph) -> StepArguments:
        """Those of a step after all passes."""
        named = {node.name: placeholder(node) for node in step.placeholders()}
        return StepArguments(named, step.constants, step.num_micro_batches)


def state_tensors(
    step: StepArguments, model: nn.Module, state: TrainingState, outside: Outside, scaler: LossScaler | None = None
) -> dict[str, Any]:
    """Parameters, optimizer states, buffers, constants, the loss's scale, and what is used outside of the model as it
    is now: what stays between steps."""
    buffers = dict(model.named_buffers())
    tensors: dict[str, Any] = {}
    for name, facts in step.placeholders.items():
        if facts.role is Role.BUFFER:
            tensors[name] = buffers[facts.name]
        elif facts.role is Role.CONSTANT:
            constant = step.constants[facts.name]
            # What another rank has captured is on that rank's device.
            tensors[name] = constant if constant.device.type == "cpu" else constant.to(state.device)
        elif facts.role is Role.OUTSIDE:
            tensors[name] = outside.tensor(facts.name)
        elif facts.role is Role.RANK:
            tensors[name] = torch.tensor([state.number_along(facts.name)], device=state.device)
        elif facts.role is Role.HOST_RANK:
            tensors[name] = torch.tensor(state.number_along(facts.name))
        elif facts.role is Role.LOSS_SCALE:
            assert scaler is not None, "a step whose loss is scaled has a scale"
            tensors[name] = scaler.tensor(getattr(torch, facts.name), state.device)
        elif facts.bucket is not None:
            tensors[name] = state.buckets[facts.bucket].value(facts.role, facts.name)
    return tensors


def batch_tensors(step: StepArguments, batch: Batch, compute_dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """The batch's tensors, or the parts of them that are micro-batches; floating-point ones cast to ``compute_dtype``
    if there is one. Of a loop over micro-batches each round has its own, whose number is part of the key."""
    by_name = dict(zip(batch.names, batch.tensors, strict=True))
    tensors = {}
    for name, facts in step.placeholders.items():
        if facts.role is not Role.INPUT:
            continue
        whole = by_name[facts.name].detach()
        cast = compute_dtype is not None and whole.is_floating_point()
        for key, part in _parts(name, facts.part, step.num_micro_batches):
            tensor = whole if part is None else micro_batch(whole, part, step.num_micro_batches)
            tensors[key] = tensor.to(compute_dtype) if cast else tensor
    return tensors


def _parts(name: str, body: int | None, num_micro_batches: int) -> Iterator[tuple[str, int | None]]:
    """What a placeholder of a batch's tensor in a body stands for: keys, and the micro-batches that they are for."""
    if body is None or num_micro_batches == num_bodies(num_micro_batches):
        yield name, body
    elif body == 1:
        for turn in range(num_micro_batches - 2):
            yield f"{name}[{turn}]", turn + 1
    else:
        yield name, 0 if body == 0 else num_micro_batches - 1
